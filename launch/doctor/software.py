"""Checks of what is installed, and of variables of this shell that break a run or slow it down."""

from __future__ import annotations

import importlib.metadata
import sys
from typing import TYPE_CHECKING

from isobatch.engine.machine.detect import positive
from isobatch.launch.doctor.check import Check, broken, ok, warning

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PIP = f"{sys.executable} -m pip"
"""The command of this interpreter's pip."""
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLOWS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "TORCH_COMPILE_DISABLE": "--compile does nothing",
    "NCCL_P2P_DISABLE": "GPUs exchange gradients through host memory",
    "NCCL_IB_DISABLE": "nodes exchange gradients without InfiniBand",
}
"""Variables that are on with 1 -> what they do."""


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> list[str]:
    """What this package and its extras require; nothing of a clone that is not installed."""
    return importlib.metadata.requires("isobatch") or [] if installed_version("isobatch") else []


def check_versions(required: Iterable[str] | None = None) -> list[Check]:
    """A line for each requirement that is not met; one line where all are."""
    from packaging.requirements import Requirement

    wrong, met = [], 0
    for need in map(Requirement, requirements() if required is None else required):
        version, extra = installed_version(need.name), "extra" in str(need.marker)
        if not extra and need.marker and not need.marker.evaluate():
            continue
        met += version is not None
        if (extra and version is None) or (version and need.specifier.contains(version, prereleases=True)):
            continue
        say, here = warning if extra else broken, f"{version} is here" if version else "is not installed"
        wanted = f"{need.name}{need.specifier}"
        wrong.append(say(need.name, f"{here}; isobatch needs {wanted}", f'{PIP} install "{wanted}"'))
    if not (wrong or met):
        return [warning("versions", "not compared: isobatch is not installed here", f"{PIP} install -e .")]
    return wrong or [ok("versions", f"all {met} packages, those of extras too, are in versions that fit")]


def check_variables(env: Mapping[str, str], cores: int, gpus: int = 0, listed_gpus: int = 0) -> list[Check]:
    """`gpus` that torch may use; `listed_gpus` that the machine has."""
    found = [*_wrong_variables(env, cores, gpus, listed_gpus)]
    return found or [ok("environment", "no variable stands in the way")]


def _wrong_variables(env: Mapping[str, str], cores: int, gpus: int, listed_gpus: int) -> Iterator[Check]:
    launched = "TORCHELASTIC_RUN_ID" in env or "SLURM_PROCID" in env
    left = [name for name in WORLD if name in env]
    if left and not launched:
        say = broken if "RANK" in env and (positive(env.get("WORLD_SIZE")) or 1) > 1 else warning
        text = f"{', '.join(left)} left in this shell: a run would wait for other ranks"
        yield say(left[0], text, f"unset {' '.join(left)}")
    wrong = {
        "CUDA_VISIBLE_DEVICES": f"hides all {listed_gpus} GPUs of this machine"
        if listed_gpus and not gpus
        else "",
        **{n: what for n, what in SLOWS.items() if env.get(n, "").lower() in ("1", "true", "yes", "on")},
    }
    threads = positive(env.get("OMP_NUM_THREADS"))
    if threads and not launched and (threads > cores or threads == 1 < cores):
        wrong["OMP_NUM_THREADS"] = f"are the threads of a process, for {cores} cores"
    for name, what in wrong.items():
        if name in env and what:
            yield warning(name, f"{env[name]!r}: {what}", f"unset {name}")
