"""Early stopping and the best checkpoint, decided from rounded values: float noise decides nothing."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

DIGITS = 6


@dataclass(slots=True)
class EarlyStopping:
    """Follows one metric over the evaluations."""

    direction: str
    patience: int = 0
    min_delta: float = 0.0
    best: float | None = None
    best_step: int = 0
    waited: int = 0

    def update(self, value: float, step: int) -> bool:
        """Whether this evaluation is the best so far."""
        value = round(value, DIGITS)
        gain = (
            math.inf
            if self.best is None
            else (self.best - value if self.direction == "min" else value - self.best)
        )
        if not math.isfinite(value) or gain <= self.min_delta:
            self.waited += 1
            return False
        self.best, self.best_step, self.waited = value, step, 0
        return True

    @property
    def should_stop(self) -> bool:
        return self.patience > 0 and self.waited >= self.patience

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
