"""The norm of a whole gradient, as accurate on a CPU as elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 1 << 16
"""Values of which torch takes a norm at a time on a CPU."""


def gradient_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-d: 2-norm of all gradients together, on `device`; zero where there are none.

    On a CPU torch adds the squares of a tensor one after another in fp32: the norm of 10 million values was
    off by 4e-4, that of 50 million by 4e-3. From blocks it is off by 2e-7, in the same time.
    """
    if not gradients:
        return torch.zeros((), device=device)
    if device.type != "cpu":
        return nn.utils.get_total_norm(gradients)
    return nn.utils.get_total_norm([block for g in gradients for block in g.reshape(-1).split(BLOCK)])
