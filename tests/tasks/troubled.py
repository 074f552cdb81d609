"""Tasks in which something goes wrong at one place."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.base import Columns, Data
from models.base import Batch, Loss, ModelError, Step, Task


class Points(Data):
    def read(self) -> Mapping[str, Columns]:
        x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
        return {"train": {"x": x, "y": x.sum(1, keepdims=True)}, "valid": {"x": x[:8], "y": x[:8, :1]}}


class Line(Task):
    """A linear fit, with nothing wrong."""

    data = Points
    defaults = {"batch_size": 8, "steps": [40], "lr": 1e-2}

    def build_model(self, facts: Any) -> Any:
        from torch import nn

        return nn.Linear(4, 1)

    def loss(self, model: Any, batch: Batch, step: Step) -> dict[str, Loss]:
        return {"loss": Loss((model(batch["x"]) - batch["y"]).square().sum(), "sample")}


class Slow(Line):
    """A step takes a twentieth of a second."""

    def loss(self, model: Any, batch: Batch, step: Step) -> dict[str, Loss]:
        time.sleep(0.05)
        return super().loss(model, batch, step)


class OneRankFails(Line):
    """Rank 1 alone meets an error with a name."""

    def loss(self, model: Any, batch: Batch, step: Step) -> dict[str, Loss]:
        if step.number == 3 and os.environ.get("RANK") == "1":
            raise ModelError("rank 1 has had enough")
        return super().loss(model, batch, step)


class ExportFails(Line):
    """Rank 0 alone cannot export."""

    def export(self, model: Any, folder: Path, facts: Any) -> None:
        raise ModelError("nothing to export to")


class Wide(Line):
    """Matrices large enough for 8-bit optimizer states, which begin at 4,096 elements."""

    def build_model(self, facts: Any) -> Any:
        from torch import nn

        return nn.Sequential(nn.Linear(4, 1100), nn.Linear(1100, 8), nn.Linear(8, 1))


class Unused(Line):
    """A parameter that no loss touches."""

    def build_model(self, facts: Any) -> Any:
        from torch import nn

        model = nn.Linear(4, 1)
        model.idle = nn.Parameter(nn.init.zeros_(model.weight.detach().clone()))
        return model


class Normed(Line):
    def build_model(self, facts: Any) -> Any:
        from torch import nn

        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class WrongUnit(Line):
    def loss(self, model: Any, batch: Batch, step: Step) -> dict[str, Loss]:
        return {"loss": Loss((model(batch["x"]) - batch["y"]).square().sum(), "tokens")}
