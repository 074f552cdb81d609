"""A task with its own optimizer: Muon (Jordan et al. 2024) for matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isobatch.core.errors import UserError
from isobatch.models.base import Batch, Loss, StepContext
from isobatch.tests.tasks.failing import Line


class Muon(torch.optim.Optimizer):
    """Matrices step by their orthogonalised momentum, which looks at whole matrices; vectors by its sign."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["momentum"]).add_(p.grad)
                if p.ndim < 2:
                    p.add_(momentum.sign(), alpha=-group["lr"])
                    continue
                u, _, v = torch.linalg.svd(momentum, full_matrices=False)
                p.add_(u @ v, alpha=-group["lr"])


class OwnOptimizer(Line):
    """As long as there is a file `interrupt` in the working folder, its tenth step fails."""

    def build_model(self, facts: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def make_optimizer(
        self, named: Mapping[str, nn.Parameter], lr: float, device: str
    ) -> torch.optim.Optimizer:
        """Vectors at a tenth of the rate."""
        matrices = [p for name, p in named.items() if name.endswith("weight") and p.ndim == 2]
        rest = [p for name, p in named.items() if not name.endswith("weight")]
        return Muon([{"params": matrices}, {"params": rest, "lr": lr / 10}], {"lr": lr, "momentum": 0.5})

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        if step.number == 9 and Path("interrupt").exists():
            raise UserError("stopped in the tenth step")
        return super().loss(model, batch, step)


class LeavesOut(OwnOptimizer):
    def make_optimizer(self, named: Any, lr: float, device: str) -> torch.optim.Optimizer:
        return super().make_optimizer({name: p for name, p in named.items() if name != "0.bias"}, lr, device)


class TwoOptimizers(OwnOptimizer):
    def make_optimizer(self, named: Any, lr: float, device: str) -> list[torch.optim.Optimizer]:
        matrices, rest = ([p for p in named.values() if (p.ndim == 2) == wanted] for wanted in (True, False))
        return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=lr / 10, fused=True)]


class NoOptimizer(OwnOptimizer):
    def make_optimizer(self, named: Any, lr: float, device: str) -> Any:
        return list(named)
