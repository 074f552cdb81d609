"""How far redone steps may differ from the logged ones, for each invariance of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.engine.registry import workload_of

if TYPE_CHECKING:
    from isobatch.core.plan import Plan
    from isobatch.engine.runs.run_folder import RunFolder

TOLERANCE = {"exact": (1e-4, 1e-2), "rounding": (2e-3, 5e-2), "precision": (2e-2, 2e-1), "noise": (1e-1, 1.0)}
"""Invariance -> largest differences (loss, gradient norm) that rounding, or noise, explains.

"rounding" is for exact plans of tasks that round activations: a flipped level was seen to move a loss by
1.4e-4 within three steps.
"""


def tolerances(run: RunFolder, replayed: Plan) -> tuple[float, float]:
    """Largest differences of (loss, gradient norm) between a logged step and its replay under another plan.

    The loss's is absolute, relative above one; the gradient norm's is relative.
    """
    invariance: str = max(run.plan.invariance, replayed.invariance, key=list(TOLERANCE).index)
    if invariance == "exact" and workload_of(run.recipe).task.rounds:
        invariance = "rounding"
    return TOLERANCE[invariance]
