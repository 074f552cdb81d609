"""Muon (Jordan et al. 2024): steps of the blocks' matrices are orthogonal ones; all else is AdamW's.

Orthogonalized in fp32, so that another cut of a batch differs by the order of float sums alone: torch's own
rounds to bf16, in which the smallest differences grow to 2^-8.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from isobatch.core.errors import UserError
from isobatch.core.optimizers import Groups
from isobatch.engine.optimization.parameter_groups import OptimizerGroup

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that brings singular values near 1, in five steps."""


class Fp32Muon(torch.optim.Muon):
    """torch's, whose state and defaults it has, with the Newton-Schulz steps in fp32.

    Its steps have the size of AdamW's (0.2 sqrt(max(rows, columns)); Liu et al. 2025, "Muon is Scalable for
    LLM Training"), so that one learning rate and one weight decay serve both.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                mean = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = orthogonal(p.grad.lerp(mean, momentum))
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * 0.2 * max(p.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix, about: singular values come to lie between 0.7 and 1.2.

    By the Newton-Schulz iteration of https://kellerjordan.github.io/posts/muon/, on the shorter side.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def make_muon(groups: Groups, lr: float, device: str) -> torch.optim.Optimizer:
    """Muon over the groups of the blocks' matrices, AdamW over the others. Raises UserError without any."""
    matrices = [group for group in groups if group["matrices"]]
    others = [group for group in groups if not group["matrices"]]
    if not matrices:
        raise UserError("--optimizer muon: no matrix in blocks (an nn.ModuleList) trains here: use adamw")
    parts: list[torch.optim.Optimizer] = [Fp32Muon(matrices, lr=lr)]
    if others:
        parts.append(torch.optim.AdamW(others, lr=lr, fused=device in ("cpu", "cuda")))
    return cast("torch.optim.Optimizer", OptimizerGroup(parts))
