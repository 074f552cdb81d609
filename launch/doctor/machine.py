"""Everything that is checked of this machine, in an order that lets the slow probes work meanwhile."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core import hub_cache
from isobatch.core.package import cache_folder
from isobatch.engine.machine.detect import detect
from isobatch.engine.machine.detect_nvidia import OWN_FILES
from isobatch.launch.doctor import devices, network, software, storage, variables
from isobatch.launch.doctor.children import Child
from isobatch.launch.local.interfaces import loopback_interface

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.launch.doctor.check import Check
    from isobatch.launch.doctor.children import Answer

SECONDS = 60.0
COMPILE_SECONDS = 10.0
"""The first compilation takes 8 s of a processor: one that is still at work then has met no error."""
ALL_SECONDS, LEAST_SECONDS = 19.0, 1.5
"""Of all checks; of measuring the processor, where the others took that long."""
ROOT = Path("/")


def check_machine(out: Path) -> Iterator[Check]:
    """Every check, as soon as it is known. `out`: the folder of runs."""
    began, load = time.monotonic(), os.getloadavg()[0]
    with contextlib.ExitStack() as stack:

        def begin(function: str, seconds: float = SECONDS, **arguments: object) -> Child:
            child = Child(function, seconds, network_environment, **arguments)
            stack.callback(child.stop)
            return child

        network_environment = _on_loopback()
        compiled = begin("compiled", COMPILE_SECONDS)
        gloo = begin("all_reduce", backend="gloo", processes=2)
        arithmetic = begin("arithmetic")
        quantised, deepspeed = begin("quantised"), begin("deepspeed_step")
        hardware = detect()
        gpus = sum(gpu.supported for gpu in hardware.gpus)
        nccl = begin("all_reduce", backend="nccl", processes=gpus) if gpus else None

        yield from software.check_versions(software.requirements())
        yield software.check_locale(sys.getfilesystemencoding())
        yield from _check_variables(hardware.cpus, len(hardware.gpus))
        yield variables.check_limits()
        yield devices.check_cores(hardware.cpus, os.cpu_count() or 1, load)
        yield devices.check_memory(ROOT, hardware.ram_bytes)
        if sys.platform == "linux":
            yield devices.check_shm(ROOT / "dev" / "shm")
        yield from storage.check_folder("runs", out, "--out")
        yield from storage.check_folder("prepared data", cache_folder(), "ISOBATCH_CACHE")
        yield storage.check_downloads(Path(os.environ.get("HF_HUB_CACHE") or hub_cache.cache_home() / "hub"))
        yield network.check_ports()
        yield network.check_hub(hub_cache.is_reachable())
        yield network.check_slurm()
        yield from network.check_nodes(os.environ, out)
        yield software.check_compiler(os.environ.get("CXX", "g++"))

        tried: Answer = arithmetic.answer()
        yield devices.check_torch(tried)
        yield from devices.check_gpus(hardware, tried)
        yield network.check_all_reduce("gloo", gloo.answer())
        if nccl is not None:
            yield network.check_all_reduce("nccl", nccl.answer())
        yield software.check_bitsandbytes(quantised.answer())
        yield software.check_deepspeed(deepspeed.answer())
        yield software.check_compile(compiled.answer())
        # Alone, because plans reckon with what it measures.
        left = max(LEAST_SECONDS, ALL_SECONDS - (time.monotonic() - began))
        yield devices.check_ceilings(begin("ceilings", left).answer())


def _on_loopback() -> dict[str, str]:
    """As `auto` starts its processes; what the user set stays, so that its mistakes are met."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, loopback_interface()) for name in names}


def _check_variables(cores: int, gpus: int) -> list[Check]:
    import psutil

    listed = len(list(ROOT.glob(OWN_FILES)))
    return variables.check_variables(
        os.environ, cores=cores, gpus=gpus, listed_gpus=listed, interfaces=[*psutil.net_if_addrs()]
    )
