"""Peak memory of this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from isobatch.core.measures import peak_resident_bytes, return_freed_memory

CLEAR = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs it sets VmHWM to the memory that is resident now (Linux, proc(5))."""


class PeakMemory:
    """The peak of a run, of all that its process does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        """The peak that was observed last."""
        trim_heap(device)
        reset_peak(device)  # preparing data may have taken more, in this process

    def observe(self) -> None:
        """Take in the peak so far; freed memory goes back to the system."""
        self.bytes = max(self.bytes, peak_bytes(self.device))
        trim_heap(self.device)


def peak_bytes(device: torch.device) -> int:
    """Peak since `reset_peak`: what the allocator reserved on a GPU, this process's memory on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident_bytes()


def trim_heap(device: torch.device) -> None:
    """Return freed memory to the system, on a CPU."""
    if device.type == "cpu":
        return_freed_memory()


def reset_peak(device: torch.device) -> None:
    """Begin a new peak with the memory that is in use; without effect where the system cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        CLEAR.write_text(RESET_PEAK)
