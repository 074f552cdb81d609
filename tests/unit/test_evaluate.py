"""Tests of engine/train/evaluate.py: every sample once and in order, on any number of ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from isobatch.core.recipe import Recipe
from isobatch.data.base import ArraySource, Ragged
from isobatch.engine.train.evaluate import at_least_few, evaluate, held_out_samples
from isobatch.models.base import Batch, Loss, Rows, StepContext, Sum, Task
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Mapping

COUNT = 37


def source() -> ArraySource:
    generator = np.random.default_rng(0)
    tokens = Ragged.from_rows(
        [generator.integers(1, 9, n).astype(np.int64) for n in generator.integers(1, 20, COUNT)]
    )
    return ArraySource({"tokens": tokens, "token.weight": tokens.lengths})


class Counting(Task):
    """Sums tokens, and returns each row's own."""

    def build_model(self, facts: Any) -> nn.Module:
        return nn.Linear(1, 1)

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        return {"tokens": Loss(batch["tokens"].sum(), "token"), "rows": Loss(batch["length"].sum(), "sample")}

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        assert not model.training
        assert not torch.is_grad_enabled()
        total = batch["tokens"].sum()
        return {"mean": Sum(total, batch["length"].sum()), "each": Rows(batch["tokens"].sum(1))}

    def metrics(self, parts: Mapping[str, Any], split: str, facts: Any) -> dict[str, Any]:
        mean = parts["mean"]
        return {"mean": mean.value / mean.weight, "weight": mean.weight, "each": parts["each"].tolist()}


def measured(world: Any, task: Task, fraction: float = 1.0) -> dict[str, Any]:
    model = task.build_model(None).train()
    chosen = plan(processes=world.size, micro_batch_samples=3, micro_batch_tokens=40, pad_multiple=4)
    state: Any = SimpleNamespace(task=task, model=model, splits={"valid": source()}, plan=chosen, world=world)
    state.recipe, state.facts, state.strategy = Recipe(task="counting"), None, None
    found = evaluate(state, "valid", fraction)
    assert model.training  # as it was before
    return found


class Drawing(Counting):
    """Draws noise in its evaluation."""

    def evaluate(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Sum | Rows]:
        return {**super().evaluate(model, batch, step), "each": Rows(step.noise.normal("z", (2,)))}


@pytest.mark.parametrize("size", [2, 5])
def test_the_noise_of_an_evaluation_is_its_samples(size: int, run_ranks: Any) -> None:
    (alone,) = run_ranks(1, lambda world: measured(world, Drawing(None, None))).values
    assert np.unique(np.array(alone["each"])).size == 2 * COUNT
    for found in run_ranks(size, lambda world: measured(world, Drawing(None, None))).values:
        assert found["each"] == alone["each"]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.001])
def test_every_sample_once_and_in_order_on_any_world(size: int, fraction: float, run_ranks: Any) -> None:
    chosen = held_out_samples(source(), fraction, 1, 0)
    rows = [int(source().fetch(np.array([i]))["tokens"].sum()) for i in chosen]
    assert len(rows) == {1.0: 37, 0.5: 19, 0.001: 1}[fraction]  # ceil(37 / 2) = 19; at least one
    outcome = run_ranks(size, lambda world: measured(world, Counting(None, None), fraction))
    for found in outcome.values:
        assert found["each"] == rows
        assert found["weight"] == source().lengths(chosen).sum()
        assert found["mean"] == pytest.approx(sum(rows) / found["weight"])
    assert all(calls == outcome.calls[0] for calls in outcome.calls)


def test_a_fraction_is_a_fair_share_of_a_sorted_split() -> None:
    """The first half of rows sorted by label holds one label."""
    labels = ArraySource({"label": np.repeat([0, 1], 500)})

    def share(seed: int = 0) -> float:
        chosen = held_out_samples(labels, 0.5, 1, seed)
        assert len(set(chosen.tolist())) == 500
        return float(labels.columns["label"][chosen].mean())

    assert abs(share() - 0.5) < 5 * np.sqrt(0.25 / 500 / 2)  # without replacement: half the variance
    assert share() == share()
    assert len({tuple(held_out_samples(labels, 0.5, 1, seed)) for seed in range(3)}) == 3


@pytest.mark.parametrize(("count", "share"), [(54, 1.0), (200, 1.0), (300, 2 / 3), (400, 0.5), (9000, 0.5)])
def test_of_few_samples_all_are_measured_while_training(count: int, share: float) -> None:
    """--eval-fraction 0.5 of 300 would be 150, fewer than 200."""
    few: Any = range(count)
    assert at_least_few(0.5, few) == share


class Plain(Counting):
    """With the contract's own evaluation: the training losses, each over its unit."""

    evaluate = Task.evaluate
    metrics = Task.metrics


@pytest.mark.parametrize("size", [1, 3])
def test_by_default_the_losses_are_the_metrics(size: int, run_ranks: Any) -> None:
    found = run_ranks(size, lambda world: measured(world, Plain(None, None))).values[0]
    tokens = int(source().columns["tokens"].values.sum())
    lengths = int(source().lengths(np.arange(COUNT)).sum())
    assert found["tokens"] == pytest.approx(tokens / lengths)
    assert found["rows"] == pytest.approx(lengths / COUNT)
    assert found["loss"] == pytest.approx(found["tokens"] + found["rows"])
