"""Importance scores of attention heads and neurons, and the choice of those to prune.

Letters: L layers, A heads of a layer, N neurons of a layer, H hidden width, K inputs of a linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.models.encoder.encoders import EncoderLayer, EncoderSizes  # noqa: TC004  imports torch, and no class here has flags

Granularity = Literal["both", "heads", "neurons"]
SIGNIFICANT_DIGITS = 5
"""Scores are rounded to so many digits before they are ranked, so that float noise decides nothing."""


class HeadsAndNeurons(NamedTuple):
    """Scores of all heads and neurons, or bool masks of those that stay: L times (A,) and L times (N,)."""

    heads: list[Tensor]
    neurons: list[Tensor]


def l2_scores(layers: list[EncoderLayer]) -> HeadsAndNeurons:
    """Sum of squares of all weights of each head and neuron."""
    heads = [_l2(layer, "output").view(-1, layer.head_size).sum(1) for layer in layers]
    return HeadsAndNeurons(heads, [_l2(layer, "down") for layer in layers])


def _l2(layer: EncoderLayer, consumer: str) -> Tensor:
    """(K,) sum of squares of what produces, and of what reads, each input of a linear layer."""
    found: Tensor = getattr(layer, consumer).weight.detach().square().sum(0)
    for _, linear, groups in layer.producers(consumer):
        found = found + linear.weight.detach().square().sum(1).view(groups, -1).sum(0)
    return found


def gate_gradient(weight_HK: Tensor, gradient_HK: Tensor) -> Tensor:
    """(K,) derivative of the loss by a gate of 1 on each input of a linear layer (Michel et al. 2019).

    From the weight's gradient alone: d loss / d gate_k = sum over h of W_hk dW_hk.
    """
    import torch

    return torch.einsum("hk,hk->k", weight_HK, gradient_HK)


def sum_of_shares(*parts: HeadsAndNeurons) -> HeadsAndNeurons:
    """The sum of several scores, each divided by its total over the model, since their units differ."""
    import torch

    totals = [torch.cat([*part.heads, *part.neurons]).double().sum().clamp_min(1e-30) for part in parts]
    shares = (
        [[x.double() / total for x in kind] for kind in part]
        for part, total in zip(parts, totals, strict=True)
    )
    of_kinds = zip(*shares, strict=True)
    return HeadsAndNeurons(*([torch.stack(x).sum(0) for x in zip(*kind, strict=True)] for kind in of_kinds))


@dataclass(frozen=True, slots=True)
class PruningBudget:
    """How many weights pruning may remove from an encoder, and in units of what."""

    sizes: EncoderSizes
    multiple: int
    """Neurons of a layer are removed and kept in multiples of this, which kernels and quantizers prefer."""
    granularity: Granularity

    @property
    def weights_per_head(self) -> int:
        """Of its rows of query, key and value, and its columns of the output; 0 where heads stay."""
        hidden, heads = self.sizes.hidden, self.sizes.heads
        return 4 * hidden * (hidden // heads) if self.granularity != "neurons" else 0

    @property
    def weights_per_neuron(self) -> int:
        """Of its rows of the up, and its column of the down projection; 0 where neurons stay."""
        return (self.sizes.ups + 1) * self.sizes.hidden if self.granularity != "heads" else 0

    @property
    def prunable_weights(self) -> int:
        """Weights of all heads and neurons that may be removed."""
        sizes = self.sizes
        per_layer = sizes.heads * self.weights_per_head + sizes.neurons * self.weights_per_neuron
        return sizes.layers * per_layer

    @property
    def max_sparsity(self) -> float:
        """The largest sparsity that can be reached: each layer keeps `multiple` neurons."""
        return self.sparsity(0, self.sizes.layers * self.multiple)

    def sparsity(self, heads: int, neurons: int) -> float:
        """Removed weights over prunable weights, if so many heads and neurons are left (biases apart)."""
        left = heads * self.weights_per_head + neurons * self.weights_per_neuron
        return (self.prunable_weights - left) / self.prunable_weights


class _Units(NamedTuple):
    """Heads, or blocks of neurons, of a layer: each is removed as a whole."""

    keep: Tensor
    """The layer's mask."""
    members: Tensor
    """(units, size of one) places in the mask."""
    density: Tensor
    """(units,) score per weight; below 0 of those that are removed already, so that they are chosen first."""
    weights_each: int
    """Weights of one unit."""


def choose_kept(
    scores: HeadsAndNeurons, kept: HeadsAndNeurons, budget: PruningBudget, sparsity: float
) -> HeadsAndNeurons:
    """The heads and neurons that stay at this sparsity, ranked over the whole model by score per weight.

    Those removed before stay removed. Neurons are removed in blocks: a layer's `multiple` least important
    ones, then the next ones; the last block of a layer stays.
    """
    import torch

    chosen = HeadsAndNeurons(*([k.clone() for k in part] for part in kept))
    each = (budget.weights_per_head, 1, 0), (budget.weights_per_neuron, budget.multiple, 1)
    units = [
        _units(score, keep, *kind)
        for kind, *layers in zip(each, scores, chosen, strict=True)
        for score, keep in zip(*layers, strict=True)
        if kind[0]
    ]
    density = _round_to_significant_digits(torch.cat([u.density for u in units]))
    weights = torch.cat([torch.full_like(u.density, u.weights_each) for u in units])
    order = torch.argsort(density, stable=True)
    weights_removed_before = weights[order].cumsum(0) - weights[order]
    is_removed = torch.zeros(len(order), dtype=torch.bool)
    is_removed[order] = weights_removed_before < sparsity * budget.prunable_weights - 0.5
    for one, removed in zip(units, is_removed.split([len(u.density) for u in units]), strict=True):
        one.keep[one.members[removed]] = False
    return chosen


def _units(score: Tensor, keep: Tensor, weights: int, multiple: int, stay: int) -> _Units:
    """A layer's blocks of `multiple` heads or neurons in ascending order of importance, without the last
    `stay` ones. `weights`: of a head or neuron.
    """
    ranked = _round_to_significant_digits(score.double().cpu()).masked_fill(~keep, -1.0)
    blocks = len(ranked) // multiple
    order = ranked.argsort(stable=True)[: blocks * multiple].view(blocks, multiple)[: blocks - stay]
    return _Units(keep, order, ranked[order].sum(1) / (weights * multiple), weights * multiple)


def _round_to_significant_digits(values: Tensor) -> Tensor:
    """Each value rounded to SIGNIFICANT_DIGITS."""
    scale = 10.0 ** (SIGNIFICANT_DIGITS - 1 - values.abs().clamp_min(1e-300).log10().floor())
    return (values * scale).round() / scale
