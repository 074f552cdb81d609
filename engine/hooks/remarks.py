"""What the first step finds out about a plan: noise of the model's own, kernels that cannot be made."""

from __future__ import annotations

from collections.abc import Callable

from isobatch.core.plan import Plan
from isobatch.engine.train.hooks import Hook, Signal
from isobatch.engine.train.state import Training
from isobatch.models import fused_kernels


class Remarks(Hook):
    """In the first pause of a phase corrects the plan where the first step says otherwise, and says so."""

    def __init__(
        self, replan: Callable[[Plan], None], mark_first_step: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self.replan, self.mark_first_step, self.say = replan, mark_first_step, say
        self._is_checked = False

    def at_pause(self, state: Training, step: int, asked: set[Signal]) -> None:  # noqa: ARG002
        self.mark_first_step()
        if not self._is_checked and state.layout.names:
            self._is_checked = True
            # A GRU may draw noise of its own.
            seen, plan = any(state.world.all_gather_objects(state.layout.foreign_noise)), state.plan
            if seen and plan.invariance in ("exact", "rounding"):
                reason = "this model draws noise of its own, from torch's generators, which the cut changes"
                self.replan(plan.changed(reason, invariance="noise"))
                self.say(f"invariance is noise, not {plan.invariance}: {reason}")
            if problem := fused_kernels.take_failure():
                self.say(problem)
