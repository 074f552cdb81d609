"""The progress of training on the terminal and in log.txt."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from isobatch.core.measures import now
from isobatch.core.terminal.status import doing, on_terminal
from isobatch.engine.train.hooks import Hook

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.core.terminal.console import Console
    from isobatch.engine.train.figures import StepFigures
    from isobatch.engine.train.hooks import Signal
    from isobatch.engine.train.state import Training

SECONDS_BETWEEN_LINES = 5.0


class ShowSteps(Hook):
    """Shows each step on a terminal's bar, and one every few seconds as a line."""

    name = "console"

    def __init__(self, lines: Console) -> None:
        self.lines = lines
        self._last = -1e9

    @contextlib.contextmanager
    def phase(self, state: Training) -> Iterator[None]:
        progress = state.progress
        self._steps, self._first, self._before = state.schedule.steps, progress.step, progress.train_seconds
        self._state, self._live = state, on_terminal()
        doing(f"{state.schedule.name}: the first steps")
        yield
        doing("saving")

    def on_figures(self, figures: StepFigures) -> set[Signal]:
        writes = now() - self._last >= SECONDS_BETWEEN_LINES or figures.step == self._steps
        if writes or self._live:
            self._last = now() if writes else self._last
            done, seconds = figures.step - self._first, self._state.progress.train_seconds - self._before
            self.lines.show_step(
                figures.row, self._steps, (self._steps - figures.step) * seconds / done, writes
            )
        return set()
