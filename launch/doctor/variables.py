"""Checks of environment variables and limits that break a run or slow it down."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.engine.distributed.device_memory import ALLOCATOR_VARIABLES, spills_to_host_memory
from isobatch.engine.machine.detect_nvidia import positive
from isobatch.launch.doctor.check import Check, broken, ok, warning

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLOWS = {
    "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every tensor is allocated by the driver",
    "TORCHDYNAMO_DISABLE": "--compile does nothing",
    "TORCH_COMPILE_DISABLE": "--compile does nothing",
    "NCCL_P2P_DISABLE": "GPUs exchange gradients through host memory",
    "NCCL_SHM_DISABLE": "GPUs exchange gradients through the network",
    "NCCL_IB_DISABLE": "nodes exchange gradients without InfiniBand",
}
"""Variables that are on with 1 -> what they do."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
FEWEST_FILES = 1024


def check_variables(
    env: Mapping[str, str],
    *,
    cores: int,
    gpus: int = 0,
    listed_gpus: int = 0,
    interfaces: Collection[str] = (),
    root: Path = Path("/"),
) -> list[Check]:
    """`gpus` that torch may use; `listed_gpus` that the machine has; `interfaces` of its networks."""
    found = [
        *_stale_world(env),
        *_hidden_gpus(env, gpus, listed_gpus),
        *(
            warning(name, f"{env[name]}: {what}", f"unset {name}")
            for name, what in SLOWS.items()
            if env.get(name, "").lower() in ("1", "true", "yes", "on")
        ),
        *_threads(env, cores),
        *_missing_interfaces(env, interfaces),
        *_temporary_folder(env),
        *_allocator(env, root),
    ]
    return found or [ok("environment", "no variable stands in the way")]


def _stale_world(env: Mapping[str, str]) -> list[Check]:
    """A world of which this process would be a rank, though no launcher started it."""
    if "TORCHELASTIC_RUN_ID" in env or "SLURM_PROCID" in env:
        return []
    left = [name for name in WORLD if name in env]
    if not left:
        return []
    unset = f"unset {' '.join(left)}"
    if (positive(env.get("WORLD_SIZE")) or 1) > 1 and "RANK" in env:
        text = f"this shell says it is rank {env['RANK']} of {env['WORLD_SIZE']}: a run would wait for others"
        return [broken("WORLD_SIZE", text, unset)]
    return [warning(left[0], f"{', '.join(left)} left in this shell: launchers read them", unset)]


def _hidden_gpus(env: Mapping[str, str], gpus: int, listed: int) -> list[Check]:
    if "CUDA_VISIBLE_DEVICES" not in env or gpus or not listed:
        return []
    name, value = "CUDA_VISIBLE_DEVICES", env["CUDA_VISIBLE_DEVICES"]
    return [warning(name, f"{value!r} hides all {listed} GPUs of this machine", f"unset {name}")]


def _threads(env: Mapping[str, str], cores: int) -> list[Check]:
    name, count = "OMP_NUM_THREADS", positive(env.get("OMP_NUM_THREADS"))
    if count is None or "TORCHELASTIC_RUN_ID" in env:
        return []
    if count > cores:
        return [warning(name, f"{count:g} threads for {cores} cores wait for each other", f"unset {name}")]
    if count == 1 and cores > 1:
        return [warning(name, f"1 of {cores} cores computes where one process trains", f"unset {name}")]
    return []


def _missing_interfaces(env: Mapping[str, str], interfaces: Collection[str]) -> list[Check]:
    found = []
    for name in INTERFACES:
        wanted = env.get(name, "").strip("^=")
        exists = any(here.startswith(part) for part in wanted.split(",") for here in interfaces)
        if wanted and interfaces and not exists and not env[name].startswith("^"):
            have = ", ".join(sorted(interfaces))
            found.append(broken(name, f"there is no network {wanted} (there are {have})", f"unset {name}"))
    return found


def _temporary_folder(env: Mapping[str, str]) -> list[Check]:
    folder = env.get("TMPDIR")
    if not folder or Path(folder).is_dir():
        return []
    return [warning("TMPDIR", f"{folder} is no folder: temporary files go elsewhere", f"mkdir -p {folder}")]


def _allocator(env: Mapping[str, str], root: Path) -> list[Check]:
    name = next((n for n in ALLOCATOR_VARIABLES if "expandable_segments:True" in env.get(n, "")), "")
    if not name or not spills_to_host_memory(root):
        return []
    return [warning(name, "drivers of Windows do not support expandable segments", f"unset {name}")]


def check_limits(soft_files: int | None = None, address_space: int | None = None) -> Check:
    """Open files and address space of a process; by default as they are here."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft_files is None else soft_files
    space = resource.getrlimit(resource.RLIMIT_AS)[0] if address_space is None else address_space
    if files != resource.RLIM_INFINITY and files < FEWEST_FILES:
        text = f"{files} open files: loader processes and launchers need more"
        return warning("limits", text, "ulimit -n 65536")
    if space != resource.RLIM_INFINITY:
        text = f"an address space of {space / 1e9:.0f} GB: CUDA reserves more than it uses"
        return warning("limits", text, "ulimit -v unlimited")
    return ok("limits", f"{'unlimited' if files == resource.RLIM_INFINITY else f'{files:,}'} open files")
