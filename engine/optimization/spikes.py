"""Loss spikes: a rule over the reduced loss and gradient norm of a step, the same on any number of processes.

A step is a spike where its loss lies far above the median of the losses before it, in units of their median
absolute deviation (MAD), or its norm does; or where one of them is not finite. Medians do not move with what
they are to find. Values are rounded, so that float sums in another order decide the same.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

WINDOW = 64
"""Steps that a step is compared with, at most."""
LEAST = 16
"""Steps before the rule judges."""
DEVIATIONS = 8.0
"""Of the loss, in standard deviations as the MAD estimates them (1.4826 MAD, for a normal distribution)."""
LEAST_RISE = 0.1
"""A loss must also lie so much of the median above it: at the end of training deviations are small."""
NORM_RATIO = 20.0
"""Of the norm, to its median."""
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
        return self._too_large(_rounded(loss), _rounded(norm)) if len(self.losses) >= LEAST else ""

    def take_in(self, loss: float, norm: float) -> None:
        """Let later steps be compared with this one."""
        self.losses = [*self.losses, _rounded(loss)][-WINDOW:]
        self.norms = [*self.norms, _rounded(norm)][-WINDOW:]

    def _too_large(self, loss: float, norm: float) -> str:
        middle = statistics.median(self.losses)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in self.losses)
        if loss - middle > max(DEVIATIONS * spread, LEAST_RISE * abs(middle)):
            return f"its loss was {loss:.4g}, and {middle:.4g} the median of the {len(self.losses)} before"
        usual = statistics.median(self.norms)
        if usual and norm > NORM_RATIO * usual:
            return f"its gradient norm was {norm:.4g}, and {usual:.4g} the median before it"
        return ""


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def first_left_out(mode: str, step: int) -> int:
    """The first step that a spike in `step` leaves out."""
    return max(1, step - ROLLBACK_STEPS) if mode == "rollback" else step
