"""A loss or a gradient that is NaN or infinite ends the run: no later step could be worth anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import TrainingError
from isobatch.engine.train.hooks import Hook

if TYPE_CHECKING:
    from isobatch.engine.train.figures import StepFigures
    from isobatch.engine.train.hooks import Signal


class NonFinite(Hook):
    """Raises TrainingError, before anything is saved of the step."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the run's, for the message."""
        self.folder = folder

    def on_figures(self, figures: StepFigures) -> set[Signal]:
        if math.isfinite(figures.loss) and math.isfinite(figures.norm):
            return set()
        is_loss = not math.isfinite(figures.loss)
        what, value = ("loss", figures.loss) if is_loss else ("gradient norm", figures.norm)
        phase = figures.row["phase"]
        raise TrainingError(
            f"the {what} became {value} at step {figures.step} of {phase}: lower --lr,"
            " lengthen --warmup, or find the operation with --anomaly; checkpoints are from before;"
            f" `isobatch replay {self.folder} --phase {phase} --step"
            f" {figures.step}` shows the samples and the first module with a NaN"
        )
