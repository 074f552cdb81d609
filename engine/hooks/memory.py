"""The peak of this process's memory, observed now and then; freed memory goes back to the system."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from isobatch.engine.runs.peak_memory import PeakMemory, trim_heap
from isobatch.engine.train.hooks import Hook

if TYPE_CHECKING:
    from isobatch.engine.train.figures import StepFigures
    from isobatch.engine.train.state import Training

EVERY = 8
"""Steps between two looks, which read and write files of the system."""


class Memory(Hook):
    """Adds `memory_bytes` to the row of a step: the largest peak that was seen so far."""

    def __init__(self, peak: PeakMemory) -> None:
        self.peak = peak

    @contextlib.contextmanager
    def phase(self, state: Training) -> Iterator[None]:
        self.peak.observe()
        trim_heap(state.world.device)
        yield
        self.peak.observe()

    def on_figures(self, figures: StepFigures) -> None:
        if figures.step % EVERY == 1:
            self.peak.observe()
            trim_heap(self.peak.device)
        figures.row["memory_bytes"] = self.peak.bytes
