"""The network of mine.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def make_network(width: int, activation: str, dropout: float | None) -> nn.Module:
    """(B, 2) -> (B, 1) logits."""
    from torch import nn

    between = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]
    return nn.Sequential(nn.Linear(2, width), between(), nn.Dropout(dropout or 0.0), nn.Linear(width, 1))
