"""A stop signal on any rank ends the run on all of them, one step later, with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from isobatch.engine.train.hooks import Hook, Signal

if TYPE_CHECKING:
    from isobatch.engine.distributed.stop_signals import StopFlag
    from isobatch.engine.train.figures import StepFigures


class Stop(Hook):
    """Votes whether this rank was asked to stop."""

    votes = ("stop",)

    def __init__(self, flag: StopFlag) -> None:
        self.flag = flag

    def vote(self, step: int) -> Mapping[str, float]:  # noqa: ARG002
        return {"stop": float(self.flag.requested)}

    def on_figures(self, figures: StepFigures) -> set[Signal]:
        return {"stop"} if figures.votes["stop"] else set()
