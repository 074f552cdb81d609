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
    if invariance == "exact" and steps <= FEW and replayed.device == run.plan.device:
        return SAME_DEVICE
    if invariance != "rounding":
        loss, norm = TOLERANCE[invariance]
        if invariance == "precision" and replayed.device == run.plan.device:
            loss = min(loss, max(TOLERANCE["exact"][0], SHOWN_MARGIN * shown))
        return loss, norm
    if steps <= NEAR:
        return rounding_tolerance(run.plan.rounding)
    return TOLERANCE["rounding"] if steps <= REHEARSED_STEPS else FAR


def rounding_tolerance(measured: tuple[float, float] | None) -> tuple[float, float]:
    """MARGIN times what a run measured, not below that of exact plans nor above that of its class."""
    (least_loss, least_norm), (most_loss, most_norm) = TOLERANCE["exact"], TOLERANCE["rounding"]
    if measured is None:
        return most_loss, most_norm
    loss, norm = measured
    return min(most_loss, max(least_loss, MARGIN * loss)), min(most_norm, max(least_norm, MARGIN * norm))


def claimed_rounding(run: RunFolder) -> float:
    """What any cut may move a loss by, as the run says; 0.0 where it says nothing."""
    return MARGIN * run.plan.rounding[0] if run.plan.invariance == "rounding" and run.plan.rounding else 0.0
