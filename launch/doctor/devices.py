"""Checks of what computes: torch, GPUs, cores, memory."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes
from isobatch.engine.machine.detect import cgroup_values
from isobatch.engine.machine.detect_nvidia import positive
from isobatch.launch.doctor.check import Check, broken, ok, warning
from isobatch.launch.doctor.software import pip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from isobatch.engine.machine.hardware import Gpu, Hardware
    from isobatch.launch.doctor.children import Answer

GIB = 1 << 30
LARGEST_ERROR = {"fp32": 1e-3, "bf16": 5e-2}
"""Relative error of a product of 64 numbers: about 3e-7 (with TF32 5e-4) and 5e-3 are usual."""
FREE_GPU_SHARE = 0.8
FREE_RAM_SHARE, LEAST_FREE_RAM = 0.1, 2 * GIB
SMALLEST_SHM = GIB
SLOW_CORE = 3e9
"""fp32 FLOP/s of a core, of which tens of 1e9 are usual."""
INSTALL = f"{pip()} install --upgrade torch, with the --index-url that pytorch.org names for this machine"


def check_torch(answer: Answer) -> Check:
    """Of `probes.arithmetic`: whether torch computes on this processor."""
    reinstall = f"{pip()} install --force-reinstall torch"
    if answer.error:
        return broken("torch", f"does not compute: {answer.error}", reinstall)
    found = answer.found
    for precision, key in (("fp32", "error"), ("bf16", "bf16_error")):
        if not found[key] < LARGEST_ERROR[precision]:
            text = f"a product in {precision} is off by {found[key]:.1e}"
            return broken("torch", text, reinstall)
    made_for = f"CUDA {found['build']}" if found["build"] else "CPUs"
    return ok("torch", f"{found['version']}, made for {made_for}, computes rightly on the CPU")


def check_gpus(hardware: Hardware, answer: Answer) -> list[Check]:
    """A line for each GPU: whether this torch can use it, and computes rightly there."""
    if not hardware.gpus:
        text = "the GPU of Apple's chip" if hardware.kind == "mps" else "none: the processor trains"
        return [ok("GPU", text)]
    tried = (answer.found or {}).get("gpus", [])
    return [
        _check_gpu(f"GPU {number}", gpu, tried[number] if number < len(tried) else None)
        for number, gpu in enumerate(hardware.gpus)
    ]


def _check_gpu(name: str, gpu: Gpu, tried: dict[str, Any] | None) -> Check:
    if gpu.why_unusable:
        return broken(name, f"{gpu.name}: {gpu.why_unusable}", _driver_remedy(gpu.why_unusable))
    if not gpu.supported:
        chip = ".".join(map(str, gpu.compute_capability))
        text = f"{gpu.name}: this torch has no kernels for its compute capability {chip}"
        return broken(name, text, INSTALL)
    if tried is None:
        return broken(name, f"{gpu.name}: nvidia-smi lists it and torch does not see it", "nvidia-smi -q")
    if "error" in tried:
        return broken(name, f"{gpu.name}: {tried['error']}", f"nvidia-smi; {INSTALL}")
    for precision, key in (("fp32", "error_of_product"), ("bf16", "bf16_error")):
        if not tried[key] < LARGEST_ERROR[precision]:
            text = (
                f"{gpu.name}: a product in {precision} is off by {tried[key]:.1e}: defective, or overclocked"
            )
            return broken(name, text, "nvidia-smi -q -d ECC,PAGE_RETIREMENT; train on another GPU")
    free, total = tried["free_bytes"], tried["total_bytes"]
    if free < FREE_GPU_SHARE * total:
        text = f"{gpu.name}: {format_bytes(free)} of {format_bytes(total)} are free, others use the rest"
        return warning(name, text, "nvidia-smi lists its processes; end them, or --memory-limit")
    bf16 = "bf16 and fp32" if gpu.native_bf16 else "fp32 (bf16 only by emulation, fp16 is faster)"
    return ok(name, f"{gpu.name}, {format_bytes(free)} free, computes rightly in {bf16}")


def _driver_remedy(why: str) -> str:
    if "driver" in why:
        return "install a newer driver (nvidia.com/drivers), or " + INSTALL
    return INSTALL if "build for CPUs" in why else "nvidia-smi; after an update of the driver: restart"


def check_cores(usable: int, total: int, load: float = 0.0) -> Check:
    """`usable`: within affinity, quota and Slurm's allocation; `total`: that the machine has."""
    if usable == 1 and total > 1:
        text = f"this shell may use 1 of {total} cores: loading and training share it"
        remedy = "srun --cpus-per-task=8, docker run --cpus=8, or leave taskset away"
        return warning("cores", text, remedy)
    busy = f", load {load:.1f}" if load else ""
    limits = "" if usable >= total else " (affinity, quota or allocation)"
    return ok("cores", f"{usable} of {total}{limits}{busy}")


def check_ceilings(answer: Answer) -> Check:
    """Of `probes.ceilings`: how fast the processor is, as plans reckon."""
    name = "speed"
    if answer.late:
        return ok(name, "not measured, others compute here: the next `plan` does")
    if answer.error:
        reinstall = f"{pip()} install --force-reinstall torch"
        return warning(name, f"cannot be measured: {answer.error}", reinstall)
    flops, traffic = max(answer.found["matmul"]), answer.found["bandwidth"]
    text = f"{flops / 1e9:.0f} GFLOP/s in fp32, {traffic / 1e9:.1f} GB/s from memory"
    if flops < SLOW_CORE * answer.found["cores"]:
        remedy = "plug it in; sudo cpupower frequency-set -g performance; then rm ISOBATCH_CACHE/ceilings-*"
        return warning(name, f"{text}: its clock is held low, or other programs have it", remedy)
    return ok(name, text)


def check_memory(root: Path, allowed: int) -> Check:
    """`allowed`: bytes that this process may use, by the machine, its cgroup and Slurm."""
    table = dict(re.findall(r"(\w+):\s+(\d+) kB", _read(root / "proc/meminfo")))
    sizes = {name: int(kilobytes) * 1024 for name, kilobytes in table.items()}
    used = [positive(v) for v in cgroup_values(root, "memory.current", "memory", "memory.usage_in_bytes")]
    own = max((u for u in used if u), default=0.0) - max(map(_file_cache, _stat(root)), default=0)
    free = min(sizes.get("MemAvailable", allowed), allowed - max(0.0, own))
    swap, swap_free = sizes.get("SwapTotal", 0), sizes.get("SwapFree", 0)
    text = f"{format_bytes(max(0, free))} of {format_bytes(allowed)} are free"
    if free < min(LEAST_FREE_RAM, allowed / 2) or free < FREE_RAM_SHARE * allowed:
        return warning("memory", text, "ps aux --sort=-rss | head shows what holds it; end that, or --mem")
    if swap - swap_free > max(GIB, swap / 2):
        swapped = f"{text}, and {format_bytes(swap - swap_free)} were swapped out: what needs them crawls"
        return warning("memory", swapped, "end what is not needed, then: sudo swapoff -a && sudo swapon -a")
    return ok("memory", text)


def _stat(root: Path) -> list[str]:
    return cgroup_values(root, "memory.stat", "memory", "memory.stat")


def check_shm(folder: Path, usage: Callable[[Path], Any] = shutil.disk_usage) -> Check:
    """/dev/shm, through which loader processes and NCCL exchange data."""
    remedy = "docker run --shm-size=8g (or --ipc=host), or: sudo mount -o remount,size=8g /dev/shm"
    if not folder.is_dir():
        return warning("/dev/shm", "is not there: loader processes and NCCL need it", remedy)
    found = usage(folder)
    text = f"{format_bytes(found.free)} of {format_bytes(found.total)} are free"
    if found.free < SMALLEST_SHM:
        return warning("/dev/shm", f"{text}: too little for loader processes and NCCL", remedy)
    if not os.access(folder, os.W_OK):
        return warning("/dev/shm", "cannot be written to", "chmod 1777 /dev/shm")
    return ok("/dev/shm", text)


def _file_cache(stat: str) -> int:
    """Bytes of files that a cgroup keeps in memory, and gives back when memory is wanted."""
    return sum(int(size) for size in re.findall(r"^(?:in)?active_file (\d+)", stat, re.MULTILINE))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
