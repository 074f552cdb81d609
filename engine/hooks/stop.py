"""A stop signal on any rank ends the run on all of them, one step later, with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.train.figures import StepFigures
from isobatch.engine.train.hooks import Hook, Signal
from isobatch.engine.train.state import Training


class Stop(Hook):
    """Votes whether this rank was asked to stop; stops after the first evaluation past a share of steps."""

    votes = ("stop",)

    def __init__(self, flag: StopFlag, share: float | None, evaluates: Callable[[int], bool]) -> None:
        """`evaluates`: whether an evaluation follows a step."""
        self.flag, self.share, self.evaluates = flag, share, evaluates

    def vote(self, step: int) -> Mapping[str, float]:  # noqa: ARG002
        return {"stop": float(self.flag.requested)}

    def on_figures(self, figures: StepFigures) -> set[Signal]:
        return {"stop"} if figures.votes["stop"] else set()

    def at_pause(self, state: Training, step: int, asked: set[Signal]) -> set[Signal]:  # noqa: ARG002
        steps = state.schedule.steps
        if self.share and self.share * steps <= step < steps and self.evaluates(step):
            self.flag.request("its sweep had it stop here", "planned")
            return {"stop"}
        return set()
