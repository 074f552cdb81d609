"""Figures for a tracker (TensorBoard, W&B, MLflow, Trackio), over the steps of all phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from isobatch.engine.train.hooks import Hook

if TYPE_CHECKING:
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.train.figures import StepFigures


class Tracker(Hook):
    """Sends every row. Training goes on where the tracker fails, and it gets nothing more."""

    def __init__(self, world: Communicator, name: str, say: Callable[[str], None]) -> None:
        """`name`: none where there is no tracker."""
        self.world, self.say = world, say
        self.tracker = "" if name == "none" else name

    def on_figures(self, figures: StepFigures) -> None:
        self.send(figures.row, figures.steps)

    def send(self, row: Mapping[str, Any], steps: int, prefix: str = "") -> None:
        """Send the numbers of a row, those in lists too, whose place is so many steps of all phases."""
        if not self.tracker:
            return
        found = {name: value for name, value in row.items() if isinstance(value, float)}
        for name, value in row.items():  # each of a list of floats under NAME/NUMBER
            if isinstance(value, list) and all(isinstance(one, float) for one in value):
                found |= {f"{name}/{number}": one for number, one in enumerate(value)}
        values = {f"{prefix}{name}": value for name, value in found.items()}
        try:
            self.world.accelerator.log(values, step=steps)
        except Exception as error:  # a library's own: its server may be gone
            self.say(f"--tracker {self.tracker} gets nothing more: {type(error).__name__}: {error}")
            self.tracker = ""
