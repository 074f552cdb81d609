"""Optimizers and learning-rate schedules: pure functions of the step, since schedulers hold state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from engine.errors import UserError
from engine.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def learning_rate(recipe: Recipe, peak: float, step: int, total: int, steps_per_epoch: int) -> float:
    """The rate of optimizer step `step` (from 0) of `total`: linear warm-up, then the schedule to 0."""
    warmup = recipe.warmup.steps(steps_per_epoch) if recipe.warmup.value else 0
    if step < warmup:
        return peak * (step + 1) / warmup
    if recipe.schedule == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return peak * (0.5 * (1 + math.cos(math.pi * progress)) if recipe.schedule == "cosine" else 1 - progress)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases, norms and other vectors do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, recipe: Recipe, device: str) -> Optimizer:
    """The recipe's optimizer over the trainable parameters."""
    import torch

    groups = [g for g in parameter_groups(model, recipe.weight_decay) if g["params"]]
    if not groups:
        raise UserError("nothing to train: every parameter of the model is frozen")
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, fused=device in ("cpu", "cuda"))
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=0.9)
    if recipe.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=recipe.lr)
    return _eight_bit(groups, recipe)


def _eight_bit(groups: list[dict[str, Any]], recipe: Recipe) -> Optimizer:
    try:
        import bitsandbytes
    except ImportError:
        raise UserError(f"--optimizer {recipe.optimizer} needs: pip install bitsandbytes") from None
    kind = (
        bitsandbytes.optim.PagedAdamW8bit
        if recipe.optimizer.startswith("paged")
        else bitsandbytes.optim.AdamW8bit
    )
    optimizer: Optimizer = kind(groups, lr=recipe.lr)
    return optimizer


def set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
