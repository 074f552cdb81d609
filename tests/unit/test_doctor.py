"""Tests of `doctor`: each planted fault of a machine is found and its remedy named; a healthy one is well."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import filelock
import pytest

from isobatch.engine.machine.detect import make_gpu
from isobatch.engine.machine.hardware import Hardware
from isobatch.launch.doctor import command, devices, machine, probes, software, storage
from isobatch.launch.doctor.check import Check, broken, ok, warning
from isobatch.launch.doctor.probes import Answer, Child, Probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from isobatch.tests.unit.fake_slurm import Say, Slurm

GB = 10**9
NO_CUDA = "this torch is a build for CPUs: install one for CUDA (pytorch.org)"
OLD_DRIVER = "the NVIDIA driver (CUDA 11.4) is too old for this torch (CUDA 12.8): install a newer driver"
LATE = Answer(error="no answer within 10 s", late=True)


def variables_of(**env: str) -> list[Check]:
    return software.check_variables(env, cores=8, gpus=1, listed_gpus=1)


def gpu_checks(capability: tuple[int, int] = (8, 9), why: str = "") -> list[Check]:
    gpu = make_gpu("NVIDIA L4", 24 * GB, capability, ["sm_80", "sm_90"], why_unusable=why)
    return devices.check_gpus(Hardware(kind="cuda", gpus=(gpu,), cpus=8, ram_bytes=64 * GB))


def memory(root: Path, available: int = 12, used: int = 0) -> Check:
    """`check_memory` of a machine of 16 GB; all figures in GB."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 16000000 kB\nMemAvailable: {available}000000 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.current": f"{used * GB}",
        "sys/fs/cgroup/job/memory.stat": f"inactive_file {GB}\nactive_file {GB}\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return devices.check_memory(root, 16 * GB)


def disk(free: float, total: float = 100 * GB) -> Any:
    return SimpleNamespace(free=int(free), total=int(total))


def refuse(number: int) -> Callable[..., Any]:
    """A function that raises this error of the system."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def wheel(**installed: str | None) -> list[Check]:
    versions = {"torch": "2.13", "onnx": "1.20", **installed}
    return software.check_versions(["torch>=2.11", "onnx>=1.19; extra == 'onnx'"], versions.get)


def fails(probe: Probe, error: str) -> Callable[[Path], Check]:
    return lambda _: probe.check(Answer(error=error))


FAULTS: dict[str, tuple[Callable[[Path], Any], str, str, str]] = {
    # What looks at the fault; the line's name and state; what its remedy names.
    "a requirement is missing": (lambda _: wheel(torch=None), "torch", "broken", 'install "torch>=2.11"'),
    "a version is too old": (lambda _: wheel(torch="2.4.1"), "torch", "broken", 'install "torch>=2.11"'),
    "torch crashes": (fails(machine.TORCH, "ended by SIGILL"), "torch", "broken", "--force-reinstall"),
    "a torch for CPUs beside a GPU": (lambda _: gpu_checks(why=NO_CUDA), "GPU 0", "broken", "pytorch.org"),
    "an old driver": (lambda _: gpu_checks(why=OLD_DRIVER), "GPU 0", "broken", "newer driver"),
    "no kernels for this GPU": (lambda _: gpu_checks((7, 5)), "GPU 0", "broken", "install --upgrade torch"),
    "the GPU computes wrongly": (
        fails(devices.gpu_probe(1), "ArithmeticError: a product in float32 is off by 0.1"),
        *("GPU 1", "broken", "ECC"),
    ),
    "others hold the GPU's memory": (
        fails(devices.gpu_probe(0), "RuntimeWarning: NVIDIA L4: 1 GB of 24 GB are free"),
        *("GPU 0", "warning", "processes"),
    ),
    "one core of many": (lambda _: devices.check_cores(1, 64), "cores", "warning", "--cpus-per-task"),
    "memory is held": (lambda tmp: memory(tmp, available=1), "memory", "warning", "ps aux"),
    "a small /dev/shm": (
        lambda tmp: devices.check_shm(tmp, lambda _: disk(64e6, 64e6)),
        *("/dev/shm", "warning", "--shm-size"),
    ),
    "no /dev/shm": (lambda tmp: devices.check_shm(tmp / "shm"), "/dev/shm", "warning", "--shm-size"),
    "a full disk": (
        lambda tmp: storage.check_space("runs", tmp, disk(1e6), "--out"),
        *("runs space", "broken", "du -sh"),
    ),
    "a world left in the shell": (
        lambda _: variables_of(RANK="1", WORLD_SIZE="4", MASTER_ADDR="n1"),
        *("WORLD_SIZE", "broken", "unset RANK WORLD_SIZE MASTER_ADDR"),
    ),
    "GPUs are hidden": (
        lambda _: software.check_variables({"CUDA_VISIBLE_DEVICES": ""}, cores=8, listed_gpus=2),
        *("CUDA_VISIBLE_DEVICES", "warning", "unset CUDA_VISIBLE_DEVICES"),
    ),
    "kernels wait": (
        lambda _: variables_of(CUDA_LAUNCH_BLOCKING="1"),
        *("CUDA_LAUNCH_BLOCKING", "warning", "unset CUDA_LAUNCH_BLOCKING"),
    ),
    "one thread": (lambda _: variables_of(OMP_NUM_THREADS="1"), "OMP_NUM_THREADS", "warning", "unset OMP"),
    "processes do not meet": (lambda _: machine.GLOO.check(LATE), "gloo", "broken", "GLOO_SOCKET_IFNAME"),
    "NCCL fails": (fails(machine.NCCL, "unhandled system error"), "nccl", "broken", "NCCL_DEBUG=INFO"),
    "compile fails": (fails(machine.COMPILE, "InductorError"), "torch.compile", "warning", "--compile off"),
    "bitsandbytes fails": (
        fails(machine.BITSANDBYTES, "OSError: libcudart"),
        "bitsandbytes",
        "warning",
        "--force-reinstall",
    ),
    "no nvcc": (fails(machine.DEEPSPEED, "MissingCUDAException"), "DeepSpeed", "warning", "export CUDA_HOME"),
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
    "a GPU that was chosen": lambda: variables_of(CUDA_VISIBLE_DEVICES="0", NCCL_DEBUG="INFO"),
    "a rank of torchrun": lambda: variables_of(
        RANK="1", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="a", OMP_NUM_THREADS="1"
    ),
    "switches that are off": lambda: variables_of(CUDA_LAUNCH_BLOCKING="0", NCCL_P2P_DISABLE="0"),
    "a small machine": lambda: devices.check_cores(1, 1),
    "no GPU": lambda: devices.check_gpus(Hardware(kind="cpu", cpus=2, ram_bytes=GB)),
    "a Hub that is not there": lambda: storage.check_hub(False),
    "a slow compilation": lambda: machine.COMPILE.check(LATE),
}
"""What is no fault, though it looks a little like one."""


@pytest.mark.parametrize("case", WELL)
def test_what_is_no_fault_raises_no_alarm(case: str) -> None:
    found = WELL[case]()
    (check,) = found if isinstance(found, list) else [found]
    assert check.state == "ok", check


def test_what_can_be_used_raises_no_alarm(tmp_path: Path) -> None:
    assert memory(tmp_path).state == "ok"
    assert memory(tmp_path, used=15).state == "ok", "2 GB of them are files, which give way"
    assert gpu_checks() == gpu_checks((8, 0)) == [], "they are tried instead"


def test_a_file_system_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no locks, or is mounted read-only."""
    assert storage.check_locks("runs", tmp_path, "--out").state == "ok"
    for error in (errno.ENOLCK, errno.ENOSYS):
        monkeypatch.setattr(filelock.FileLock, "acquire", refuse(error))
        check = storage.check_locks("runs", tmp_path, "--out")
        assert (check.name, check.state, "--out" in check.remedy) == ("runs locks", "broken", True)
    monkeypatch.setattr(filelock.FileLock, "acquire", lambda _: None)
    assert "given to another" in storage.check_locks("runs", tmp_path, "--out").text
    monkeypatch.setattr(storage.tempfile, "mkdtemp", refuse(errno.EROFS))
    (check,) = storage.check_folder("runs", tmp_path / "runs", "--out")
    assert ("Read-only" in check.text, check.state) == (True, "broken")


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
    check = storage.check_slurm()
    assert (check.state, remedy in check.remedy) == (state, True), check


def test_slurm_without_a_cluster_is_no_fault(slurm: Slurm) -> None:
    slurm(sinfo='echo "sinfo: fatal: Could not establish a configuration source" >&2; exit 1')
    assert storage.check_slurm().state == "ok"


@pytest.mark.parametrize(
    ("count", "seconds", "expected"),
    [
        (1500, 60.0, Answer("2 KB")),
        ("x", 60.0, None),
        (1, 0.0, Answer(error="no answer within 0 s", late=True)),
    ],
)
def test_a_child_answers_fails_or_is_late(
    count: object, seconds: float, expected: Answer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "MODULE", "core.measures")
    probe = Probe("", "format_bytes", "", {"count": count}, seconds=seconds)
    found = Child(probe).answer()
    assert found == expected if expected else found.error.startswith("TypeError: ")


def test_a_product_is_right_in_both_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LARGEST_ERROR", {"float32": 1e-5, "bfloat16": 2e-2})
    probes.try_products("cpu")
    monkeypatch.setattr(probes, "LARGEST_ERROR", {"bfloat16": 1e-5})
    with pytest.raises(ArithmeticError, match="bfloat16"):
        probes.try_products("cpu")


class HealthyChild(Child):
    """A probe that finds what is usual, at once."""

    def __init__(self, probe: Probe, *_: Any) -> None:
        self.probe = probe

    def answer(self) -> Answer:
        return Answer("well")

    def stop(self) -> None:
        pass


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, with what its shell and its other users do to it left out."""
    monkeypatch.setattr(machine, "Child", HealthyChild)
    monkeypatch.setattr(machine.os, "environ", {"PATH": os.environ["PATH"]})
    monkeypatch.setattr(devices, "FREE_RAM_SHARE", 0.0)
    monkeypatch.setattr(devices, "LEAST_FREE_RAM", 0)


@pytest.mark.usefixtures("healthy")
def test_a_healthy_machine_raises_no_alarm(say: Say, tmp_path: Path) -> None:
    code, out, _ = say(command.doctor, "--out", str(tmp_path / "runs"), "--json")
    checks = json.loads(out)["checks"]
    assert [check for check in checks if check["state"] != "ok"] == []
    assert code == 0
    assert {"versions", "runs locks", "torch", "GPU", "gloo", "DeepSpeed"} <= {c["name"] for c in checks}
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
