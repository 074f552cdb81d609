"""Peak memory of this process, and the stage of the run in which it was reached."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to clear_refs it sets VmHWM to the memory that is resident now (Linux, proc(5))."""


class PeakMemory:
    """Follows the peak. The stage that last raised it is the stage of the peak."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes = 0
        self.stage = "start"
        reset_peak(device)  # preparing data may have taken more, in this process

    def observe(self, stage: str) -> None:
        """At the end of a stage (start, train, save, evaluate, export): take in the peak until now."""
        if (found := peak_bytes(self.device)) > self.bytes:
            self.bytes, self.stage = found, stage

    def merge(self, ranks: list[tuple[int, str]]) -> None:
        """Take in the (bytes, stage) of every rank."""
        self.bytes, self.stage = max(ranks)

    def fields(self) -> dict[str, Any]:
        """The fields of summary.json."""
        return {"peak_memory_bytes": self.bytes, "peak_memory_stage": self.stage}


def peak_bytes(device: torch.device) -> int:
    """Peak since `reset_peak`: what the allocator reserved on a GPU, this process's memory on a CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved(device)
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak(device: torch.device) -> None:
    """Begin a new peak with the memory that is in use; without effect where the system cannot."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        CLEAR.write_text(RESET_PEAK)
