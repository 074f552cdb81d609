"""Checks of what computes: GPUs, cores, memory."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes
from isobatch.engine.machine.detect import cgroup_values, positive
from isobatch.launch.doctor.check import Check, broken, ok, warning
from isobatch.launch.doctor.probes import Probe
from isobatch.launch.doctor.software import pip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from isobatch.engine.machine.hardware import Gpu, Hardware

GIB = 1 << 30
FREE_RAM_SHARE, LEAST_FREE_RAM = 0.1, 2 * GIB
SMALLEST_SHM = GIB
INSTALL = f"{pip()} install --upgrade torch, with the --index-url that pytorch.org names for this machine"


def gpu_probe(number: int) -> Probe:
    """What is tried on a GPU that torch may use."""
    remedy = f"nvidia-smi lists its processes and errors (-q -d ECC,PAGE_RETIREMENT); {INSTALL}"
    return Probe(f"GPU {number}", "gpu_arithmetic", remedy, {"number": number})


def check_gpus(hardware: Hardware) -> list[Check]:
    """A line for each GPU that torch cannot use, and where there is none; the others are tried."""
    if not hardware.gpus:
        return [ok("GPU", "none: the processor trains")]
    if hardware.kind == "mps":
        return [ok("GPU", "the GPU of Apple's chip")]
    return [_why_unusable(f"GPU {n}", gpu) for n, gpu in enumerate(hardware.gpus) if not gpu.supported]


def _why_unusable(name: str, gpu: Gpu) -> Check:
    if "driver" in gpu.why_unusable:
        remedy = f"install a newer driver (nvidia.com/drivers), or {INSTALL}; after an update of it: restart"
        return broken(name, f"{gpu.name}: {gpu.why_unusable}", remedy)
    chip = ".".join(map(str, gpu.compute_capability))
    why = gpu.why_unusable or f"this torch has no kernels for its compute capability {chip}"
    return broken(name, f"{gpu.name}: {why}", INSTALL)


def check_cores(usable: int, total: int, load: float = 0.0) -> Check:
    """`usable`: within affinity, quota and Slurm's allocation; `total`: that the machine has."""
    if usable == 1 and total > 1:
        text = f"this shell may use 1 of {total} cores: loading and training share it"
        remedy = "srun --cpus-per-task=8, docker run --cpus=8, or leave taskset away"
        return warning("cores", text, remedy)
    limits = "" if usable >= total else " (affinity, quota or allocation)"
    return ok("cores", f"{usable} of {total}{limits}, load {load:.1f}")


def check_memory(root: Path, allowed: int) -> Check:
    """`allowed`: bytes within cgroup and allocation. What the cgroup's files hold gives way."""
    try:
        table = dict(re.findall(r"^(\w+):\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE))
    except OSError:
        table = {}
    used = [positive(v) for v in cgroup_values(root, "memory.current", "memory", "memory.usage_in_bytes")]
    stats = cgroup_values(root, "memory.stat", "memory", "memory.stat")
    files = [sum(map(int, re.findall(r"^(?:in)?active_file (\d+)", stat, re.MULTILINE))) for stat in stats]
    own = max((u for u in used if u), default=0.0) - max(files, default=0)
    free = min(int(table.get("MemAvailable", allowed // 1024)) * 1024, allowed - max(0.0, own))
    text = f"{format_bytes(max(0, free))} of {format_bytes(allowed)} are free"
    if free < min(LEAST_FREE_RAM, allowed / 2) or free < FREE_RAM_SHARE * allowed:
        return warning("memory", text, "ps aux --sort=-rss | head shows what holds it; end that, or --mem")
    return ok("memory", text)


def check_shm(folder: Path, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """/dev/shm, through which loader processes and NCCL exchange data."""
    remedy = "docker run --shm-size=8g (or --ipc=host), or: sudo mount -o remount,size=8g /dev/shm"
    if not os.access(folder, os.W_OK):
        return warning("/dev/shm", "cannot be written to: loader processes and NCCL need it", remedy)
    found = usage(folder)
    text = f"{format_bytes(found.free)} of {format_bytes(found.total)} are free"
    if found.free < SMALLEST_SHM:
        return warning("/dev/shm", f"{text}: too little for loader processes and NCCL", remedy)
    return ok("/dev/shm", text)
