"""Time that training loses to a checkpoint, against torch.save: `python -m benchmarks checkpoint`.

Checkpoints are written in the background. `stall` is all the time lost: the copy of the state, and what the
steps took longer during the writing. torch.save writes the same bytes.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 40


def measure(quick: bool) -> list[dict[str, Any]]:
    """Rows per model size; medians of several checkpoints."""
    widths = (512,) if quick else (512, 1024, 1536)
    return [_measure(width, repeats=2 if quick else 5) for width in widths]


def _measure(width: int, repeats: int) -> dict[str, Any]:
    import torch
    from torch import nn

    from isobatch.engine.checkpointing import portable_state
    from isobatch.engine.checkpointing.writer import CheckpointWriter

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(256, width)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tensors = portable_state.collect_state(model, optimizer)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saving, copying, stalling = [], [], []
        writer = CheckpointWriter(OneProcess())  # type: ignore[arg-type]
        for number in range(repeats + 1):  # the first one allocates the memory that the others reuse
            began = time.perf_counter()
            torch.save(tensors, folder / "torch.pt")
            saving.append(time.perf_counter() - began)
            alone = _seconds(step)
            began = time.perf_counter()
            writer.start(folder / f"train-{number}", portable_state.rank_share(tensors, 0, 1), {})
            copying.append(time.perf_counter() - began)
            stalling.append(_slowdown(step, writer, alone) + copying[-1])
            writer.wait()
    first = {"first_copy_seconds": copying.pop(0)}
    del saving[0], stalling[0]
    save, stall = statistics.median(saving), statistics.median(stalling)
    return {
        "megabytes": round(size / 1e6),
        "torch_save_seconds": save,
        **first,
        "copy_seconds": statistics.median(copying),
        "stall_seconds": stall,
        "stall_over_torch_save": stall / save,
        "copy_over_torch_save": statistics.median(copying) / save,
    }


def _seconds(step: Callable[[], None]) -> float:
    """Mean seconds of a step while nothing is being written."""
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - began) / STEPS


def _slowdown(step: Callable[[], None], writer: Any, alone: float) -> float:
    """Seconds that steps took longer while the checkpoint was being written."""
    lost = 0.0
    while writer.rank_flags()[0] == 0:
        began = time.perf_counter()
        step()
        lost += time.perf_counter() - began - alone
    return lost


@dataclasses.dataclass
class OneProcess:
    """What the writer asks of a communicator, for one process."""

    rank: int = 0
    size: int = 1
    node: int = 0
    device: Any = None
    is_main: bool = True

    def all_gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        return
