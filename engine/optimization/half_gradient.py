"""The gradient of a random half of a global batch, beside a training step that it does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from isobatch.engine.optimization.noise_scale import SQUARED, VARIANCE, estimates

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class HalfGradient:
    """Adds up gradients apart from those that train."""

    parameters: Sequence[nn.Parameter]
    share: float
    """Of the global batch's samples that are in this half."""
    batch: int
    sums: list[Tensor | None]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter], share: float, batch: int) -> HalfGradient:
        """Nothing added yet."""
        return cls(parameters, share, batch, [None] * len(parameters))

    def add(self, loss: Tensor) -> None:
        """Add the gradient of a micro-batch's share of the loss. It reaches no `.grad` and no hook of DDP."""
        for place, gradient in enumerate(torch.autograd.grad(loss, self.parameters, allow_unused=True)):
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                before = self.sums[place]
                self.sums[place] = dense.detach().clone() if before is None else before.add_(dense)

    def reduce(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> None:
        """Sum over ranks; each calls it for the same parameters in the same order."""
        for place, p in enumerate(self.parameters):
            found = self.sums[place]
            self.sums[place] = all_reduce_sum(torch.zeros_like(p) if found is None else found)

    def figures(self) -> dict[str, float]:
        """The fields of the step's row, when `.grad` has the whole gradient; waits for the device."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.parameters[0].device)
        for p, half in zip(self.parameters, self.sums, strict=True):
            if p.grad is not None and half is not None:
                whole, part = p.grad.reshape(-1).float(), half.reshape(-1).float() / self.share
                sums += torch.stack([whole @ whole, part @ part, whole @ part]).double()
        whole_square, half_square, product = sums.tolist()
        squared, variance = estimates(whole_square, half_square, product, self.share, self.batch)
        return {SQUARED: squared, VARIANCE: variance}
