"""The progress of training on the terminal and in log.txt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.core.measures import now
from isobatch.core.terminal import doing, on_terminal
from isobatch.engine.train.hooks import Hook

if TYPE_CHECKING:
    from isobatch.core.terminal import Console
    from isobatch.engine.train.figures import StepFigures
    from isobatch.engine.train.state import Training

SECONDS_BETWEEN_LINES = 5.0


class ShowSteps(Hook):
    """Shows each step on a terminal's bar, and one every few seconds as a line."""

    name = "console"

    def __init__(self, state: Training, lines: Console) -> None:
        """`state`: of the phase that is shown."""
        self.progress, self.steps, self.lines = state.progress, state.schedule.steps, lines
        self._first, self._before = self.progress.step, self.progress.train_seconds
        self._last, self._live = -1e9, on_terminal()
        doing(f"{state.schedule.name}: the first steps")

    def on_figures(self, figures: StepFigures) -> None:
        writes = now() - self._last >= SECONDS_BETWEEN_LINES or figures.step == self.steps
        if writes or self._live:
            self._last = now() if writes else self._last
            done, seconds = figures.step - self._first, self.progress.train_seconds - self._before
            seconds_left = (self.steps - figures.step) * seconds / done
            self.lines.show_step(figures.row, self.steps, seconds_left, writes)
