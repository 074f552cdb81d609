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


class ImportanceScores(NamedTuple):
    """Scores of all heads and neurons, one tensor per layer: L times (A,) and L times (N,)."""

    heads: list[Tensor]
    neurons: list[Tensor]


class KeepMasks(NamedTuple):
    """Which heads and neurons stay: bool masks, L times (A,) and L times (N,)."""

    heads: list[Tensor]
    neurons: list[Tensor]


def l2_scores(layers: list[EncoderLayer], head: int) -> ImportanceScores:
    """Sum of squares of all weights of each head and neuron. `head`: size of an attention head."""
    heads, neurons = [], []
    for layer in layers:
        rows = sum(x.weight.detach().square().sum(1) for x in (layer.query, layer.key, layer.value))
        rows = rows + layer.output.weight.detach().square().sum(0)
        heads.append(rows.view(-1, head).sum(1))
        neurons.append(layer.up.weight.detach().square().sum(1) + layer.down.weight.detach().square().sum(0))
    return ImportanceScores(heads, neurons)


def gate_gradient(weight_HK: Tensor, gradient_HK: Tensor) -> Tensor:
    """(K,) derivative of the loss by a gate of 1 on each input of a linear layer (Michel et al. 2019).

    From the weight's gradient alone: d loss / d gate_k = sum over h of W_hk dW_hk.
    """
    import torch

    return torch.einsum("hk,hk->k", weight_HK, gradient_HK)


def sum_of_shares(*parts: ImportanceScores) -> ImportanceScores:
    """The sum of several scores, each divided by its total over the model, since their units differ."""
    import torch

    def as_shares(scores: ImportanceScores) -> ImportanceScores:
        total = torch.cat([*scores.heads, *scores.neurons]).double().sum().clamp_min(1e-30)
        return ImportanceScores(
            [x.double() / total for x in scores.heads], [x.double() / total for x in scores.neurons]
        )

    total_scores, *rest = map(as_shares, parts)
    for other in rest:
        total_scores = ImportanceScores(
            [a + b for a, b in zip(total_scores.heads, other.heads, strict=True)],
            [a + b for a, b in zip(total_scores.neurons, other.neurons, strict=True)],
        )
    return total_scores


@dataclass(frozen=True, slots=True)
class PruningBudget:
    """How many weights pruning may remove from an encoder, and in units of what."""

    sizes: EncoderSizes
    multiple: int
    """Neurons of a layer are removed and kept in multiples of this, which kernels and quantizers prefer."""
    granularity: Granularity

    @property
    def prunable_weights(self) -> int:
        """Weights of all heads and neurons that may be removed."""
        sizes = self.sizes
        return sizes.layers * (self._weights_of_heads(sizes.heads) + self._weights_of_neurons(sizes.neurons))

    @property
    def max_sparsity(self) -> float:
        """The largest sparsity that can be reached: each layer keeps `multiple` neurons."""
        sizes = self.sizes
        removed = sizes.layers * (
            self._weights_of_heads(sizes.heads) + self._weights_of_neurons(sizes.neurons - self.multiple)
        )
        return removed / self.prunable_weights

    def _weights_of_heads(self, count: int) -> int:
        return count * self.sizes.weights_per_head if self.granularity != "neurons" else 0

    def _weights_of_neurons(self, count: int) -> int:
        return count * self.sizes.weights_per_neuron if self.granularity != "heads" else 0

    def sparsity(self, heads: int, neurons: int) -> float:
        """Removed weights over prunable weights, if so many heads and neurons are left (biases apart)."""
        sizes = self.sizes
        removed = self._weights_of_heads(sizes.layers * sizes.heads - heads) + self._weights_of_neurons(
            sizes.layers * sizes.neurons - neurons
        )
        return removed / self.prunable_weights


def choose_kept(
    scores: ImportanceScores, kept: KeepMasks, budget: PruningBudget, sparsity: float
) -> KeepMasks:
    """The heads and neurons that stay at this sparsity, ranked over the whole model by score per weight.

    Those removed before stay removed. Neurons are removed in blocks: a layer's `multiple` least important
    ones, then the next ones; the last block of a layer stays.
    """
    import torch

    candidates = _head_units(scores, kept, budget) if budget.granularity != "neurons" else []
    blocks, orders = _neuron_units(scores, kept, budget)
    candidates += blocks if budget.granularity != "heads" else []
    density = _round_to_significant_digits(torch.cat([u.density for u in candidates]))
    weights = torch.cat(
        [torch.full((len(u.density),), u.weights_each, dtype=torch.float64) for u in candidates]
    )
    order = torch.argsort(density, stable=True)
    weights_removed_before = weights[order].cumsum(0) - weights[order]
    is_removed = torch.zeros(len(order), dtype=torch.bool)
    is_removed[order] = weights_removed_before < sparsity * budget.prunable_weights - 0.5
    heads, neurons = [k.clone() for k in kept.heads], [k.clone() for k in kept.neurons]
    for candidate, removed in zip(
        candidates, is_removed.split([len(u.density) for u in candidates]), strict=True
    ):
        if candidate.is_heads:
            heads[candidate.layer][removed] = False
        else:
            count = int(removed.sum()) * budget.multiple
            neurons[candidate.layer][orders[candidate.layer][:count]] = False
    return KeepMasks(heads, neurons)


class _PrunableUnits(NamedTuple):
    """Heads, or blocks of neurons, of a layer: each is removed as a whole."""

    layer: int
    is_heads: bool
    density: Tensor
    """Score per weight; -1 for units that are removed already, so that they are chosen first."""
    weights_each: int
    """Weights of one unit."""


def _head_units(scores: ImportanceScores, kept: KeepMasks, budget: PruningBudget) -> list[_PrunableUnits]:
    weights_each = budget.sizes.weights_per_head
    return [
        _PrunableUnits(
            number, True, (score.double().cpu() / weights_each).masked_fill(~keep, -1.0), weights_each
        )
        for number, (score, keep) in enumerate(zip(scores.heads, kept.heads, strict=True))
    ]


def _neuron_units(
    scores: ImportanceScores, kept: KeepMasks, budget: PruningBudget
) -> tuple[list[_PrunableUnits], list[Tensor]]:
    """Blocks of neurons for each layer, and for each layer its neurons in ascending order of importance."""
    import torch

    candidates, orders = [], []
    weights_each = budget.sizes.weights_per_neuron * budget.multiple
    for number, (score, keep) in enumerate(zip(scores.neurons, kept.neurons, strict=True)):
        ranked = _round_to_significant_digits(score.double().cpu()).masked_fill(~keep, -1.0)
        order = torch.argsort(ranked, stable=True)
        blocks = len(order) // budget.multiple
        sums = ranked[order][: blocks * budget.multiple].view(blocks, budget.multiple).sum(1)
        candidates.append(
            _PrunableUnits(number, False, sums[:-1] / weights_each, weights_each)
        )  # a layer's best block stays
        orders.append(order)
    return candidates, orders


def _round_to_significant_digits(values: Tensor) -> Tensor:
    """Each value rounded to SIGNIFICANT_DIGITS."""
    import torch

    scale = torch.pow(10.0, SIGNIFICANT_DIGITS - 1 - values.abs().clamp_min(1e-300).log10().floor())
    return (values * scale).round() / scale
