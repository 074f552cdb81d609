"""Tests of models/encoder/importance.py: scores of heads and neurons, and the choice of those to prune."""

from __future__ import annotations

import pytest
import torch

from isobatch.models.encoder import encoders, importance
from isobatch.models.encoder.encoders import EncoderSizes
from isobatch.models.encoder.importance import HeadsAndNeurons, PruningBudget
from isobatch.tests.unit.encoders import HEAD, classifier, given

SIZES = EncoderSizes(layers=6, hidden=768, heads=12, neurons=3072)


def keep_all(sizes: EncoderSizes = SIZES) -> HeadsAndNeurons:
    heads = [torch.ones(sizes.heads, dtype=torch.bool) for _ in range(sizes.layers)]
    return HeadsAndNeurons(heads, [torch.ones(sizes.neurons, dtype=torch.bool) for _ in range(sizes.layers)])


def scores(seed: int = 0, sizes: EncoderSizes = SIZES) -> HeadsAndNeurons:
    draw = torch.Generator().manual_seed(seed)
    heads = [torch.rand(sizes.heads, generator=draw) * 128 for _ in range(sizes.layers)]
    return HeadsAndNeurons(heads, [torch.rand(sizes.neurons, generator=draw) for _ in range(sizes.layers)])


@pytest.mark.parametrize("sparsity", [0.05, 0.2, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("granularity", ["both", "heads", "neurons"])
def test_the_target_sparsity_is_reached_and_hardly_exceeded(sparsity: float, granularity: str) -> None:
    budget = PruningBudget(SIZES, 32, granularity)  # type: ignore[arg-type]
    if sparsity > budget.max_sparsity:
        pytest.skip("cannot be had")
    kept = importance.choose_kept(scores(), keep_all(), budget, sparsity)
    found = budget.sparsity(*(sum(int(k.sum()) for k in part) for part in kept))
    dearest = max(budget.weights_per_head, 32 * budget.weights_per_neuron) / budget.prunable_weights
    assert sparsity <= found + 1e-9 <= sparsity + dearest
    assert all(int(k.sum()) % 32 == 0 and int(k.sum()) >= 32 for k in kept.neurons)


def test_removed_units_stay_removed() -> None:
    budget, kept = PruningBudget(SIZES, 32, "both"), keep_all()
    for step, sparsity in enumerate((0.1, 0.2, 0.3, 0.5)):
        before, kept = kept, importance.choose_kept(scores(step), kept, budget, sparsity)
        for old, new in zip((*before.heads, *before.neurons), (*kept.heads, *kept.neurons), strict=True):
            assert not (new & ~old).any()


def test_the_lowest_score_per_weight_is_removed_first() -> None:
    sizes = EncoderSizes(layers=1, hidden=64, heads=4, neurons=128)
    # A head has 4 * 64 * 16 = 4096 weights, a block of 32 neurons 2 * 64 * 32 = 4096 as well.
    found = HeadsAndNeurons([torch.tensor([5.0, 1.0, 9.0, 3.0])], [torch.arange(128.0).div(32).floor()])
    budget = PruningBudget(sizes, 32, "both")
    kept = importance.choose_kept(found, keep_all(sizes), budget, 3 * 4096 / budget.prunable_weights)
    # Blocks of neurons score 0, 32, 64 (the best block stays), heads 5, 1, 9, 3: the three least are 0, 1, 3.
    assert kept.heads[0].tolist() == [True, False, True, False]
    assert kept.neurons[0].tolist() == [False] * 32 + [True] * 96


def test_l2_is_the_sum_of_squares_of_all_weights_of_a_group() -> None:
    model = classifier("bert")
    layer = encoders.layers(model)[1]
    found = importance.l2_scores(encoders.layers(model))
    rows = slice(2 * HEAD, 3 * HEAD)
    parts = [x.weight[rows] for _, x, _ in layer.producers("output")] + [layer.output.weight[:, rows]]
    torch.testing.assert_close(found.heads[1][2], sum(p.square().sum() for p in parts))
    column = layer.up.weight[7].square().sum() + layer.down.weight[:, 7].square().sum()
    torch.testing.assert_close(found.neurons[1][7], column)


def test_gate_gradients_are_the_loss_derivative_by_a_gate() -> None:
    """Against autograd: each input of the layer is multiplied by a gate of 1."""
    model = classifier("bert")
    down = encoders.layers(model)[0].down
    gate = torch.ones(down.in_features, requires_grad=True)
    handle = down.register_forward_pre_hook(lambda _, x: (x[0] * gate,))
    inputs = {k: torch.from_numpy(v) for k, v in given().items()}
    model(**inputs).logits.square().sum().backward()
    handle.remove()
    found = importance.gate_gradient(down.weight.detach(), down.weight.grad)
    torch.testing.assert_close(found, gate.grad, rtol=1e-4, atol=1e-5)


def test_scores_of_different_units_count_alike() -> None:
    one, other = scores(1), scores(2)
    big = HeadsAndNeurons([h * 1e6 for h in other.heads], [n * 1e6 for n in other.neurons])
    first, second = importance.sum_of_shares(one, other), importance.sum_of_shares(one, big)
    for a, b in zip((*first.heads, *first.neurons), (*second.heads, *second.neurons), strict=True):
        torch.testing.assert_close(a, b)
