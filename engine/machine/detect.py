"""Detect this machine's hardware: cores and memory within cgroup and SLURM limits, GPUs. Imports no torch.

The root folder and the environment are arguments, so that tests can run every rule on fixture folders.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.engine.machine.detect_nvidia import CommandRunner, detect_gpus, positive, run_command
from isobatch.engine.machine.hardware import MIB, Hardware, apple_machine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


GRANTED_CPUS = "ISOBATCH_CPUS"
"""Environment variable with the cores that a launcher grants our processes on this machine."""


def detect(
    *,
    root: Path = Path("/"),
    env: Mapping[str, str] = os.environ,
    execute: CommandRunner = run_command,
    nodes: int | None = None,
) -> Hardware:
    """The machine under `root`. `nodes`: their number, if the launcher knows it; else the environment's."""
    cpus, ram = allowed_cpus(root, env), allowed_ram(root, env)
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return apple_machine(ram, cpus, "detected")
    gpus = detect_gpus(env, execute, root)
    features = cpu_features(root, env)
    return Hardware(
        kind="cuda" if any(gpu.supported for gpu in gpus) else "cpu",
        gpus=gpus,
        nodes=nodes or world_nodes(env),
        cpus=cpus,
        ram_bytes=ram,
        shm_bytes=_free_bytes(root / "dev/shm"),
        cpu_bf16=bool(features & {"amx_bf16", "avx512_bf16"}),
        cpu_amx="amx_bf16" in features,
        wsl="microsoft" in _read(root / "proc/version").lower(),
        source="detected",
    )


def world_nodes(env: Mapping[str, str]) -> int:
    """Number of nodes that torchrun, accelerate or srun started processes on; 1 where none did."""
    world, local = positive(env.get("WORLD_SIZE")), positive(env.get("LOCAL_WORLD_SIZE"))
    if world and local:
        return max(1, int(world // local))
    return int(positive(env.get("SLURM_STEP_NUM_NODES")) or 1)


def allowed_cpus(root: Path, env: Mapping[str, str]) -> int:
    """Usable cores: the least of CPU affinity, cgroup quota and the allocation of SLURM or a launcher."""
    granted = [positive(env.get(name)) for name in ("SLURM_CPUS_PER_TASK", GRANTED_CPUS)]
    limits: list[float | None] = [_affinity(), _cpu_quota(root), *granted]
    return max(1, int(min(limit for limit in limits if limit)))


def allowed_ram(root: Path, env: Mapping[str, str]) -> int:
    """Usable memory in bytes: the least of physical memory, cgroup limit and SLURM's allocation."""
    cgroup = _least(map(positive, cgroup_values(root, "memory.max", "memory", "memory.limit_in_bytes")))
    limits = [_physical_ram(root), cgroup, _slurm_ram(env)]
    return int(min(limit for limit in limits if limit))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):  # absent on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quota(root: Path) -> float | None:
    version2 = [line.split() for line in cgroup_values(root, "cpu.max")]
    periods = cgroup_values(root, "", "cpu", "cpu.cfs_period_us")
    version1 = zip(cgroup_values(root, "", "cpu", "cpu.cfs_quota_us"), periods, strict=False)
    return _least(_share(*pair) for pair in [*version2, *version1] if len(pair) == 2)


def _share(quota: str, period: str) -> float | None:
    """Cores from a quota and its period in microseconds; "max" and -1 mean no limit."""
    cores, length = positive(quota), positive(period)
    return cores / length if cores and length else None


def cgroup_values(root: Path, unified: str, controller: str = "", legacy: str = "") -> list[str]:
    """The text of a limit in this process's cgroup and every cgroup above it.

    `unified` is the file's name in cgroup v2; `legacy` that in cgroup v1, under `controller`.
    """
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        name = unified if not controllers else legacy if controller in controllers.split(",") else ""
        base = root / "sys/fs/cgroup" / controllers
        found += [
            text for folder in _with_parents(base, path) if name and (text := _read(folder / name).strip())
        ]
    return found


def _with_parents(base: Path, path: str) -> list[Path]:
    """`base/path` and the folders above it, up to `base`."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [base.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _physical_ram(root: Path) -> int:
    if match := re.search(r"MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo")):
        return int(match[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _slurm_ram(env: Mapping[str, str]) -> float | None:
    """SLURM grants MB per node, or per core of this node; 0 means the whole node."""
    per_core = positive(env.get("SLURM_MEM_PER_CPU"))
    cores = positive(env.get("SLURM_CPUS_ON_NODE")) or positive(env.get("SLURM_CPUS_PER_TASK"))
    granted = positive(env.get("SLURM_MEM_PER_NODE")) or (per_core * cores if per_core and cores else None)
    return granted * MIB if granted else None


def cpu_features(root: Path, env: Mapping[str, str]) -> set[str]:
    """The processor's feature flags, as /proc/cpuinfo names them, but those that oneDNN may not use."""
    match = re.search(r"^flags\s*:(.*)$", _read(root / "proc/cpuinfo"), re.MULTILINE)
    found = set(match[1].split()) if match else set()
    limit = env.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()  # such as AVX512_CORE_AMX
    if limit == "DEFAULT" or "AMX" in limit:
        return found
    return found - ({"amx_bf16"} if "BF16" in limit or "FP16" in limit else {"amx_bf16", "avx512_bf16"})


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _least(values: Iterable[float | None]) -> float | None:
    return min((v for v in values if v), default=None)


def _free_bytes(path: Path) -> int:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
