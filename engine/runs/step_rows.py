"""A step's row of metrics.jsonl: written and read here, where alone its fields are spelled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """What a run logs of a step; as JSON with `more` beside the other fields."""

    phase: str
    step: int
    """Optimizer step of the phase, from 1."""
    loss: float
    """Of the global batch, the sum of its parts; NaN where it was not finite."""
    lr: float
    grad_norm: float
    """Before clipping; NaN where it was not finite."""
    samples: int
    """Seen by the run so far."""
    chain: str
    """Hash over all samples of the phase so far."""
    epoch: float = 0.0
    tokens: int = 0
    """Seen by the run so far, without padding."""
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    """Of step_seconds, those in which it waited for data."""
    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    padding: float = 0.0
    """Share of the tokens that were computed."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Parts of a loss that has several, figures of the task, readings of the machine."""

    @property
    def place(self) -> tuple[str, int]:
        """(phase, step)."""
        return self.phase, self.step

    @property
    def figures(self) -> LossAndNorm:
        return self.loss, self.grad_norm

    def to_dict(self) -> dict[str, Any]:
        return {**self.more, **{name: getattr(self, name) for name in FIELDS}}


FIELDS = tuple(field.name for field in dataclasses.fields(StepRow) if field.name != "more")
NEEDED = ("phase", "step", "loss", "lr", "grad_norm", "samples", "chain")
"""Fields without which a row says nothing of a step; a receipt has these alone."""
FIGURES = ("loss", "grad_norm")
"""What a step computed, and is compared where it is computed again."""
LossAndNorm = tuple[float, float]
"""Of a step: the loss, and the norm of the gradient before clipping; or how two of them differ."""


def differences(one: LossAndNorm, other: LossAndNorm) -> LossAndNorm:
    """Of two losses, relative to the other where that is above one, and of two norms, relative."""
    return _difference(one[0], other[0], 1.0), _difference(one[1], other[1], 1e-12)


def _difference(one: float, other: float, least: float) -> float:
    """Infinite where only one is finite; 0 where neither is."""
    if math.isfinite(one) and math.isfinite(other):
        return abs(one - other) / max(least, abs(other))
    return 0.0 if math.isfinite(one) == math.isfinite(other) else math.inf


def is_step(row: Mapping[str, Any]) -> bool:
    """Whether a row of metrics.jsonl is that of a step: others are evaluations, seals and the like."""
    return "chain" in row


def read_step(row: Mapping[str, Any]) -> StepRow:
    """The row of a step from its JSON. Raises UserError where one that is needed lacks or has no form."""
    try:
        known: dict[str, Any] = {name: row[name] for name in FIELDS if name in row}
        for name in FIGURES:
            known[name] = math.nan if known[name] is None else float(known[name])
        known.update(phase=str(known["phase"]), step=int(known["step"]), lr=float(known["lr"]))
        return StepRow(**known, more={name: row[name] for name in row.keys() - set(FIELDS)})
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"metrics.jsonl holds a row that no run writes: {error!r}") from None


def step_rows(metrics: Path) -> Iterator[StepRow]:
    """The steps of a metrics.jsonl, in order. Raises UserError where a row has another form."""
    return (read_step(row) for row in rows_in(metrics) if is_step(row))
