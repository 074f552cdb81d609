"""Loss spikes: a rule over the reduced loss and gradient norm of a step, the same on any number of processes.

A step is a spike where its loss lies far above the median of the losses before it, in units of their median
absolute deviation (MAD), or its norm does; or where one of them is not finite. Positive ones are compared by
their logarithms: near zero, batches differ by factors. Medians do not move with what they are to find. Values
are rounded, so that float sums in another order decide the same.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isobatch.core.errors import SpikeError, TrainingError
from isobatch.engine.optimization.left_out import leave_out, refuse_where_steps_matter
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.train.figures import StepFigures
from isobatch.engine.train.hooks import Hook
from isobatch.engine.train.state import Training

WINDOW = 64
"""Steps that a step is compared with, at most."""
LEAST = 16
"""Steps before the rule judges."""
DEVIATIONS = 6.0
"""In standard deviations as the MAD estimates them (1.4826 MAD, for a normal distribution)."""
LEAST_RISE = 0.1
"""A loss must also lie so much of the median above it: at the end of training deviations are small."""
NORM_RATIO, NORM_DEVIATIONS = 20.0, 5.0
"""Of the norm, to its median, and of its logarithm."""
ROLLBACK_STEPS = 20
"""Steps that --on-spike rollback leaves out before the spike: weights are harmed before the loss shows it."""
MOST_LEFT_OUT = {"skip": 8, "rollback": 48}
"""Steps among the last WINDOW that may be left out; with more, training diverges."""
DIGITS = 5
"""Significant digits."""


@dataclass(slots=True)
class SpikeWatch:
    """The last losses and norms of a phase. A checkpoint holds these fields."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    warned_at: int = 0
    """The step of the last warning."""

    def judge(self, loss: float, norm: float) -> str:
        """Why a step is a spike; empty where it is none."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss was {loss} and the gradient norm {norm}"
        if len(self.losses) < LEAST:
            return ""
        of_loss = "loss", _rounded(loss), self.losses, LEAST_RISE, DEVIATIONS
        of_norm = "gradient norm", _rounded(norm), self.norms, NORM_RATIO - 1, NORM_DEVIATIONS
        for what, value, before, least, deviations in (of_loss, of_norm):
            middle, are_positive = statistics.median(before), min(value, *before) > 0
            scale, *scales = map(math.log, (value, *before)) if are_positive else (value, *before)
            usual = statistics.median(scales)
            spread = 1.4826 * statistics.median(abs(one - usual) for one in scales)
            if middle and value - middle > least * abs(middle) and scale - usual > deviations * spread:
                return f"its {what} was {value:.4g}, and {middle:.4g} the median of the {len(before)} before"
        return ""

    def take_in(self, loss: float, norm: float) -> None:
        """Let later steps be compared with this one."""
        self.losses = [*self.losses, float(f"{loss:.{DIGITS}g}")][-WINDOW:]
        self.norms = [*self.norms, float(f"{norm:.{DIGITS}g}")][-WINDOW:]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


class Spikes(Hook):
    """Names a step that is a spike, or ends the attempt so that the next one leaves the step out.

    All ranks read the same figures, so that all decide the same.
    """

    def __init__(self, run: RunFolder, state: Training, say: Callable[[str], None]) -> None:
        """`state`: of the phase that is watched."""
        self.run, self.training, self.say, self.watch = run, state, say, SpikeWatch()
        self.mode = run.recipe.on_spike

    def on_figures(self, figures: StepFigures) -> None:
        if why := self.watch.judge(figures.loss, figures.norm):
            self._answer(figures.step, why)
        self.watch.take_in(figures.loss, figures.norm)
        if figures.output.change is not None:
            self.watch = SpikeWatch()  # another model has another loss

    def _answer(self, step: int, why: str) -> None:
        """Warn of a spike, or decide to go back and leave it out: raises SpikeError then."""
        phase, left_out = self.training.schedule.name, self.training.schedule.left_out
        said = f"step {step} of {phase} is a spike: {why}"
        if self.mode == "warn":
            # How to see a spike and to leave it out is said once for all that follow it.
            follows = step - self.watch.warned_at < WINDOW and self.watch.warned_at
            self.watch.warned_at = step
            if not follows:
                place = f"{self.run.folder} --phase {phase} --step {step}"
                self.say(f"{said}; `isobatch replay {place}` shows its samples")
            return
        refuse_where_steps_matter(self.training.task)
        first = max(1, step - ROLLBACK_STEPS) if self.mode == "rollback" else step
        before = {n for n in left_out if step - WINDOW < n <= step}
        if len(before | set(range(first, step + 1))) > MOST_LEFT_OUT[self.mode]:
            left = f"{len(before)} of the {WINDOW} steps before were left out"
            raise TrainingError(f"{said}; {left}: lower --lr")
        if self.training.world.is_main:
            leave_out(self.run, phase, first, step, said)
        steps = f"step {step}" if first == step else f"steps {first} to {step}"
        raise SpikeError(f"{said}; {steps} will be left out")

    def state(self) -> dict[str, Any]:
        return dataclasses.asdict(self.watch)

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        self.watch = SpikeWatch(**state)
