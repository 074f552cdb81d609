"""The rows of metrics.jsonl, and the decisions of a task that changes its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from isobatch.core.errors import TrainingError
from isobatch.engine.train.hooks import Hook

if TYPE_CHECKING:
    from isobatch.engine.runs.metrics_log import MetricsLog
    from isobatch.engine.train.figures import StepFigures


class Log(Hook):
    """Writes the row of a step, to which the hooks before it have added."""

    def __init__(self, log: MetricsLog, say: Callable[[str], None]) -> None:
        self.log, self.say = log, say

    def on_figures(self, figures: StepFigures) -> None:
        self.log.log_step(figures.row, figures.output.loaded.work.samples)
        if (change := figures.output.change) is not None:
            place = {"phase": figures.row["phase"], "step": figures.step}
            self.log.log_decision({**place, "decision": change.decision, **change.facts})
            if change.stop:
                raise TrainingError(change.message)
            if change.message:
                self.say(change.message)

    def on_left_out(self, phase: str, step: int) -> None:
        self.log.log_left_out(phase, step)
