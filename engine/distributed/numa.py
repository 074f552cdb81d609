"""NUMA: bind a GPU's process to the processor cores of the memory node that the GPU hangs on.

torch's own binding (`torchrun --numa-binding`) needs the program numactl, and accelerate's needs pynvml and
takes the local rank for the GPU's number, which CUDA_VISIBLE_DEVICES changes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SYSFS = Path("/sys")


def bind_to_node_of(device: torch.device, root: Path = SYSFS) -> set[int]:
    """Bind this process and its threads to the cores of a CUDA device's NUMA node; returns the cores.

    Only cores that the process may use already, so that a container's, Slurm's or the user's own limits stay.
    Binds nothing, and returns an empty set, where the machine has one node, names no node for the device, or
    leaves this process few cores of that node.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return set()
    cores = cores_to_use(_pci_address(device), os.sched_getaffinity(0), root)
    for thread in _threads() if cores else ():
        with contextlib.suppress(OSError):  # it has ended, or a stricter limit came meanwhile
            os.sched_setaffinity(thread, cores)
    return cores


def cores_to_use(pci_address: str, allowed: set[int], root: Path = SYSFS) -> set[int]:
    """The cores of `allowed` on the NUMA node of a PCI device; empty where to bind gains nothing, or costs.

    It costs cores where those of a container lie on other nodes: the node has less than its share of them.
    """
    nodes = [_cores(folder / "cpulist") for folder in (root / "devices/system/node").glob("node[0-9]*")]
    nodes = [cores for cores in nodes if cores]  # a node may have memory alone
    try:
        number = int((root / "bus/pci/devices" / pci_address / "numa_node").read_text())
        on_node = _cores(root / f"devices/system/node/node{number}" / "cpulist")
    except (OSError, ValueError):
        return set()
    found = on_node & allowed
    return found if len(nodes) > 1 and found and len(found) * len(nodes) >= len(allowed) else set()


def _cores(file: Path) -> set[int]:
    """The numbers in a list such as 0-3,8,10-11; empty where there is no such file."""
    try:
        parts = file.read_text().strip().split(",")
    except OSError:
        return set()
    bounds = [part.partition("-") for part in parts if part]
    return {n for first, _, last in bounds for n in range(int(first), int(last or first) + 1)}


def _pci_address(device: torch.device) -> str:
    """A CUDA device's place as sysfs writes it, such as 0000:dc:00.0."""
    import torch

    found: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks these
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


def _threads() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
