"""A hook: the mean of the weights over all steps so far (Polyak and Juditsky 1992).

    isobatch auto --task causal-lm --hook examples/average.py:Average

It is evaluated beside the model, saved and resumed with it on any number of processes, and exported to
final/average. It changes nothing that the model learns. (The exponential one is built in: --ema 0.999.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import isobatch


class Average(isobatch.Hook):
    """Under strategies that shard weights every process averages what it holds of them."""

    weights = True

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.steps = 0

    def after_update(self, state: Any, step: int) -> None:
        self.steps += 1
        self.average = {
            name: self.average[name].lerp_(weight, 1 / self.steps) if name in self.average else weight.clone()
            for name, weight in state.strategy.held()
        }

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def tensors(self) -> Mapping[str, Tensor]:
        return self.average

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.average, self.steps = dict(tensors), int(state["steps"])
