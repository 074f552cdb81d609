"""Tests of `doctor`: each planted fault of a machine is found and its remedy named; a healthy one is well."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.engine.machine.detect_nvidia import make_gpu
from isobatch.engine.machine.hardware import Hardware
from isobatch.launch.doctor import (
    children,
    command,
    devices,
    machine,
    network,
    probes,
    software,
    storage,
    variables,
)
from isobatch.launch.doctor.check import Check, broken, ok, warning
from isobatch.launch.doctor.children import Answer, Child

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.tests.unit.fake_slurm import Say, Slurm

GB = 10**9
HEALTHY: dict[str, Any] = {
    "arithmetic": {"version": "2.13", "build": "", "error": 3e-7, "bf16_error": 5e-3, "gpus": []},
    "all_reduce": {"processes": 2, "bytes_per_second": 4e8},
    "quantised": {"version": "0.50", "device": "cpu", "error": 0.07},
    "deepspeed_step": {"version": "0.19", "moved": 0.1},
    "ceilings": {"matmul": [5e9, 9e10], "bandwidth": 2e10, "cores": 2},
    "compiled": {"device": "cpu", "seconds": 8.0, "difference": 0.0, "passed_by": ""},
}
"""What probes find on a machine where all is well."""
NO_CUDA = "this torch is a build for CPUs: install one for CUDA (pytorch.org)"
OLD_DRIVER = "the NVIDIA driver (CUDA 11.4) is too old for this torch (CUDA 12.8): install a newer driver"


def answer(probe: str, **changes: Any) -> Answer:
    return Answer({**HEALTHY[probe], **changes})


def variables_of(**env: str) -> list[Check]:
    where = {"cores": 8, "gpus": 1, "listed_gpus": 1, "interfaces": ["lo", "eth0"]}
    return variables.check_variables(env, **where)  # type: ignore[arg-type]


def gpu_checks(
    found: dict[str, Any] | None = None, capability: tuple[int, int] = (8, 9), why: str = ""
) -> Any:
    """The check of a machine's one GPU, which torch found so."""
    gpu = make_gpu("NVIDIA L4", 24 * GB, capability, 72.0, ["sm_80", "sm_90"], why_unusable=why)
    hardware = Hardware(kind="cuda", gpus=(gpu,), cpus=8, ram_bytes=64 * GB)
    seen = {"free_bytes": 23 * GB, "total_bytes": 24 * GB, "error_of_product": 3e-7, "bf16_error": 5e-3}
    tried = [] if found == {} else [{**seen, **(found or {})}]
    return devices.check_gpus(hardware, answer("arithmetic", gpus=tried))


def memory(root: Path, available: int = 12, swap: tuple[int, int] = (0, 0), used: int = 0) -> Check:
    """`check_memory` of a machine of 16 GB; all figures in GB, `swap` total and free."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 16000000 kB\nMemAvailable: {available}000000 kB\n"
        f"SwapTotal: {swap[0]}000000 kB\nSwapFree: {swap[1]}000000 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.current": f"{used * GB}",
        "sys/fs/cgroup/job/memory.stat": f"inactive_file {GB}\nactive_file {GB}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return devices.check_memory(root, 16 * GB)


def disk(free: float, total: float = 100 * GB) -> Any:
    return SimpleNamespace(free=int(free), total=int(total))


def space(free: float, inodes: int | None = None) -> Check:
    return storage.check_space("runs", Path("runs"), disk(free), inodes, "--out")


def refuse(number: int) -> Callable[..., Any]:
    """A function that raises this error of the system."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def script(folder: Path, lines: str) -> str:
    """A command of these lines of shell."""
    path = folder / "command"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def wheel(**installed: str) -> list[Check]:
    return software.check_versions(
        ["torch>=2.11", "onnx>=1.19"], {"torch": "2.13", "onnx": "1.20", **installed}.get
    )


Fault = tuple["Callable[[Path], Any]", str, str, str]
"""What looks at the fault; the line's name and state; what its remedy names."""
FAULTS: dict[str, Fault] = {
    "a requirement is missing": (lambda _: wheel(torch=None), "torch", "broken", 'install "torch>=2.11"'),
    "a version is too old": (lambda _: wheel(torch="2.4.1"), "torch", "broken", 'install "torch>=2.11"'),
    "an optional one is too old": (lambda _: wheel(onnx="1.2"), "onnx", "warning", 'install "onnx>=1.19"'),
    "the locale is not UTF-8": (
        lambda _: software.check_locale("latin-1"),
        "locale",
        "warning",
        "LC_ALL=C.UTF-8",
    ),
    "no compiler": (lambda _: software.check_compiler("no-g++"), "C++ compiler", "warning", "install g++"),
    "a broken compiler": (
        lambda tmp: software.check_compiler(script(tmp, "echo error: no stdlib >&2; exit 1")),
        *("C++ compiler", "warning", "install g++"),
    ),
    "torch crashes": (
        lambda _: devices.check_torch(Answer(error="its process was ended by SIGILL")),
        *("torch", "broken", "--force-reinstall torch"),
    ),
    "torch computes wrongly": (
        lambda _: devices.check_torch(answer("arithmetic", bf16_error=0.3)),
        *("torch", "broken", "--force-reinstall torch"),
    ),
    "torch computes NaN": (
        lambda _: devices.check_torch(answer("arithmetic", error=float("nan"))),
        *("torch", "broken", "--force-reinstall torch"),
    ),
    "a torch for CPUs beside a GPU": (lambda _: gpu_checks(why=NO_CUDA), "GPU 0", "broken", "pytorch.org"),
    "an old driver": (lambda _: gpu_checks(why=OLD_DRIVER), "GPU 0", "broken", "newer driver"),
    "no kernels for this GPU": (
        lambda _: gpu_checks(capability=(7, 5)),
        "GPU 0",
        "broken",
        "install --upgrade torch",
    ),
    "torch does not see the GPU": (lambda _: gpu_checks({}), "GPU 0", "broken", "nvidia-smi"),
    "the GPU answers with an error": (
        lambda _: gpu_checks({"error": "ECC error"}),
        "GPU 0",
        "broken",
        "nvidia-smi",
    ),
    "the GPU computes wrongly": (lambda _: gpu_checks({"error_of_product": 0.1}), "GPU 0", "broken", "ECC"),
    "others hold the GPU's memory": (
        lambda _: gpu_checks({"free_bytes": GB}),
        "GPU 0",
        "warning",
        "processes",
    ),
    "one core of many": (lambda _: devices.check_cores(1, 64), "cores", "warning", "--cpus-per-task"),
    "a clock held low": (
        lambda _: devices.check_ceilings(answer("ceilings", matmul=[1e8, 2e9])),
        *("speed", "warning", "cpupower"),
    ),
    "memory is held": (lambda tmp: memory(tmp, available=1), "memory", "warning", "ps aux"),
    "the cgroup is full": (lambda tmp: memory(tmp, used=17), "memory", "warning", "ps aux"),
    "memory is swapped out": (lambda tmp: memory(tmp, swap=(8, 2)), "memory", "warning", "swapoff"),
    "a small /dev/shm": (
        lambda tmp: devices.check_shm(tmp, lambda _: disk(64e6, 64e6)),
        *("/dev/shm", "warning", "--shm-size"),
    ),
    "no /dev/shm": (lambda tmp: devices.check_shm(tmp / "shm"), "/dev/shm", "warning", "--shm-size"),
    "the disk is full": (lambda _: space(1e6), "runs space", "broken", "du -sh"),
    "the disk is nearly full": (lambda _: space(2e9), "runs space", "warning", "du -sh"),
    "no inodes": (lambda _: space(50e9, inodes=3), "runs space", "broken", "small files"),
    "a slow disk": (lambda _: storage.check_speed("runs", 4e6, "--out"), "runs speed", "warning", "--out"),
    "locks that hold nobody": (
        lambda tmp: storage.check_semantics("runs", tmp, "--out", lambda _: "got"),
        *("runs files", "broken", "--out"),
    ),
    "no locks": (
        lambda tmp: storage.check_semantics("runs", tmp, "--out", refuse(errno.ENOLCK)),
        *("runs files", "broken", "--out"),
    ),
    "another clock at the file server": (
        lambda tmp: storage.check_clock("runs", tmp, lambda: 1e9),
        *("runs clock", "warning", "set-ntp"),
    ),
    "a world left in the shell": (
        lambda _: variables_of(RANK="1", WORLD_SIZE="4", MASTER_ADDR="n1"),
        *("WORLD_SIZE", "broken", "unset RANK WORLD_SIZE MASTER_ADDR"),
    ),
    "an address left in the shell": (
        lambda _: variables_of(MASTER_ADDR="n1"),
        *("MASTER_ADDR", "warning", "unset MASTER_ADDR"),
    ),
    "GPUs are hidden": (
        lambda _: variables.check_variables({"CUDA_VISIBLE_DEVICES": ""}, cores=8, gpus=0, listed_gpus=2),
        *("CUDA_VISIBLE_DEVICES", "warning", "unset CUDA_VISIBLE_DEVICES"),
    ),
    "kernels wait": (
        lambda _: variables_of(CUDA_LAUNCH_BLOCKING="1"),
        *("CUDA_LAUNCH_BLOCKING", "warning", "unset CUDA_LAUNCH_BLOCKING"),
    ),
    "one thread": (lambda _: variables_of(OMP_NUM_THREADS="1"), "OMP_NUM_THREADS", "warning", "unset OMP"),
    "too many threads": (
        lambda _: variables_of(OMP_NUM_THREADS="64"),
        "OMP_NUM_THREADS",
        "warning",
        "unset OMP",
    ),
    "no peer copies": (
        lambda _: variables_of(NCCL_P2P_DISABLE="1"),
        "NCCL_P2P_DISABLE",
        "warning",
        "unset NCCL",
    ),
    "no such network": (
        lambda _: variables_of(GLOO_SOCKET_IFNAME="ib0"),
        *("GLOO_SOCKET_IFNAME", "broken", "unset GLOO_SOCKET_IFNAME"),
    ),
    "no temporary folder": (
        lambda _: variables_of(TMPDIR="/no/such"),
        "TMPDIR",
        "warning",
        "mkdir -p /no/such",
    ),
    "few open files": (lambda _: variables.check_limits(256, -1), "limits", "warning", "ulimit -n"),
    "little address space": (
        lambda _: variables.check_limits(65536, 8 * GB),
        "limits",
        "warning",
        "ulimit -v",
    ),
    "no loopback": (lambda _: network.check_ports(refuse(errno.EADDRNOTAVAIL)), "ports", "broken", "ip link"),
    "processes do not meet": (
        lambda _: network.check_all_reduce("gloo", Answer(error="no answer within 60 s", late=True)),
        *("gloo", "broken", "GLOO_SOCKET_IFNAME"),
    ),
    "NCCL fails": (
        lambda _: network.check_all_reduce("nccl", Answer(error="unhandled system error")),
        *("nccl", "broken", "NCCL_DEBUG=INFO"),
    ),
    "slow links": (
        lambda _: network.check_all_reduce("nccl", answer("all_reduce", bytes_per_second=2e8)),
        *("nccl", "warning", "topo -m"),
    ),
    "a dead proxy": (
        lambda _: network.check_hub(False, {"HTTPS_PROXY": "http://10.0.0.1:3128"}),
        *("Hub", "warning", "unset HTTPS_PROXY"),
    ),
    "compile fails": (
        lambda _: software.check_compile(Answer(error="InductorError: no Python.h")),
        *("torch.compile", "warning", "--compile off"),
    ),
    "compiled kernels are wrong": (
        lambda _: software.check_compile(answer("compiled", difference=0.5)),
        *("torch.compile", "broken", "--compile off"),
    ),
    "a clone with a library's name": (
        lambda _: software.check_compile(answer("compiled", passed_by="/home/me/tree has a library's name")),
        *("torch.compile", "warning", "rename that folder"),
    ),
    "bitsandbytes fails": (
        lambda _: software.check_bitsandbytes(Answer(error="OSError: libcudart.so.11.0")),
        *("bitsandbytes", "warning", "--force-reinstall"),
    ),
    "bitsandbytes is wrong": (
        lambda _: software.check_bitsandbytes(answer("quantised", error=0.9)),
        *("bitsandbytes", "broken", "--force-reinstall"),
    ),
    "DeepSpeed finds no nvcc": (
        lambda _: software.check_deepspeed(Answer(error="MissingCUDAException: CUDA_HOME does not exist")),
        *("DeepSpeed", "warning", "export CUDA_HOME"),
    ),
    "DeepSpeed steps wrongly": (
        lambda _: software.check_deepspeed(answer("deepspeed_step", moved=0.02)),
        *("DeepSpeed", "broken", "--force-reinstall"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    look, name, state, remedy = FAULTS[fault]
    found = look(tmp_path)
    (check,) = found if isinstance(found, list) else [found]
    assert (check.name, check.state) == (name, state), check
    assert remedy in check.remedy
    assert "\n" not in check.text


WELL: dict[str, Callable[[], Any]] = {
    "a GPU": gpu_checks,
    "an old GPU that this torch was built for": lambda: gpu_checks(capability=(8, 0)),
    "several GPUs": lambda: network.check_all_reduce("nccl", answer("all_reduce", bytes_per_second=9e9)),
    "one GPU": lambda: network.check_all_reduce(
        "nccl", answer("all_reduce", processes=1, bytes_per_second=1e6)
    ),
    "a GPU that was chosen": lambda: variables_of(CUDA_VISIBLE_DEVICES="0", NCCL_DEBUG="INFO"),
    "a rank of torchrun": lambda: variables_of(
        RANK="1", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="a", OMP_NUM_THREADS="1"
    ),
    "interfaces that are there": lambda: variables_of(
        GLOO_SOCKET_IFNAME="eth", NCCL_SOCKET_IFNAME="^lo,docker"
    ),
    "switches that are off": lambda: variables_of(CUDA_LAUNCH_BLOCKING="0", NCCL_P2P_DISABLE="0"),
    "as many threads as cores": lambda: variables_of(OMP_NUM_THREADS="8"),
    "a small machine": lambda: devices.check_cores(1, 1),
    "half a machine": lambda: devices.check_cores(8, 64, 3.0),
    "a Hub that is not there": lambda: network.check_hub(False, {}),
    "a Hub that is not wanted": lambda: network.check_hub(False, {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "x"}),
    "a slow compilation": lambda: software.check_compile(Answer(error="no answer within 10 s", late=True)),
    "a busy machine": lambda: devices.check_ceilings(Answer(error="no answer within 3 s", late=True)),
    "many files": lambda: variables.check_limits(1 << 20, -1),
}
"""What is no fault, though it looks a little like one."""


@pytest.mark.parametrize("case", WELL)
def test_what_is_no_fault_raises_no_alarm(case: str) -> None:
    found = WELL[case]()
    (check,) = found if isinstance(found, list) else [found]
    assert check.state == "ok", check


def test_memory_that_is_free_raises_no_alarm(tmp_path: Path) -> None:
    assert memory(tmp_path).state == "ok"
    assert memory(tmp_path, used=15, swap=(8, 7)).state == "ok", "2 GB of them are files, which give way"


@pytest.mark.parametrize(
    ("function", "error"), [("replace", errno.EXDEV), ("mmap", errno.ENODEV), ("mkdtemp", errno.EROFS)]
)
def test_a_file_system_that_refuses(
    function: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no renames, no memory maps, or is mounted read-only."""
    places: dict[str, Any] = {"replace": Path, "mmap": storage.mmap, "mkdtemp": storage.tempfile}
    monkeypatch.setattr(places[function], function, refuse(error))
    if function == "mkdtemp":
        (check,) = storage.check_folder("runs", tmp_path / "runs", "--out")
        assert "Read-only" in check.text
    else:
        check = storage.check_semantics("runs", tmp_path, "--out", lambda _: "refused")
    assert (check.state, "--out" in check.remedy) == ("broken", True)


def test_downloads_that_were_cut_short(tmp_path: Path) -> None:
    blobs = tmp_path / "models--gpt2" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "ab12.incomplete").write_bytes(b"0" * 2000)
    check = storage.check_downloads(tmp_path)
    assert check.state == "warning"
    assert "1 downloads were cut short, 2 KB" in check.text


def test_windows_drivers_have_no_growing_segments(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "dxg").touch()
    env = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    (check,) = variables.check_variables(env, cores=8, root=tmp_path)
    assert (check.name, check.state) == ("PYTORCH_ALLOC_CONF", "warning")


SLURM_FAULTS = {
    "controller": (
        "echo 'sinfo: error: Unable to contact slurm controller' >&2; exit 1",
        "broken",
        "scontrol ping",
    ),
    "munge": ("echo 'sinfo: error: Munge encode failed: Failed to connect' >&2; exit 1", "broken", "munge"),
    "nodes": ("echo n1 down*; echo n2 drained", "warning", "sinfo -R"),
}


@pytest.mark.parametrize("fault", SLURM_FAULTS)
def test_faults_of_slurm(fault: str, slurm: Slurm) -> None:
    lines, state, remedy = SLURM_FAULTS[fault]
    slurm(sinfo=lines, srun="exit 0")
    check = network.check_slurm()
    assert (check.state, remedy in check.remedy) == (state, True), check


def test_commands_of_slurm_that_are_missing(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(sinfo="echo n1 idle")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    check = network.check_slurm()
    assert (check.state, "srun are missing" in check.text) == ("broken", True)


def test_slurm_without_a_cluster_is_no_fault(slurm: Slurm) -> None:
    slurm(sinfo='echo "sinfo: fatal: Could not establish a configuration source" >&2; exit 1')
    assert network.check_slurm().state == "ok"


@pytest.mark.parametrize(
    ("lines", "states"),
    [
        ("echo n1 100.5 yes; echo n2 101.0 yes", ["ok", "ok"]),
        ("echo n1 100.5 yes; echo n2 161.0 yes", ["warning", "ok"]),
        ("echo n1 100.5 yes; echo n2 101.0", ["ok", "broken"]),
        ("echo n1 100.5 yes; exit 1", ["broken"]),
    ],
)
def test_nodes_of_an_allocation(lines: str, states: list[str], slurm: Slurm, tmp_path: Path) -> None:
    """Their clocks, and whether they see the folder of runs; the last: a node does not answer."""
    slurm(srun=lines)
    found = network.check_nodes({"SLURM_JOB_NUM_NODES": "2"}, tmp_path)
    assert [check.state for check in found] == states
    assert network.check_nodes({}, tmp_path) == []


@pytest.mark.parametrize(
    ("module", "function", "seconds", "arguments", "expected"),
    [
        ("core.measures", "format_bytes", 60.0, {"count": 1500}, Answer("2 KB")),
        ("core.measures", "format_bytes", 60.0, {"count": "x"}, None),
        ("core.measures", "format_bytes", 0.0, {"count": 1}, Answer(error="no answer within 0 s", late=True)),
    ],
)
def test_a_child_answers_fails_or_is_late(
    module: str,
    function: str,
    seconds: float,
    arguments: dict[str, Any],
    expected: Answer | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(children, "MODULE", module)
    found = Child(function, seconds, **arguments).answer()
    assert found == expected if expected else found.error.startswith("TypeError: ")


def test_a_product_is_right_in_both_precisions() -> None:
    import torch

    assert probes.product_error("cpu", torch.float32) < devices.LARGEST_ERROR["fp32"] / 100
    assert probes.product_error("cpu", torch.bfloat16) < devices.LARGEST_ERROR["bf16"] / 3


class HealthyChild:
    """A probe that finds what is usual, at once."""

    def __init__(self, function: str, *_: Any, **__: Any) -> None:
        self.function = function

    def answer(self) -> Answer:
        return answer(self.function)

    def stop(self) -> None:
        pass


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, with what its shell and its other users do to it left out."""
    monkeypatch.setattr(machine, "Child", HealthyChild)
    monkeypatch.setattr(machine.os, "environ", {"PATH": os.environ["PATH"]})
    monkeypatch.setattr(devices, "FREE_RAM_SHARE", 0.0)
    monkeypatch.setattr(devices, "LEAST_FREE_RAM", 0)
    monkeypatch.setattr(storage, "SLOW_RATE", 1e5)
    monkeypatch.setattr(storage, "WRITTEN_BYTES", 1 << 20)


@pytest.mark.usefixtures("healthy")
def test_a_healthy_machine_raises_no_alarm(say: Say, tmp_path: Path) -> None:
    code, out, _ = say(command.doctor, "--out", str(tmp_path / "runs"), "--json")
    checks = json.loads(out)["checks"]
    assert [check for check in checks if check["state"] != "ok"] == []
    assert code == 0
    assert {"versions", "runs files", "torch", "GPU", "gloo", "DeepSpeed"} <= {c["name"] for c in checks}
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_the_page_is_aligned_and_names_the_remedy(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        ok("torch", "well"),
        warning("cores", "one\x1b[2J", "taskset"),
        broken("gloo", "fails", "unset X"),
    ]
    monkeypatch.setattr(command, "check_machine", lambda _: iter(found))
    code, out, _ = say(command.doctor)
    assert code == 3
    assert out.splitlines() == [
        "ok       torch                 well",
        r"warning  cores                 one\x1b[2J",
        "                               -> taskset",
        "broken   gloo                  fails",
        "                               -> unset X",
        "1 broken, 1 warnings, of 3 checks",
    ]
    monkeypatch.setattr(command, "check_machine", lambda _: iter(found[:2]))
    assert say(command.doctor)[0] == 0, "a warning is no failure"


@pytest.mark.slow
def test_the_real_machine_is_looked_at_in_time(cli: Any, tmp_path: Path) -> None:
    env = {"OMP_NUM_THREADS": ""}
    found = json.loads(cli("doctor", "--json", folder=tmp_path, env=env, timeout=60).out)
    assert [check for check in found["checks"] if check["state"] == "broken"] == []


def test_ports_are_really_tried() -> None:
    assert network.check_ports().state == "ok"
    assert network.check_ports(lambda: socket.create_server(("127.0.0.1", 0))).state == "ok"
