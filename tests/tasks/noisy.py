"""Tasks whose model draws noise of its own, from torch's generators, in one of two phases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from isobatch import Batch, Loss, Phase, StepContext, Task
from isobatch.tests.tasks.ragged import Sequences


class Net(nn.Module):
    """An embedding whose output is disturbed while `noisy`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out, self.noisy = nn.Embedding(61, 8), nn.Linear(8, 61), False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.noisy and self.training:
            x = x + 0.01 * torch.randn_like(x)
        return self.out(x)


class NoisyFirst(Task):
    """Noise in the first phase only."""

    data = Sequences
    defaults = {"batch_size": 24, "lr": 1e-3, "steps": (3, 3)}
    noisy_phase = "one"

    def phases(self) -> list[Phase]:
        return [Phase(name="one"), Phase(name="two")]

    def build_model(self, facts: Any) -> nn.Module:
        return Net()

    def begin_phase(self, model: Any, phase: str, first: Callable[[int], Iterable[Batch]]) -> None:
        model.noisy = phase == self.noisy_phase

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        logits = model(batch["tokens"].long())[:, :-1]
        targets = batch["tokens"][:, 1:].long().clone()
        targets[torch.arange(targets.shape[1]) >= batch["length"][:, None] - 1] = -100
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return {"loss": Loss(total, "token")}


class NoisyLater(NoisyFirst):
    """Noise in the second phase only."""

    noisy_phase = "two"


class Quiet(NoisyFirst):
    """No noise."""

    noisy_phase = ""
