"""A small net in which one thing can be planted: by --plant in the recipe, or by the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from isobatch.data.base import Columns, Data
from isobatch.models.base import Batch, Loss, StepContext, Task

LABEL, FLIP, NAN = "PLANTED_LABEL", "PLANTED_FLIP", "PLANTED_NAN"
"""Environment variables: the step, from 0, of a wrong label, of a weight that changes by itself, of a NaN."""
TOUCHED = 13
"""The sample whose activations `--plant sample` scales."""
ROWS, WIDTH = 64, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOptions:
    """Flags of the data."""

    change: str = "nothing"
    """What is changed in it."""


class Rows(Data):
    """`x` (8,) and `y` (1,) of 64 samples, and `token`, a number below 16."""

    Options = RowOptions

    def identity(self) -> dict[str, Any]:
        return {"change": self.options.change}

    def read(self) -> Mapping[str, Columns]:
        generator = np.random.default_rng(0)
        x = generator.normal(size=(ROWS, WIDTH)).astype(np.float32)
        token = generator.integers(0, 15, ROWS)
        y = np.tanh(x.sum(1, keepdims=True))
        if self.options.change == "one row":
            x[37] += 0.01
        elif self.options.change == "swapped":
            x[[5, 9]], y[[5, 9]] = x[[9, 5]], y[[9, 5]]
        elif self.options.change == "tokenizer":
            token = token + 1
        elif self.options.change == "a row more":
            x, y, token = np.r_[x, x[:1]], np.r_[y, y[:1]], np.r_[token, token[:1]]
        return {"train": {"x": x, "y": y.astype(np.float32), "token": token}}


class Attention(nn.Module):
    """Of the eight features of a row, as a sequence of two."""

    def __init__(self, in_half: bool) -> None:
        super().__init__()
        self.in_half, self.project = in_half, nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(len(x), 2, 3, 1, 8).permute(2, 0, 3, 1, 4)
        if self.in_half:
            mixed = ((q @ k.transpose(-1, -2)).half().float() / 8**0.5).softmax(-1) @ v
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        return mixed.reshape(len(x), 16)


class Net(nn.Module):
    """Linear, attention, LayerNorm, a nonlinearity, dropout, and a head."""

    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.embed, self.inner = nn.Embedding(16, 16), nn.Linear(WIDTH, 16)
        self.attn = Attention(in_half=plant == "attention")
        self.norm = nn.LayerNorm(16, eps=1e-4 if plant == "epsilon" else 1e-5)
        self.act = nn.GELU()
        self.drop, self.head = nn.Identity(), nn.Linear(16, 1)

    def forward(self, x: Tensor, token: Tensor, drop: Callable[[Tensor], Tensor], touched: Tensor) -> Tensor:
        hidden = self.inner(x) + self.embed(token)
        if self.plant == "sample":
            hidden = torch.where(touched[:, None], hidden * 1.01, hidden)
        hidden = self.act(self.norm(self.attn(hidden)))
        return self.head(self.drop(drop(hidden)))


class InBf16(nn.Linear):
    """A linear layer that computes in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16()).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedOptions:
    """Flags of the task."""

    plant: str = "nothing"
    """What is planted in the model."""


class Planted(Task):
    """Trains Net."""

    Options = PlantedOptions
    data = Rows
    defaults = {"batch_size": 16, "steps": [12], "lr": 1e-2, "dropout": 0.1}

    def build_model(self, facts: Any) -> Any:
        plant = self.options.plant
        net = Net(plant)
        if plant == "bf16":
            bf16 = InBf16(WIDTH, 16)
            bf16.load_state_dict(net.inner.state_dict())
            net.inner = bf16
        elif plant == "start":
            with torch.no_grad():
                net.head.bias.add_(0.1)
        return net

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        def drop(hidden: Tensor) -> Tensor:
            if self.options.plant == "unkeyed":
                return functional.dropout(hidden, 0.1)
            kept = step.noise.uniform("drop", hidden.shape[1:]) >= (self.recipe.dropout or 0.0)
            return hidden * kept

        x = batch["x"]
        if str(step.number) == os.environ.get(NAN):
            x = torch.where((batch["index"] == batch["index"].min())[:, None], torch.nan, x)
        found = model(x, batch["token"], drop, batch["index"] == TOUCHED)
        target = batch["y"]
        if str(step.number) == os.environ.get(LABEL):
            target = torch.where((batch["index"] % 8 == 0)[:, None], -target, target)
        loss = (found - target).square().sum()
        return {"loss": Loss(loss * (2.0 if self.options.plant == "scale" else 1.0), "sample")}

    def after_step(self, model: Any, step: StepContext) -> None:
        if str(step.number) == os.environ.get(FLIP):
            with torch.no_grad():
                model.attn.project.weight[0, 0] += 1.0
