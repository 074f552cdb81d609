"""A hook: an exponential moving average of the weights (Polyak and Juditsky 1992).

    isobatch auto --task causal-lm --hook examples/ema.py:Ema

It is evaluated beside the model, saved and resumed with it on any number of processes, and exported to
final/ema. It changes nothing that the model learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import isobatch

DECAY = 0.99


class Ema(isobatch.Hook):
    """Under strategies that shard weights every process averages what it holds of them."""

    weights = True

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def after_update(self, state: Any, step: int) -> None:
        self.average = {
            name: self.average[name].lerp_(weight, 1 - DECAY) if name in self.average else weight.clone()
            for name, weight in state.strategy.held()
        }

    def tensors(self) -> Mapping[str, Tensor]:
        return self.average

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.average = dict(tensors)
