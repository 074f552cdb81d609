"""What is done with the figures of a step: they are checked, kept, shown, drawn and sent to a tracker."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from isobatch.core.errors import TrainingError
from isobatch.core.measures import now
from isobatch.core.terminal import SECONDS_BETWEEN_LINES, Console, doing, on_terminal
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.runs.metrics_log import LEFT_OUT, MetricsLog
from isobatch.engine.train.figures import StepFigures
from isobatch.engine.train.hooks import Hook
from isobatch.engine.train.state import Training


class NonFinite(Hook):
    """Raises TrainingError where the loss or the gradient is NaN or infinite: no later step could be worth
    anything. Nothing is saved of the step.
    """

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


class Log(Hook):
    """Writes the row of a step to metrics.jsonl, to which the hooks before it have added; and the decisions
    of a task that changes its model.
    """

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
        self.log.flush_skipped()
        self.log.log_metrics({"phase": phase, "step": step, LEFT_OUT: True})


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


class Plots(Hook):
    """Calls `draw`, a task's pictures, which must not wait, every so many steps."""

    def __init__(self, every: int, draw: Callable[[], None]) -> None:
        self.every, self.draw = every, draw

    def on_figures(self, figures: StepFigures) -> None:
        if figures.step % self.every == 0:
            self.draw()


class Tracker(Hook):
    """Sends every row to a tracker (TensorBoard, W&B, MLflow, Trackio), over the steps of all phases.

    Training goes on where the tracker fails, and it gets nothing more.
    """

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
