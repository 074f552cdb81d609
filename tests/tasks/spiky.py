"""A linear regression with one corrupt row, whose gradient ruins what was learnt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isobatch.data.base import Columns, Data
from isobatch.models.base import Batch, Loss, StepContext, Task

ROWS, WIDTH = 960, 4
CORRUPT = 700


class Points(Data):
    """y = x w + noise; of row CORRUPT, y is a million times too large."""

    def read(self) -> Mapping[str, Columns]:
        return {"train": _split(ROWS, 1, CORRUPT), "valid": _split(64, 2, None)}


def _split(count: int, seed: int, corrupt: int | None) -> Columns:
    draws = np.random.default_rng(seed)
    x = draws.normal(size=(count, WIDTH)).astype(np.float32)
    y = (x @ np.arange(1, WIDTH + 1) + 0.3 * draws.normal(size=count)).astype(np.float32)
    if corrupt is not None:
        y[corrupt] = 1e6
    return {"x": x, "y": y}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikyOptions:
    """What goes wrong besides."""

    nan_at: int = 0
    """The step whose loss is not a number."""


class Spiky(Task):
    """Its loss falls from 30 to 1 within a pass."""

    Options = SpikyOptions
    data = Points
    defaults = {
        "batch_size": 8,
        "lr": 0.1,
        "epochs": 1.0,
        "clip": 0.0,
        "optimizer": "sgd",
        "schedule": "constant",
    }

    def build_model(self, facts: Any) -> Any:
        import torch

        model = torch.nn.Linear(WIDTH, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        return model

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        errors = model(batch["x"]).squeeze(-1) - batch["y"]
        factor = float("nan") if step.number + 1 == self.options.nan_at else 1.0
        return {"loss": Loss(factor * errors.square().sum(), "sample")}
