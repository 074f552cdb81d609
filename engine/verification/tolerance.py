"""How far redone steps may differ from the logged ones, for each invariance of a plan."""

from __future__ import annotations

import math

from isobatch.core.plan import INVARIANCES, REHEARSED_STEPS, Plan
from isobatch.engine.runs.run_folder import RunFolder

TOLERANCE = {"exact": (1e-4, 1e-2), "rounding": (2e-3, 2e-1), "precision": (2e-2, 2e-1), "noise": (1e-1, 1.0)}
"""Invariance -> largest differences (loss, gradient norm) that it explains.

README.md has them beside what was measured. For `rounding` this is the most that a run may claim.
"""
HELD_OUT = {"exact": 1e-4, "rounding": 2e-3, "precision": 1e-2, "noise": 1e-4}
"""Invariance -> largest difference of a held-out metric: the same weights measured again, without noise."""
MARGIN = 4
"""Times what a run measured in its first five steps, under one other cut, that any cut may differ by within
NEAR steps of a state. Measured on the demo, from five states in three runs under three cuts: the first three
steps differ by at most a tenth of what the first five do.
"""
NEAR = 3
"""Steps after which flipped levels have not spread yet."""
SAME_DEVICE = (2e-5, 1e-2)
"""In place of `exact` within so many as FEW steps, on the kind of device that trained. Measured: 2e-7."""
SHOWN_MARGIN = 50
FEW = 12
FAR = (3e-2, 1.0)
"""In place of `rounding` for more than REHEARSED_STEPS. Measured over 66 steps of the demo: 1e-2 and 0.3."""


def tolerances(
    run: RunFolder, replayed: Plan, steps: int = NEAR, shown: float = math.inf
) -> tuple[float, float]:
    """Largest differences of (loss, gradient norm) between a logged step and its replay under another plan.

    `steps`: how many follow the initial weights or a checkpoint. The loss's difference is absolute, relative
    above one; the gradient norm's is relative. `shown`: by how much most of the first losses differ from
    those of fp32, where the plan claims coarser arithmetic: SHOWN_MARGIN times that is the most that it
    explains.
    """
    invariance = max(run.plan.invariance, replayed.invariance, key=INVARIANCES.index)
    if invariance == "rounding" and replayed == run.plan:
        invariance = "exact"  # the same sums give the same levels
    if invariance == "exact" and steps <= FEW and replayed.device == run.plan.device:
        return SAME_DEVICE
    if invariance != "rounding":
        loss, norm = TOLERANCE[invariance]
        if invariance == "precision" and replayed.device == run.plan.device:
            loss = min(loss, max(TOLERANCE["exact"][0], SHOWN_MARGIN * shown))
        return loss, norm
    return rounding_tolerance(run.plan.rounding) if steps <= NEAR else _spread(steps)


def rounding_tolerance(measured: tuple[float, float] | None) -> tuple[float, float]:
    """MARGIN times what a run measured, not below that of exact plans nor above that of its class."""
    bounds = zip(TOLERANCE["exact"], measured or (math.inf, math.inf), TOLERANCE["rounding"], strict=True)
    loss, norm = (min(most, max(least, MARGIN * moved)) for least, moved, most in bounds)
    return loss, norm


def claimed_rounding(run: RunFolder, steps: int) -> tuple[float, float]:
    """What rounding may move (loss, gradient norm) by under another cut or processor, as the run says."""
    measured = run.plan.rounding or (0.0, 0.0)
    loss, norm = (max(most, MARGIN * moved) for moved, most in zip(measured, _spread(steps), strict=True))
    return (loss, norm) if run.plan.invariance == "rounding" else (0.0, 0.0)


def _spread(steps: int) -> tuple[float, float]:
    return TOLERANCE["rounding"] if steps <= REHEARSED_STEPS else FAR
