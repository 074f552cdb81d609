"""An exponential moving average of the weights (Polyak and Juditsky 1992), of --ema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from isobatch.engine.train.hooks import Hook
from isobatch.engine.train.state import Training


class Ema(Hook):
    """The average of a phase, which begins with the weights after its first step.

    Under strategies that shard weights every process averages what it holds of them.
    """

    weights: ClassVar[bool] = True

    def __init__(self, decay: float) -> None:
        """`decay`: the share of the average before that a step leaves."""
        self.decay = decay
        self.average: dict[str, Tensor] = {}

    def after_update(self, state: Training, step: int) -> None:  # noqa: ARG002
        held = dict(state.strategy.held())
        if self.average:
            averages = [self.average[name] for name in held]
            torch._foreach_lerp_(averages, list(held.values()), 1 - self.decay)
        else:
            self.average = {name: weight.clone() for name, weight in held.items()}

    def tensors(self) -> Mapping[str, Tensor]:
        return self.average

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        self.average = dict(tensors)
