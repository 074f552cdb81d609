"""A workload of your own: which of two classes a point of the plane belongs to.

In this folder:

    isobatch auto --task ./mine.py:Mine
    isobatch auto --task ./mine.py:Mine --data points.csv --width 64 --holdout 0.25
    isobatch describe ./mine.py:Mine
    isobatch predict RUN --file new.csv --out predictions.csv
    isobatch serve RUN  # curl --json '{"rows": [{"x": 0, "y": 1}]}' localhost:8000/predict
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from data import Points
from isobatch import Batch, Loss, Rows, StepContext, Sum, Task, UserError
from models import make_network

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class MineOptions:
    """Each field is a flag and a part of the recipe; the text under it is its help."""

    width: int = 32
    """Units of the hidden layer."""
    activation: Literal["tanh", "relu"] = "tanh"
    """What stands between the layers."""


class Mine(Task):
    """A small network with a cross entropy."""

    Options = MineOptions
    data = Points
    defaults = {"epochs": 20, "lr": 1e-2, "batch_size": 32, "dropout": 0.1}
    monitor = ("accuracy", "max")

    def check(self) -> None:
        if self.options.width < 1:
            raise UserError(f"--width {self.options.width}: must be at least 1")

    def build_model(self, facts: Any) -> nn.Module:
        return make_network(self.options.width, self.options.activation, self.recipe.dropout)

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        from torch.nn import functional

        logits = model(batch["x"])[:, 0]
        # Summed over the global batch by the engine; step_figures below gets the sum.
        step.record("correct", ((logits > 0) == (batch["label"] > 0)).sum())
        step.record("samples", batch["label"].new_tensor(len(batch["label"])))
        total = functional.binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum")
        return {"loss": Loss(total, "sample")}

    def step_figures(self, recorded: Mapping[str, Any]) -> Mapping[str, float]:
        """One more figure in each row of metrics.jsonl."""
        return {"train_accuracy": float(recorded["correct"]) / float(recorded["samples"])}

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        from torch.nn import functional

        logits, label = model(batch["x"])[:, 0], batch["label"]
        total = functional.binary_cross_entropy_with_logits(logits, label, reduction="sum")
        correct = ((logits > 0) == (label > 0)).sum()
        margin = logits * (2 * label - 1)
        return {
            "loss": Sum(total, len(label)),
            "accuracy": Sum(correct, len(label)),
            "margin": Rows(margin),  # all rows come back in the order of the samples
        }

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Any]:
        """What `isobatch predict` writes: arrays with a row per sample."""
        probability = model(batch["x"])[:, 0].sigmoid()
        return {"class": (probability > 0.5).long(), "probability": probability}

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Any) -> dict[str, float]:
        import numpy as np

        means = {name: parts[name].value / parts[name].weight for name in ("loss", "accuracy")}
        return {**means, "median_margin": float(np.median(parts["margin"]))}
