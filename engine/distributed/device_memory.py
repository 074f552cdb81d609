"""Memory of CUDA devices, as far as it is set for the whole process. Imports no torch by itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""torch's names for the settings of its allocator, the newest first."""
OUTSIDE_ALLOCATOR_BYTES = 512 << 20
"""Left for what libraries such as cuBLAS take beside torch's allocator."""


def spills_to_host_memory(root: Path = Path("/")) -> bool:
    """Whether a GPU whose memory is full goes on in host memory, many times slower, in place of an error.

    The drivers of Windows do so for Linux under WSL, which reaches a GPU by this device.
    """
    return (root / "dev" / "dxg").exists()


def allocator_settings(environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Variables to set before torch is imported: segments that grow, so that varying lengths waste less.

    Empty where the user has set any of them, and on WSL, which does not support such segments.
    """
    if any(name in environment for name in ALLOCATOR_VARIABLES) or spills_to_host_memory(root):
        return {}
    return {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def forbid_spilling(device: torch.device, root: Path = Path("/")) -> None:
    """Let torch take no more than the free memory of a device whose driver would go on in host memory.

    Too large a micro-batch is then an error that the rehearsal meets, and not a run at a crawl.
    """
    import torch

    if device.type == "cuda" and spills_to_host_memory(root):
        free, total = torch.cuda.mem_get_info(device)
        share = max(0.0, (free - OUTSIDE_ALLOCATOR_BYTES) / total)
        torch.cuda.set_per_process_memory_fraction(share, device)
