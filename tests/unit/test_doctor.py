"""Tests of `doctor`: each planted fault of a machine is found and its remedy named; a healthy one is well."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import filelock
import pytest

from isobatch.core import hub_cache
from isobatch.core.package import own_command
from isobatch.engine.machine.detect import make_gpu
from isobatch.engine.machine.hardware import Hardware
from isobatch.engine.runs.classify_errors import classify
from isobatch.launch.doctor import machine, probes, run_checks
from isobatch.launch.doctor.probes import Check, Probe, broken, ok, warning
from isobatch.tests.integration.helpers import command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from isobatch.tests.unit.fake_slurm import Say

GB = 10**9
NO_GPU = Hardware(kind="cpu", cpus=2, ram_bytes=GB)
NO_CUDA = "this torch is a build for CPUs: install one for CUDA (pytorch.org)"


def gpu_checks(capability: tuple[int, int] = (8, 9), why: str = "") -> list[Check]:
    gpu = make_gpu("NVIDIA L4", 24 * GB, capability, ["sm_80", "sm_90"])
    gpu = replace(gpu, supported=gpu.supported and not why, why_unusable=why)
    return machine.check_gpus(Hardware(kind="cuda", gpus=(gpu,), cpus=8, ram_bytes=64 * GB))


def refuse(number: int) -> Callable[..., Any]:
    """A function that raises this error of the system."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def fails(probe: Probe, error: str) -> Callable[[Path], Check]:
    return lambda _: probe.failed(error)


FAULTS: dict[str, tuple[Callable[[Path], Any], str, str, str]] = {
    # What looks at the fault; the line's name and state; what its remedy names.
    "a requirement is missing": (
        lambda _: machine.check_versions(["torches>=2.11", "torch>=2", "onnxes>=1; extra == 'onnx'"]),
        *("torches", "broken", 'install "torches>=2.11"'),
    ),
    "a clone that is not installed": (
        lambda _: machine.check_versions([]),
        *("versions", "warning", "install -e ."),
    ),
    "a torch for CPUs beside a GPU": (lambda _: gpu_checks(why=NO_CUDA), "GPU 0", "broken", "pytorch.org"),
    "the GPU computes wrongly": (
        fails(
            machine.probe("GPU 1", device="cuda:1"),
            "Traceback:\n  ...\nArithmeticError: a product is off by 0.1\n",
        ),
        *("GPU 1", "broken", "ECC"),
    ),
    "one core of many": (lambda _: machine.check_cores(1, 64), "cores", "warning", "--cpus-per-task"),
    "no /dev/shm": (lambda tmp: machine.check_shm(tmp / "shm"), "/dev/shm", "warning", "--shm-size"),
    "a full disk": (
        patch("shutil.disk_usage", lambda _: SimpleNamespace(free=10**6))(
            lambda tmp: machine.check_space("runs", tmp, "--out")
        ),
        *("runs space", "broken", "du -sh"),
    ),
    "a world left in the shell": (
        lambda _: machine.check_variables({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "n1"}),
        *("RANK", "broken", "unset RANK WORLD_SIZE MASTER_ADDR"),
    ),
    "no nvcc": (
        fails(machine.probe("deepspeed"), "MissingCUDAException"),
        *("deepspeed", "warning", "export CUDA_HOME"),
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
    "a rank of torchrun": lambda: machine.check_variables({"RANK": "1", "TORCHELASTIC_RUN_ID": "a"}),
    "a small machine": lambda: machine.check_cores(1, 1),
    "no GPU": lambda: machine.check_gpus(NO_GPU),
}
"""What is no fault, though it looks a little like one."""


@pytest.mark.parametrize("case", WELL)
def test_what_is_no_fault_raises_no_alarm(case: str) -> None:
    found = WELL[case]()
    (check,) = found if isinstance(found, list) else [found]
    assert check.state == "ok", check


def test_a_gpu_that_can_be_used_is_tried_instead() -> None:
    assert gpu_checks() == gpu_checks((8, 0)) == []
    gpu = make_gpu("NVIDIA L4", 24 * GB, (8, 9), ["sm_80"])
    tried = machine.probes_for(Hardware(kind="cuda", gpus=(gpu, gpu), cpus=8, ram_bytes=64 * GB))
    assert {"GPU 0", "GPU 1", "nccl"} <= {probe.name for probe in tried}


def test_a_file_system_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps no locks, or is mounted read-only."""
    for error in (errno.ENOLCK, errno.ENOSYS):
        monkeypatch.setattr(filelock.FileLock, "acquire", refuse(error))
        check = machine.check_locks("runs", str(tmp_path), "--out")
        assert (check.name, check.state, "--out" in check.remedy) == ("runs locks", "broken", True)
    monkeypatch.setattr(machine.tempfile, "mkdtemp", refuse(errno.EROFS))
    (check,) = machine.check_folder("runs", tmp_path / "runs", "--out")
    assert ("Read-only" in check.text, check.state) == (True, "broken")


@pytest.fixture
def shut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is closed to this user, as no folder is to root."""
    shut, look, may = tmp_path / "shut", os.stat, os.access

    def stat(path: Any, *words: Any, **more: Any) -> os.stat_result:
        if f"{path}".startswith(f"{shut}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, *words, **more)

    def is_shut(path: Any, mode: int) -> bool:
        return f"{path}".startswith(f"{shut}/") or (str(path) == str(shut) and mode != os.F_OK)

    shut.mkdir()
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda path, mode: not is_shut(path, mode) and may(path, mode))
    return shut


PLACES = {
    "shut": "is closed",
    "shut/in": "cannot be reached: {}/shut is",
    "file": "is a file",
    "file/in": "is a file",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_that_is_closed_to_this_user_is_named(place: str, tmp_path: Path, shut: Path) -> None:
    """Whatever names it; nobody is told to open a folder that is another's."""
    (tmp_path / "file").touch()
    path = tmp_path / place
    for flag, mode in {"HF_HOME": os.R_OK, "ISOBATCH_STATE": os.W_OK}.items():
        found = machine.check_access("cache", path, mode, flag)
        assert found.state == "broken"
        assert f"{path} " in found.text
        assert PLACES[place].format(tmp_path) in found.text
        assert f"set {flag} to a folder of yours" in found.remedy
    assert [check.state for check in machine.check_folder("runs", path, "--out")] == ["broken"]
    with pytest.raises(OSError, match=r"denied|Not a dir") as caught:
        (path / "x").stat()
    error = classify(caught.value)
    assert place.startswith("file") or f"{shut} is closed to this user: " in str(error)


def test_the_variable_that_names_a_closed_folder_is_said(shut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(shut))
        with pytest.raises(PermissionError) as caught:
            hub_cache.snapshot("models", "small")
        assert str(classify(caught.value)).endswith(f"set {name} to a folder of yours")


def test_what_is_missing_is_named_and_another_s_folder_is_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and may(path, mode))
    assert machine.check_access("hub cache", tmp_path, os.R_OK, "HF_HOME").state == "ok", "may be read-only"
    for owner, is_told in ((os.getuid(), True), (os.getuid() + 1, False)):
        monkeypatch.setattr(os, "getuid", lambda owner=owner: owner)
        found = machine.check_access("prepared data", tmp_path / "new", os.W_OK, "ISOBATCH_CACHE")
        assert found.text == f"{tmp_path}/new is not there, and {tmp_path} is closed to this user"
        assert ("chmod" in found.remedy) == is_told


def test_a_probe_answers_fails_or_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MODULE", "core.measures")
    assert probes.try_out(Probe("", "format_bytes", "", {"count": 1500})) == ok("", "2 KB")
    assert "TypeError: " in probes.try_out(Probe("", "format_bytes", "", {"count": "x"})).text
    monkeypatch.setattr(probes, "SECONDS", 0.0)
    assert "no answer within 0 s" in probes.try_out(Probe("", "format_bytes", "", {"count": 1})).text


@pytest.mark.parametrize("probe", machine.probes_for(NO_GPU), ids=lambda probe: probe.name)
def test_a_late_answer_of_a_busy_machine_is_no_fault_of_a_library(
    probe: Probe, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "SECONDS", 1e-3)
    check = probes.try_out(probe, load=2.5)
    assert (check.state, check.remedy.split(",")[0]) == ("warning", "isobatch doctor")
    assert "took longer than 0 s on a busy machine (load 2.5 a core)" in check.text
    monkeypatch.setattr(run_checks, "check_machine", lambda _: iter([check, ok("cores", "two")]))
    code, out, _ = say(run_checks.doctor)
    assert (code, out.splitlines()[-1]) == (0, "0 broken, 1 warnings, of 2 checks; 1 of them not known")


def test_beside_other_work_a_probe_has_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    monkeypatch.setattr(probes, "call_in_child", lambda _, seconds: given.append(seconds))
    for load in (0.2, 1.0, 2.5, 40.0):
        probes.try_out(Probe("", "imported", ""), load)
    assert given == [60, 60, 150, 300]
    assert probes.GROUP_SECONDS < probes.SECONDS, "a sum that hangs is said before its process is ended"


def test_a_product_is_right_in_both_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LARGEST_ERROR", {"float32": 1e-5, "bfloat16": 2e-2})
    probes.try_products("cpu")
    monkeypatch.setattr(probes, "LARGEST_ERROR", {"bfloat16": 1e-5})
    with pytest.raises(ArithmeticError, match="bfloat16"):
        probes.try_products("cpu")


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, with what its shell does to it left out; each probe finds what is usual, at once."""
    monkeypatch.setattr(machine, "try_out", lambda probe, load: ok(probe.name, "well"))
    monkeypatch.setattr(machine.os, "environ", {"PATH": os.environ["PATH"]})


@pytest.mark.usefixtures("healthy")
def test_a_healthy_machine_raises_no_alarm(say: Say, tmp_path: Path) -> None:
    code, out, _ = say(run_checks.doctor, "--out", str(tmp_path / "runs"), "--json")
    checks = json.loads(out)["checks"]
    assert [check for check in checks if check["state"] != "ok"] == []
    assert code == 0
    assert {"versions", "runs locks", "agreed code", "hub cache", "torch", "GPU", "gloo", "deepspeed"} <= {
        c["name"] for c in checks
    }
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_line_names_the_remedy_and_a_warning_is_no_failure(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [broken("gloo", "fails", "unset X"), warning("cores", "one\x1b[2J", "taskset")]
    monkeypatch.setattr(run_checks, "check_machine", lambda _: iter(found))
    code, out, _ = say(run_checks.doctor)
    assert code == 3
    assert out.splitlines() == [
        "broken   gloo                  fails",
        "                               -> unset X",
        r"warning  cores                 one\x1b[2J",
        "                               -> taskset",
        "1 broken, 1 warnings, of 2 checks",
    ]
    monkeypatch.setattr(run_checks, "check_machine", lambda _: iter(found[1:]))
    assert say(run_checks.doctor)[0] == 0


@pytest.mark.slow
def test_the_real_machine_is_looked_at_in_time(tmp_path: Path) -> None:
    words = own_command("doctor", "--json")
    found = json.loads(command(words, tmp_path, timeout=60, OMP_NUM_THREADS="").stdout)
    assert [check for check in found["checks"] if check["state"] == "broken"] == []
