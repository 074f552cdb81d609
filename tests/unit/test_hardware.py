"""Tests of engine/machine/hardware.py and detect.py: the machine table, and detection on fixture folders."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from isobatch.core.errors import UserError
from isobatch.core.plan import PlanOptions
from isobatch.engine.machine import detect
from isobatch.engine.machine.gpu_table import MACHINES, MIB, find_gpu_model
from isobatch.engine.machine.hardware import GIB, parse_hardware
from isobatch.engine.planning import estimate
from isobatch.engine.planning.choices import choose_device
from isobatch.launch.commands import plan
from isobatch.launch.doctor import machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from isobatch.tests.unit.fake_slurm import Say

GROUP = "proc/self/cgroup"


def fixture(root: Path, **files: str) -> Path:
    """A root with these files (`__` in a name is a slash) and 64 GiB of physical memory."""
    for name, text in {"proc/meminfo": f"MemTotal: {64 * 2**20} kB\n", **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_affinity", lambda: 16)


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "name"),
    [
        ("h100", 1, 1, "h100"),
        ("8xH100", 1, 8, "h100"),
        ("1x4090", 1, 1, "rtx4090"),
        ("4x8xa100-80gb", 4, 8, "a100-80gb"),
    ],
)
def test_counts_are_nodes_times_gpus(text: str, nodes: int, gpus: int, name: str) -> None:
    machine = parse_hardware(text)
    assert (machine.nodes, len(machine.gpus), machine.gpu.name) == (nodes, gpus, name)
    assert machine.devices == nodes * gpus


@pytest.mark.parametrize("name", [*MACHINES])
def test_each_row_is_found_by_its_own_name_and_has_rates_of_its_kind(name: str) -> None:
    machine = parse_hardware(name)
    assert machine.gpu.card == name
    card = machine.gpu
    fp32, half = (card.peak_flops[precision] or 0.0 for precision in ("fp32", "fp16"))
    assert 1.5 < half / fp32 < 40
    assert 100e9 < card.memory_bandwidth < 10e12  # bytes/s
    assert 5e12 < fp32 < 200e12  # FLOP/s


@pytest.mark.parametrize(
    ("seen", "row"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070ti-super"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Quadro P400", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_names_of_nvidia_smi_and_torch(seen: str, row: str | None) -> None:
    found = find_gpu_model(seen)
    assert (found.gpu.name if found else None) == row


@pytest.mark.parametrize("card", [*MACHINES])
def test_memory_ram_and_network_of_any_card_may_be_said(card: str) -> None:
    plain, said = parse_hardware(f"2x4x{card}"), parse_hardware(f"2x4x{card}:20gb:96gb@100gbit")
    assert (said.gpu.memory_bytes, said.ram_bytes, said.node_bandwidth) == (20 * GIB, 96 * GIB, 12.5e9)
    assert (plain.is_network_assumed, said.is_network_assumed) == (True, False)
    assert (said.nodes, len(said.gpus), said.gpu.card) == (plain.nodes, len(plain.gpus), card)
    for word in ("@100", "@100gb/s", "@100 Gbps"):
        assert parse_hardware(f"2x4x{card}{word}").node_bandwidth == 12.5e9


def test_cpu_and_apple_machines() -> None:
    cpu = parse_hardware("cpu:2x24gb")
    assert (cpu.kind, cpu.cpus, cpu.ram_bytes, cpu.gpus) == ("cpu", 2, 24 * GIB, ())
    assert parse_hardware("cpu:128x1.5TB").ram_bytes == parse_hardware("cpu:128x1536gb").ram_bytes
    apple = parse_hardware("mps:32gb")
    assert (apple.kind, apple.gpu.memory_bytes) == ("mps", 24 * GIB)  # three quarters of the RAM


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("8xa100", r"8xa100-40gb \(40 GB\) \| 8xa100-80gb \(80 GB\)"),
        ("banana", r"24 GB: .*rtx4090.*80 GB: .*h100"),
        ("h10", "h100"),
        ("0xh100", "1 to 72"),
        ("cpu:0x2gb", "1 to 4,096"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint) as caught:
        parse_hardware(text)
    assert str(caught.value).startswith(f"--hardware {text}")


def test_cgroup_v2_quota_and_memory_of_a_parent_group_count(tmp_path: Path) -> None:
    root = fixture(
        tmp_path,
        **{
            GROUP: "0::/slice/job\n",
            "sys/fs/cgroup/slice/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slice/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/slice/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/slice/memory.max": "max\n",
        },
    )
    assert detect.allowed_cpus(root, {}) == 2  # 2.5 cores
    assert detect.allowed_ram(root, {}) == 8 * GIB


def test_cgroup_v1_quota_and_memory(tmp_path: Path) -> None:
    root = fixture(
        tmp_path,
        **{
            GROUP: "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{6 * GIB}\n",
        },
    )
    assert detect.allowed_cpus(root, {}) == 4
    assert detect.allowed_ram(root, {}) == 6 * GIB


@pytest.mark.parametrize(
    ("env", "cpus", "ram"),
    [
        ({}, 16, 64 * GIB),
        ({"SLURM_MEM_PER_NODE": "4096"}, 16, 4 * GIB),
        ({"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "4"}, 4, 8 * GIB),
    ],
)
def test_slurm_grants(tmp_path: Path, env: dict[str, str], cpus: int, ram: int) -> None:
    root = fixture(tmp_path)
    assert (detect.allowed_cpus(root, env), detect.allowed_ram(root, env)) == (cpus, ram)


def answers(probe: object = None) -> Callable[[list[str]], str | None]:
    return lambda _: json.dumps(probe) if probe else None


def test_gpus_are_those_that_torch_sees(tmp_path: Path) -> None:
    probe = {
        "architectures": ["sm_75", "sm_80"],
        "devices": [
            ["NVIDIA GeForce RTX 4080 Laptop GPU", 12282 * MIB, 8, 9, ""],
            ["Tesla T4", 15360 * MIB, 7, 5, ""],
            ["NVIDIA H100 MIG 1g.10gb", 10 * GIB, 9, 0, ""],
        ],
    }
    root = fixture(tmp_path, **{"dev/nvidia0": ""})
    laptop, t4, part = detect.detect_gpus({}, answers(probe), root)
    assert (laptop.mobile, laptop.native_bf16, laptop.memory_bytes) == (True, True, 12282 * MIB)
    assert (t4.mobile, t4.native_bf16) == (False, False)
    assert (part.memory_bytes, part.card) == (10 * GIB, None)
    assert [gpu.supported for gpu in (laptop, t4, part)] == [True, True, False]


TORCH = """
class Card:
    name, total_memory, major, minor, gcnArchName = {card!r}, 1 << 30, {major}, 0, {chip!r}

class cuda:
    init = lambda: None
    device_count = lambda: 1
    get_device_properties = lambda _: Card
    get_arch_list = lambda: {built!r}

class version:
    cuda, hip = {cuda!r}, {hip!r}
"""


@pytest.mark.parametrize(
    ("card", "major", "chip", "built", "cuda", "hip"),
    [
        ("NVIDIA H200", 9, "NVIDIA H200", ["sm_80", "sm_90"], "13.0", None),
        ("AMD Instinct MI300X", 9, "gfx942:sramecc+:xnack-", ["gfx90a", "gfx942"], None, "6.4"),
    ],
)
def test_the_probe_asks_for_the_chip_of_amd_alone(
    tmp_path: Path, card: str, major: int, chip: str, built: list[str], cuda: str | None, hip: str | None
) -> None:
    """torch's `gcnArchName` is the chip under ROCm, and the name of the card under CUDA."""
    torch = TORCH.format(card=card, major=major, chip=chip, built=built, cuda=cuda, hip=hip)
    (tmp_path / "torch.py").write_text(torch)

    def execute(words: list[str]) -> str:
        return subprocess.run(
            words, env={"PYTHONPATH": str(tmp_path)}, stdout=-1, text=True, check=True
        ).stdout

    (gpu,) = detect.detect_gpus({}, execute, fixture(tmp_path / "root", **{"dev/nvidia0": ""}))
    assert (gpu.name, gpu.supported) == (card, True)


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((8, 9), ["sm_80"], True),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((7, 0), ["sm_75", "compute_90"], False),
        ((10, 3), ["sm_100a"], False),
    ],
)
def test_which_builds_run_where(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert detect.is_supported(capability, built) is runs


def test_a_machine_without_gpu_asks_torch_nothing(tmp_path: Path) -> None:
    commands: list[str] = []
    root = fixture(
        tmp_path, **{"proc/cpuinfo": "flags\t\t: avx2 avx512_bf16\n", "proc/version": "Linux Microsoft WSL2"}
    )
    machine = detect.detect(root=root, env={}, execute=lambda command: commands.append(command[0]))
    assert commands == []
    assert (machine.kind, machine.cpu_bf16, machine.cpu_amx, machine.wsl) == ("cpu", True, False, True)


@pytest.mark.parametrize(
    ("limit", "bf16", "amx"),
    [
        (None, True, True),
        ("default", True, True),
        ("AVX512_CORE_AMX", True, True),
        ("AVX512_CORE_BF16", True, False),
        ("AVX512_CORE_FP16", True, False),
        ("AVX512_CORE", False, False),
        ("AVX2", False, False),
    ],
)
def test_what_onednn_may_not_use_of_a_processor_is_not_there(
    limit: str | None, bf16: bool, amx: bool, tmp_path: Path
) -> None:
    """The tests plan alike on every processor by it."""
    root = fixture(tmp_path, **{"proc/cpuinfo": "flags : avx2 avx512_bf16 amx_bf16\n"})
    env = {} if limit is None else {"ONEDNN_MAX_CPU_ISA": limit}
    machine = detect.detect(root=root, env=env, execute=lambda _: None)
    assert (machine.cpu_bf16, machine.cpu_amx) == (bf16, amx)


BUILD = {"architectures": ["sm_80", "sm_90"], "build": "13.0"}
H200 = {**BUILD, "devices": [["NVIDIA H200", 141 * 10**9, 9, 0, ""]]}
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by"
    " downloading and installing a new version."
)


@pytest.mark.parametrize("file", ["dev/nvidia0", "dev/dxg", "dev/kfd", "proc/driver/nvidia/version"])
def test_torch_is_asked_where_there_is_a_device_file(tmp_path: Path, file: str) -> None:
    machine = detect.detect(root=fixture(tmp_path, **{file: ""}), env={}, execute=answers(H200))
    assert (machine.kind, machine.gpu.name, machine.gpu.card) == ("cuda", "NVIDIA H200", "h200")


def test_amds_architectures_are_names(tmp_path: Path) -> None:
    seen = {"devices": [["AMD Instinct MI300X", 192 * GIB, 9, 4, "gfx942"]], "build": "6.4"}
    for built, kind in ((["gfx90a", "gfx942"], "cuda"), (["gfx90a"], "cpu")):
        execute = answers({**seen, "architectures": built})
        machine = detect.detect(root=fixture(tmp_path, **{"dev/kfd": ""}), env={}, execute=execute)
        assert (machine.kind, machine.gpu.card) == (kind, "mi300x")


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        ({**BUILD, "failure": OLD_DRIVER}, r"too old \(found version 12040\)"),
        ({"failure": "Torch not compiled with CUDA enabled"}, "this torch is a build for CPUs"),
        ({**BUILD, "failure": "CUDA unknown error\nsecond line"}, "cannot use it: CUDA unknown error;"),
        (None, "cannot use it: it did not answer;"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_no_reason_to_train_on_the_cpu(
    tmp_path: Path, probe: dict[str, object] | None, why: str
) -> None:
    root = fixture(tmp_path, **{"dev/nvidia0": ""})
    machine = detect.detect(root=root, env={}, execute=answers(probe))
    assert machine.kind == "cpu"
    for asked in ("auto", "cuda"):
        with pytest.raises(UserError, match=why + ".*--device cpu trains without it") as caught:
            choose_device(machine, PlanOptions(device=asked))  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert choose_device(machine, PlanOptions(device="cpu"))[0] == "cpu"


@pytest.mark.parametrize(
    ("file", "env"),
    [("dev/nvidia0", {"CUDA_VISIBLE_DEVICES": ""}), ("dev/dxg", {}), (detect.MODULE_FILE, {})],
)
def test_hidden_gpus_and_those_torch_is_not_made_for_are_none(
    tmp_path: Path, file: str, env: dict[str, str]
) -> None:
    probe = {**BUILD, "failure": "No CUDA GPUs are available"}
    machine = detect.detect(root=fixture(tmp_path, **{file: ""}), env=env, execute=answers(probe))
    assert (machine.kind, machine.gpus) == ("cpu", ())


A100 = ["NVIDIA A100-SXM4-80GB", 80 * GIB, 8, 0, ""]
L4 = ["NVIDIA L4", 24 * GIB, 8, 9, ""]
NEWER = {"architectures": ["sm_75", "sm_80", "sm_90"], "build": "13.0"}
BAD_GPUS: dict[str, tuple[dict[str, object], str]] = {
    # What torch finds, and what `doctor` and `plan` both say of it.
    "an old driver": (
        {**NEWER, "failure": OLD_DRIVER},
        "driver on your system is too old (found version 12040)",
    ),
    "no kernels for one": (
        {**NEWER, "devices": [L4, ["NVIDIA GeForce GTX 1080", 8 * GIB, 6, 1, ""]]},
        "NVIDIA GeForce GTX 1080: ",
    ),
    "no bf16": (
        {**NEWER, "devices": [["Tesla T4", 15360 * MIB, 7, 5, ""]] * 2},
        "Tesla T4 has no bf16 (compute capability 7.5): it takes fp16 with a loss scale",
    ),
    "unequal": (
        {**NEWER, "devices": [A100, L4]},
        "each gets what fits the smallest, at the pace of the slowest",
    ),
    "MIG": (
        {**NEWER, "devices": [["NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10 * GIB, 9, 0, ""]]},
        "MIG 1g.10gb is a MIG slice: times are a cautious guess",
    ),
    "in use": (
        {**NEWER, "devices": [L4], "taken": [20 * GIB]},
        "other programs take 21.47 GB of 25.77 GB: a plan counts all",
    ),
    "no Triton": (
        {**NEWER, "devices": [L4], "triton": False},
        "torch has no Triton: nothing is compiled",
    ),
}


@pytest.mark.parametrize("fault", BAD_GPUS)
def test_doctor_and_plan_say_what_is_odd_about_a_gpu_and_what_happens_then(
    fault: str, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one sentence each, with a way out; what cannot train is refused."""
    probe, sentence = BAD_GPUS[fault]
    root = fixture(tmp_path, **{"dev/nvidia0": ""})
    hardware = detect.detect(root=root, env={}, execute=answers(probe))
    (check,) = machine.check_gpus(hardware)
    assert sentence in check.text
    assert (check.state == "broken", bool(check.remedy)) == (
        not all(g.supported for g in hardware.gpus),
        True,
    )
    monkeypatch.setattr(plan, "detect", lambda: hardware)
    monkeypatch.setattr(estimate, "ceilings_of", lambda *_: None)
    words = ("--task", "causal-lm", "--model", "gpt2-124m", "--assume-length", "128", "--compile", "on")
    if check.state == "broken":
        with pytest.raises(UserError) as caught:
            say(plan.plan, *words)
        (line,) = str(caught.value).splitlines()
        assert sentence in line
        assert re.search("--device cpu trains without it|CUDA_VISIBLE_DEVICES=0 leaves it out", line)
        return
    code, _, err = say(plan.plan, *words)
    (line,) = [line for line in err.splitlines() if line.startswith("GPU")]
    assert (code, line) == (0, f"{check.name}: {check.text}; {check.remedy}")
    assert ("--compile on: torch has no Triton" in err) == (fault == "no Triton")
