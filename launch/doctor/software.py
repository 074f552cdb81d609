"""Checks of what is installed, and of variables and limits of this shell that break a run or slow it down."""

from __future__ import annotations

import importlib.metadata
import sys
import tomllib
from typing import TYPE_CHECKING, Any

from isobatch.core.package import ROOT
from isobatch.engine.machine.detect import positive
from isobatch.launch.doctor.check import Check, broken, ok, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

ONLY_FOR_SOME = ("peft", "nvidia-ml-py")
"""Requirements without which training still works, but for the flags that need them."""
WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLOWS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "TORCH_COMPILE_DISABLE": "--compile does nothing",
    "NCCL_P2P_DISABLE": "GPUs exchange gradients through host memory",
    "NCCL_IB_DISABLE": "nodes exchange gradients without InfiniBand",
}
"""Variables that are on with 1 -> what they do."""


def pip() -> str:
    """The command of this interpreter's pip."""
    return f"{sys.executable} -m pip"


def reinstall(requirement: str) -> str:
    """What mends a package that does not work."""
    return f'{pip()} install --force-reinstall "{requirement}"'


def requirements(root: Path = ROOT) -> list[str]:
    """What this copy and its extras require: of its pyproject.toml, else of the installed package."""
    project = root / "pyproject.toml"
    if project.is_file():
        found: dict[str, Any] = tomllib.loads(project.read_text())["project"]
        extras = [line for name, of in found["optional-dependencies"].items() if name != "dev" for line in of]
        return [*found["dependencies"], *(f"{line.partition(';')[0]}; extra == 'any'" for line in extras)]
    return [line for line in importlib.metadata.requires("isobatch") or [] if "extra == 'dev'" not in line]


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(
    required: Iterable[str], installed: Callable[[str], str | None] = installed_version
) -> list[Check]:
    """A line for each requirement that is not met; one line where all are."""
    from packaging.requirements import Requirement

    wrong, met = [], 0
    for need in map(Requirement, required):
        version = installed(need.name)
        optional = "extra" in str(need.marker)
        if need.name == "isobatch" or (optional and version is None):
            continue
        if need.marker and not optional and not need.marker.evaluate():
            continue
        if version is None or not need.specifier.contains(version, prereleases=True):
            say = warning if optional or need.name in ONLY_FOR_SOME else broken
            here = "is not installed" if version is None else f"{version} is here"
            text = f"{here}; isobatch needs {need.name}{need.specifier}"
            wrong.append(say(need.name, text, f'{pip()} install "{need.name}{need.specifier}"'))
        met += 1
    return wrong or [ok("versions", f"all {met} packages, those of extras too, are in versions that fit")]


def check_variables(
    env: Mapping[str, str], *, cores: int, gpus: int = 0, listed_gpus: int = 0
) -> list[Check]:
    """`gpus` that torch may use; `listed_gpus` that the machine has."""
    found = [*_stale_world(env), *_of_devices(env, cores, gpus, listed_gpus)]
    return found or [ok("environment", "no variable stands in the way")]


def _stale_world(env: Mapping[str, str]) -> Iterator[Check]:
    """A world of which this process would be a rank, though no launcher started it."""
    left = [name for name in WORLD if name in env]
    if not left or "TORCHELASTIC_RUN_ID" in env or "SLURM_PROCID" in env:
        return
    unset = f"unset {' '.join(left)}"
    if (positive(env.get("WORLD_SIZE")) or 1) > 1 and "RANK" in env:
        text = f"this shell says it is rank {env['RANK']} of {env['WORLD_SIZE']}: a run would wait for others"
        yield broken("WORLD_SIZE", text, unset)
    else:
        yield warning(left[0], f"{', '.join(left)} left in this shell: launchers read them", unset)


def _of_devices(env: Mapping[str, str], cores: int, gpus: int, listed_gpus: int) -> Iterator[Check]:
    name = "CUDA_VISIBLE_DEVICES"
    if name in env and listed_gpus and not gpus:
        yield warning(name, f"{env[name]!r} hides all {listed_gpus} GPUs of this machine", f"unset {name}")
    for name, what in SLOWS.items():
        if env.get(name, "").lower() in ("1", "true", "yes", "on"):
            yield warning(name, f"{env[name]}: {what}", f"unset {name}")
    name, threads = "OMP_NUM_THREADS", positive(env.get("OMP_NUM_THREADS"))
    if threads and "TORCHELASTIC_RUN_ID" not in env and (threads > cores or threads == 1 < cores):
        yield warning(name, f"one process has {threads:g} threads for {cores} cores", f"unset {name}")
