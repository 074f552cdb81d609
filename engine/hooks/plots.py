"""Pictures of a run that is under way, for a task that wants them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from isobatch.engine.train.hooks import Hook

if TYPE_CHECKING:
    from isobatch.engine.train.figures import StepFigures


class Plots(Hook):
    """Calls `draw`, which must not wait, every so many steps."""

    def __init__(self, every: int, draw: Callable[[], None]) -> None:
        self.every, self.draw = every, draw

    def on_figures(self, figures: StepFigures) -> None:
        if figures.step % self.every == 0:
            self.draw()
