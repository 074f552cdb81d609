"""Early stopping and the best checkpoint; metrics are rounded, so that float noise has no effect."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isobatch.core.recipe import Recipe
from isobatch.engine.optimization.schedule import PhaseSchedule

DIGITS = 6
"""Decimal places that metrics are rounded to."""
SIGN = {"min": -1, "max": 1}
"""Direction of a metric -> the sign of a difference that is a gain."""


@dataclass(slots=True)
class EarlyStopping:
    """Tracks one metric over the evaluations of a phase. A checkpoint holds these fields."""

    direction: str
    """min or max: which values of the metric are better."""
    patience: int = 0
    """Evaluations without improvement after which to stop; 0 never stops."""
    min_delta: float = 0.0
    best: float | None = None
    best_step: int = 0
    waited: int = 0
    """Evaluations since the best one."""

    @classmethod
    def of(cls, direction: str, recipe: Recipe, schedule: PhaseSchedule) -> EarlyStopping:
        """That of a phase, before its first evaluation."""
        return cls(direction, recipe.patience if schedule.early_stopping else 0, recipe.min_delta)

    def update(self, value: float, step: int) -> bool:
        """Take in an evaluation after optimizer step `step`; returns whether it is the best so far."""
        value = round(value, DIGITS)
        if not math.isfinite(value) or self.gain(value) <= self.min_delta:
            self.waited += 1
            return False
        self.best, self.best_step, self.waited = value, step, 0
        return True

    def gain(self, value: float) -> float:
        """How much better a value is than the best so far."""
        return math.inf if self.best is None else (value - self.best) * SIGN[self.direction]

    @property
    def should_stop(self) -> bool:
        """Whether patience is used up."""
        return self.patience > 0 and self.waited >= self.patience

    def exported(self, last: int) -> int:
        """The step whose weights are exported: the best one, else the last one."""
        return self.best_step if self.patience and self.best_step else last
