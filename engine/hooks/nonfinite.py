"""A loss or a gradient that is NaN or infinite ends the run: no later step could be worth anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import TrainingError
from isobatch.engine.train.hooks import Hook

if TYPE_CHECKING:
    from isobatch.engine.train.figures import StepFigures


class NonFinite(Hook):
    """Raises TrainingError, before anything is saved of the step."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the run's, for the message."""
        self.folder = folder

    def on_figures(self, figures: StepFigures) -> None:
        phase, step = figures.row["phase"], figures.step
        for what, value in (("loss", figures.loss), ("gradient norm", figures.norm)):
            if not math.isfinite(value):
                raise TrainingError(
                    f"the {what} became {value} at step {step} of {phase}: lower --lr, lengthen --warmup, or"
                    " find the operation with --anomaly; checkpoints are from before; `isobatch replay"
                    f" {self.folder} --phase {phase} --step {step}` shows the samples and the first module"
                    " with a NaN"
                )
