"""Steps in plain torch, which trained runs are held against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def adamw(model: Any, decay: float, faster: float = 1.0, new: Collection[str] = ()) -> torch.optim.Optimizer:
    """As recipes have it: matrices decay, biases and norms do not; parameters of `new` learn so many times
    as fast.
    """
    return torch.optim.AdamW(
        {"params": [p], "weight_decay": decay if p.ndim > 1 else 0.0, "lr": faster ** (name in new)}
        for name, p in model.named_parameters()
        if p.requires_grad
    )


def take_steps(
    model: Any,
    optimizer: torch.optim.Optimizer,
    rates: Iterable[float],
    taken: list[list[int]],
    loss: Callable[[Any, list[int]], Tensor],
    weights: list[dict[str, Tensor]] | None = None,
) -> list[float]:
    """The losses of an optimizer's steps, the whole gradient clipped at 1.

    A group's own rate is its share of the step's. `weights`: receives those behind each step.
    """
    found, trained = [], [p for p in model.parameters() if p.requires_grad]
    shares = [group["lr"] for group in optimizer.param_groups]
    for rate, numbers in zip(rates, taken, strict=True):
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            group["lr"] = rate * share
        optimizer.zero_grad()
        value = loss(model, numbers)
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        found.append(float(value.detach()))
        if weights is not None:
            weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
    return found
