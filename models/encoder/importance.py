"""Which heads and neurons matter least: arithmetic on scores, vectorised over all of them.

Letters: L layers, A heads of a layer, N neurons of a layer, H hidden width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.models.encoder.encoders import Layer, Sizes

Granularity = Literal["both", "heads", "neurons"]
DIGITS = 5
"""Scores are rounded to so many: float noise should decide nothing."""


class Scores(NamedTuple):
    """Of each head and each neuron, one tensor per layer: L times (A,) and L times (N,)."""

    heads: list[Tensor]
    neurons: list[Tensor]


class Kept(NamedTuple):
    """What stays: boolean masks, L times (A,) and L times (N,)."""

    heads: list[Tensor]
    neurons: list[Tensor]


def l2(layers: list[Layer], head: int) -> Scores:
    """Sum of squares of all weights of a head or neuron."""
    heads, neurons = [], []
    for layer in layers:
        rows = sum(x.weight.detach().square().sum(1) for x in (layer.query, layer.key, layer.value))
        rows = rows + layer.output.weight.detach().square().sum(0)
        heads.append(rows.view(-1, head).sum(1))
        neurons.append(layer.up.weight.detach().square().sum(1) + layer.down.weight.detach().square().sum(0))
    return Scores(heads, neurons)


def gate_gradient(weight_HK: Tensor, gradient_HK: Tensor) -> Tensor:
    """(K,): the loss's derivative by a gate on each input of a linear layer, which is 1 (Michel et al. 2019).

    From the weight's gradient alone: d loss / d gate_k = sum over h of W_hk dW_hk.
    """
    import torch

    return torch.einsum("hk,hk->k", weight_HK, gradient_HK)


def added(*parts: Scores) -> Scores:
    """Criteria of different units, each divided by its total over the whole model."""
    import torch

    def shares(scores: Scores) -> Scores:
        total = torch.cat([*scores.heads, *scores.neurons]).double().sum().clamp_min(1e-30)
        return Scores(
            [s.double() / total for s in scores.heads], [s.double() / total for s in scores.neurons]
        )

    first, *rest = map(shares, parts)
    for more in rest:
        first = Scores(
            [a + b for a, b in zip(first.heads, more.heads, strict=True)],
            [a + b for a, b in zip(first.neurons, more.neurons, strict=True)],
        )
    return first


@dataclass(frozen=True, slots=True)
class Budget:
    """What is removed of an encoder, and in what units."""

    sizes: Sizes
    multiple: int
    """Neurons of a layer go and stay in multiples of this: kernels like them, and so do quantizers."""
    granularity: Granularity

    @property
    def weights(self) -> int:
        """Weights of all that may go."""
        s = self.sizes
        return s.layers * (self._heads(s.heads) + self._neurons(s.neurons))

    @property
    def most(self) -> float:
        """The largest sparsity there can be: each layer keeps `multiple` neurons."""
        s = self.sizes
        gone = s.layers * (self._heads(s.heads) + self._neurons(s.neurons - self.multiple))
        return gone / self.weights

    def _heads(self, count: int) -> int:
        return count * self.sizes.head_weights if self.granularity != "neurons" else 0

    def _neurons(self, count: int) -> int:
        return count * self.sizes.neuron_weights if self.granularity != "heads" else 0

    def sparsity(self, heads: int, neurons: int) -> float:
        """Weights removed of what may go, where so many heads and neurons are left (biases apart)."""
        s = self.sizes
        gone = self._heads(s.layers * s.heads - heads) + self._neurons(s.layers * s.neurons - neurons)
        return gone / self.weights


def choose(scores: Scores, kept: Kept, budget: Budget, sparsity: float) -> Kept:
    """The heads and neurons that stay at `sparsity`, ranked over the whole model by score per weight.

    What is gone stays gone. Neurons go in blocks: a layer's least important `multiple`, then the next ones.
    """
    import torch

    units = _head_units(scores, kept, budget) if budget.granularity != "neurons" else []
    blocks, orders = _neuron_units(scores, kept, budget)
    units += blocks if budget.granularity != "heads" else []
    density = _rounded(torch.cat([u.density for u in units]))
    costs = torch.cat([torch.full((len(u.density),), u.cost, dtype=torch.float64) for u in units])
    order = torch.argsort(density, stable=True)
    removed_before = costs[order].cumsum(0) - costs[order]
    goes = torch.zeros(len(order), dtype=torch.bool)
    goes[order] = removed_before < sparsity * budget.weights - 0.5
    heads, neurons = [k.clone() for k in kept.heads], [k.clone() for k in kept.neurons]
    for unit, gone in zip(units, goes.split([len(u.density) for u in units]), strict=True):
        if unit.is_heads:
            heads[unit.layer][gone] = False
        else:
            count = int(gone.sum()) * budget.multiple
            neurons[unit.layer][orders[unit.layer][:count]] = False
    return Kept(heads, neurons)


class _Units(NamedTuple):
    """Things of a layer that go as a whole."""

    layer: int
    is_heads: bool
    density: Tensor
    """Score per weight; what is gone already comes first."""
    cost: int
    """Weights of one."""


def _head_units(scores: Scores, kept: Kept, budget: Budget) -> list[_Units]:
    cost = budget.sizes.head_weights
    return [
        _Units(number, True, (score.double().cpu() / cost).masked_fill(~keep, -1.0), cost)
        for number, (score, keep) in enumerate(zip(scores.heads, kept.heads, strict=True))
    ]


def _neuron_units(scores: Scores, kept: Kept, budget: Budget) -> tuple[list[_Units], list[Tensor]]:
    """Blocks per layer, and each layer's neurons from the least important on."""
    import torch

    units, orders = [], []
    cost = budget.sizes.neuron_weights * budget.multiple
    for number, (score, keep) in enumerate(zip(scores.neurons, kept.neurons, strict=True)):
        ranked = _rounded(score.double().cpu()).masked_fill(~keep, -1.0)
        order = torch.argsort(ranked, stable=True)
        blocks = len(order) // budget.multiple
        sums = ranked[order][: blocks * budget.multiple].view(blocks, budget.multiple).sum(1)
        units.append(_Units(number, False, sums[:-1] / cost, cost))  # the best block of a layer stays
        orders.append(order)
    return units, orders


def _rounded(values: Tensor) -> Tensor:
    """To DIGITS significant digits."""
    import torch

    scale = torch.pow(10.0, DIGITS - 1 - values.abs().clamp_min(1e-300).log10().floor())
    return (values * scale).round() / scale
