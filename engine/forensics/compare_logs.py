"""Where the logs of two runs part: their samples, their learning rates, or what a step computed.

Two runs of one recipe differ by rounding: by the order of float sums, which every step multiplies a little.
So a difference is no rounding where it jumps: above JUMP times the largest before it, and above a floor, by
which a step from equal weights can differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from isobatch.engine.runs.step_rows import FIGURES, LossAndNorm, differences

if TYPE_CHECKING:
    from collections.abc import Iterable

    from isobatch.engine.runs.step_rows import StepRow

Kind = Literal["equal", "samples", "rate", "jump", "drift", "apart"]
"""equal: within rounding throughout. samples, rate, jump: at a step. drift: beyond the tolerance without a
jump. apart: no step in common."""
JUMP = 30.0
EXACT_FLOOR: LossAndNorm = (4e-6, 8e-5)
"""What rounding of fp32 sums in a step from equal weights stays below. On the demo two cuts differ by 2e-7
and 2e-7, and fp32 and bf16 by 8e-6 and 6e-5."""
RATE = 1e-9
"""Relative difference of two equal learning rates, which are computed in fp64."""


@dataclass(frozen=True, slots=True)
class LogDifference:
    """How two logs differ over the steps that both have."""

    kind: Kind = "apart"
    common_steps: int = 0
    """Steps that both logged."""
    largest: Mapping[str, float] = field(default_factory=dict)
    """Figure -> the largest difference before the runs part: loss, and grad_norm."""
    phase: str = ""
    step: int = 0
    """Where they part; for `samples` the first logged step after it."""
    previous: int = 0
    """The last common logged step of this phase before it; 0 where there is none."""
    figure: str = ""
    """The one that parts: loss, lr or grad_norm."""
    values: tuple[float, float] = (0.0, 0.0)
    """What each run logged of it."""


def compare_logs(
    one: Iterable[StepRow], other: Iterable[StepRow], floor: LossAndNorm, allowed: LossAndNorm
) -> LogDifference:
    """Compare two logs. `floor`: what one step can differ by; `allowed`: what may have grown from that over a
    run. A drift is only said of logs that part nowhere else.
    """
    rows = {row.place: row for row in other}
    pairs = [(row, rows[row.place]) for row in one if row.place in rows]
    found = LogDifference("equal" if pairs else "apart", len(pairs))
    largest, drift, before = (0.0, 0.0), found, None
    for a, b in pairs:
        apart = differences(a.figures, b.figures)
        jumps = [d > max(low, JUMP * most) for d, low, most in zip(apart, floor, largest, strict=True)]
        beyond = [d > most for d, most in zip(apart, allowed, strict=True)]
        kind: Kind | None = "drift" if any(beyond) and drift is found else None
        if a.chain != b.chain:
            kind = "samples"
        elif not math.isclose(a.lr, b.lr, rel_tol=RATE):
            kind = "rate"
        elif any(jumps):
            kind = "jump"
        if kind is not None:
            named = (name for name, is_it in zip(2 * FIGURES, jumps + beyond, strict=True) if is_it)
            figure = "lr" if kind == "rate" else next(named, FIGURES[0])
            parted = dataclasses.replace(
                found,
                kind=kind,
                largest=dict(zip(FIGURES, largest, strict=True)),
                phase=a.phase,
                step=a.step,
                previous=before.step if before is not None and before.phase == a.phase else 0,
                figure=figure,
                values=(getattr(a, figure), getattr(b, figure)),
            )
            if kind != "drift":
                return parted
            drift = parted
        largest, before = (max(largest[0], apart[0]), max(largest[1], apart[1])), a
    return (
        drift
        if drift is not found
        else dataclasses.replace(found, largest=dict(zip(FIGURES, largest, strict=True)))
    )
