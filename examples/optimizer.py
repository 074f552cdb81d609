"""One more optimizer: Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2).

An optimizer is one entry of `core.optimizers.OPTIMIZERS`. From it follow the choices of --optimizer, the
memory that a plan counts, the strategies that are refused, and what a checkpoint holds. An optimizer of
torch or of a library is that entry alone. One of our own, such as this, has a file as well, say
engine/optimization/lion.py with the class and the function; the entry names it in place of the function:
`make="engine.optimization.lion:make_lion"`. Until then a test tries it with

    monkeypatch.setitem(OPTIMIZERS, "lion", LION)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from isobatch.core.optimizers import Groups, OptimizerTraits


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients; weight decay is decoupled."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                # Tensors and numbers kept here are saved by name and come back on resume.
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                direction = average.lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                average.lerp_(p.grad, 1 - beta2)


def make_lion(groups: Groups, lr: float, device: str) -> torch.optim.Optimizer:
    """`groups`: matrices with the recipe's weight decay, vectors without; `device`: cpu, cuda or mps."""
    return Lion(groups, lr)


LION = OptimizerTraits(
    make=make_lion,
    state_bytes=4.0,  # one fp32 average per trained parameter
    elementwise=True,  # no element looks at another, so ZeRO's flat shards learn the same
)
