"""Everything that is checked of this machine, in an order that lets the slow probes work meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core import hub_cache
from isobatch.core.package import cache_folder
from isobatch.engine.machine.detect import OWN_FILES, detect
from isobatch.launch.doctor import devices, software, storage
from isobatch.launch.doctor.probes import Child, Probe
from isobatch.launch.doctor.software import reinstall
from isobatch.launch.local.interfaces import loopback_interface

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.launch.doctor.check import Check

ROOT = Path("/")
COMPILE = Probe(
    "torch.compile",
    "compiled",
    "--compile off trains without it; its message in full: TORCH_LOGS=+inductor",
    needed_by="--compile on and --compile reduce-overhead",
    seconds=10.0,  # a first compilation takes 8 s: one that is still at work then has met no error
    patient=False,
)
TORCH = Probe("torch", "arithmetic", reinstall("torch"))
GLOO = Probe(
    "gloo",
    "all_reduce",
    "unset GLOO_SOCKET_IFNAME; ip link set lo up; a firewall must let this machine reach itself",
    {"backend": "gloo", "processes": 2},
)
NCCL = Probe(
    "nccl",
    "all_reduce",
    "NCCL_DEBUG=INFO isobatch doctor says why; nvidia-smi topo -m shows the links; unset NCCL_P2P_DISABLE, or"
    " try NCCL_P2P_DISABLE=1; a larger /dev/shm",
)
BITSANDBYTES = Probe(
    "bitsandbytes",
    "imported",
    reinstall("bitsandbytes>=0.49"),
    {"module": "bitsandbytes"},
    needed_by="--load-bits, --adapter qlora and 8-bit optimizers",
)
DEEPSPEED = Probe(
    "DeepSpeed",
    "imported",
    f"{reinstall('deepspeed>=0.19')}; where it asks for CUDA_HOME: install CUDA's compiler (nvcc) and export"
    " CUDA_HOME=/usr/local/cuda",
    {"module": "deepspeed"},
    needed_by="--strategy zero1, zero2 and zero3",
)


def check_machine(out: Path) -> Iterator[Check]:
    """Every check, as soon as it is known. `out`: the folder of runs."""
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:

        def begin(probe: Probe) -> Child:
            child = Child(probe, _on_loopback())
            stack.callback(child.stop)
            return child

        compiled, *others = map(begin, (COMPILE, TORCH, GLOO, *filter(_is_here, (BITSANDBYTES, DEEPSPEED))))
        hardware = detect()
        usable = [number for number, gpu in enumerate(hardware.gpus) if gpu.supported]
        if usable:
            with_all = dataclasses.replace(NCCL, arguments={"backend": "nccl", "processes": len(usable)})
            others += map(begin, [*map(devices.gpu_probe, usable), with_all])

        yield from software.check_versions(software.requirements())
        listed = len(list(ROOT.glob(OWN_FILES)))
        yield from software.check_variables(
            os.environ, cores=hardware.cpus, gpus=len(hardware.gpus), listed_gpus=listed
        )
        yield devices.check_cores(hardware.cpus, os.cpu_count() or 1, load)
        yield devices.check_memory(ROOT, hardware.ram_bytes)
        if sys.platform == "linux":
            yield devices.check_shm(ROOT / "dev" / "shm")
        yield from storage.check_folder("runs", out, "--out")
        yield from storage.check_folder("prepared data", cache_folder(), "ISOBATCH_CACHE")
        yield storage.check_hub(hub_cache.is_reachable())
        yield storage.check_slurm()
        yield from devices.check_gpus(hardware)
        for child in (*others, compiled):
            yield child.check()


def _is_here(library: Probe) -> bool:
    return software.installed_version(library.name.lower()) is not None


def _on_loopback() -> dict[str, str]:
    """As `auto` starts its processes; what the user set stays, so that its mistakes are met."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: os.environ.get(name, loopback_interface()) for name in names}
