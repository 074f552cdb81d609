"""What every test gets: a cache of its own, a guard against leaks."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# There are more test processes than cores, and a thread that spins while it waits takes a core from another:
# without this, tests of small models last twice as long. Read by OpenMP when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# NumPy's threads spin, whatever that says: a system of 128 equations takes 5 ms of them, and 0.1 ms of one.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The same plans on every processor: with a matrix unit the planner would choose bf16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# As a run sets them, which the tests begin in this process.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")

import psutil
import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
# This clone is the package, whether it is installed or not, and whatever other copy is.
runpy.run_path(str(ROOT / "launch" / "_root.py"))
# nohup ignores it, and the commands that tests start would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
GRACE_SECONDS = 5.0
"""How long a child that is ending may take: loader processes die a moment after their loop."""
FORGIVEN = (
    *("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_"),
    "RAY_CLIENT_MODE",
)
"""Beginnings: set by pytest for each test, or by torch's compiler, accelerate, scikit-learn and Ray."""

NEW_MODULES = 100
"""So many imported modules are worth a collection before they are frozen."""
_modules_frozen = 0

# What imports make stays: while tests are collected, a fifth of the time would go into looking through it.
gc.disable()
# The same examples on every machine, and no folder of them left behind.
settings.register_profile("isobatch", derandomize=True, database=None, deadline=None)
settings.load_profile("isobatch")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared data and consent of one session: nothing is taken from the user's, nothing left there."""
    gc.enable()
    names = ("ISOBATCH_CACHE", "ISOBATCH_STATE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: str(tmp_path_factory.mktemp("cache")) for name in names})
    yield
    for name, value in before.items():
        del os.environ[name]
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Torch on one thread: models of a few weights gain nothing from more, and lose on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(FORGIVEN)}


def _children() -> set[psutil.Process]:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # none at all: most often so, and found without looking at every process
        return set()
    # Python's own helper for shared memory, that of templates, and what commands are forked from stay.
    return {c for c in psutil.Process().children(recursive=True) if not _is_helper(c)}


def _is_helper(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
        stays = "resource_tracker" in words or "template_process.py" in words
        return stays or ("zygote.py" in words and process.ppid() == os.getpid())
    except psutil.Error:
        return False


def _leave_process_group() -> bool:
    """Whether there was one; the next test has none."""
    distributed = sys.modules.get("torch.distributed")
    left = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if left and distributed is not None:
        distributed.destroy_process_group()
    return left


@pytest.fixture(autouse=True)
def _libraries_stay() -> None:
    """The collection that ends every run looks through new objects, not through those of all libraries."""
    global _modules_frozen
    if len(sys.modules) >= _modules_frozen + NEW_MODULES:
        gc.collect()
        gc.freeze()
        _modules_frozen = len(sys.modules)


@pytest.fixture(autouse=True)
def _no_leaks(_cache: None) -> Iterator[None]:
    """A test that leaves environment variables, processes, a process group or another folder behind fails."""
    environment, children, folder = _environment(), _children(), Path.cwd()
    yield
    left = _environment()
    changed = sorted(k for k in environment.keys() | left.keys() if environment.get(k) != left.get(k))
    for name in changed:
        os.environ.pop(name, None)
        if name in environment:
            os.environ[name] = environment[name]
    _, alive = psutil.wait_procs(_children() - children, timeout=GRACE_SECONDS)
    moved = Path.cwd() != folder
    os.chdir(folder)
    problems = [
        f"environment variables {', '.join(changed)}" if changed else "",
        f"processes {', '.join(str(p.pid) for p in alive)}" if alive else "",
        "a process group" if _leave_process_group() else "",
        "another working folder" if moved else "",
    ]
    if found := [p for p in problems if p]:
        pytest.fail(f"the test leaves behind {' and '.join(found)}")
