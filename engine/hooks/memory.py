"""The peak of this process's memory, observed now and then; freed memory goes back to the system."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from isobatch.engine.runs.peak_memory import PeakMemory, trim_heap
from isobatch.engine.train.hooks import Hook

if TYPE_CHECKING:
    from isobatch.engine.train.figures import StepFigures
    from isobatch.engine.train.hooks import Signal
    from isobatch.engine.train.state import Training

EVERY = 8
"""Steps between two looks, which read and write files of the system."""
FIRST_STEPS = 2
"""Of a phase: each is looked at."""


class Memory(Hook):
    """Adds `memory_bytes` to the row of a step: the largest peak that was seen so far."""

    def __init__(self, peak: PeakMemory) -> None:
        self.peak, self._bytes = peak, 0

    @contextlib.contextmanager
    def phase(self, state: Training) -> Iterator[None]:
        self._looks = FIRST_STEPS
        self.peak.observe()
        trim_heap(state.world.device)
        yield
        self.peak.observe()

    def on_figures(self, figures: StepFigures) -> set[Signal]:
        if self._looks or figures.step % EVERY == 1:
            self._looks = max(0, self._looks - 1)
            self._look()
            trim_heap(self.peak.device)
        figures.row["memory_bytes"] = self._bytes
        return set()

    def at_pause(self, state: Training, step: int, asked: set[Signal]) -> set[Signal]:  # noqa: ARG002
        self._look()  # what the pause takes is not of training
        return set()

    def _look(self) -> None:
        self.peak.observe()
        self._bytes = self.peak.bytes
