"""Tests of engine/train/step.py: the same numbers and collectives for any number of ranks."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isobatch.core.errors import TrainingError
from isobatch.core.recipe import Recipe
from isobatch.data.base import ArraySource, Ragged
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.engine.strategies import replicated as replicas_module
from isobatch.engine.strategies.replicated import ReplicatedStrategy
from isobatch.engine.train.hooks import Hook, Hooks
from isobatch.engine.train.step import train_step
from isobatch.models import base
from isobatch.models.base import Batch, Loss, StepContext, Task
from isobatch.tests.unit.helpers import optimizer_of, plan, training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from isobatch.engine.strategies.base import Strategy
    from isobatch.engine.train.state import Training

VOCABULARY, COUNT = 11, 40
RECIPE = Recipe(task="tiny", batch_size=16, lr=0.1, clip=0.0, optimizer="sgd", dropout=0.2)


def source() -> ArraySource:
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, VOCABULARY, n).astype(np.uint16) for n in generator.integers(2, 20, COUNT)]
    tokens = Ragged.from_rows(rows)
    return ArraySource({"tokens": tokens, "token.weight": tokens.lengths - 1})


class Model(nn.Module):
    """A next-token model with dropout, a part that only long rows use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.drop = nn.Dropout(0.2)
        self.hidden = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.long = nn.Linear(8, 8)
        self.idle = nn.Linear(8, 8)
        self.out = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, length: Tensor) -> Tensor:
        x = self.norm(self.hidden(self.drop(self.embedding(tokens))).tanh())
        far = length > 15
        if far.any():
            x = x + self.long(x) * far[:, None, None]
        return self.out(self.drop(x))


class Tiny(Task):
    """Two losses with units of their own: one per token, one per sample."""

    def build_model(self, facts: Any) -> nn.Module:
        return Model()

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        logits = model(batch["tokens"], batch["length"])[:, :-1]
        targets = batch["tokens"][:, 1:].clone()
        targets[torch.arange(targets.shape[1]) >= batch["length"][:, None] - 1] = -100
        total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        shake = step.noise.uniform("shake", (1,))[:, 0]
        return {"next": Loss(total, "token"), "first": Loss((logits[:, 0, 0] * shake).sum(), "sample")}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def replicas(
    world: Any,
    made: nn.Module,
    recipe: Recipe = RECIPE,
    kind: type[ReplicatedStrategy] = ReplicatedStrategy,
    **changes: Any,
) -> ReplicatedStrategy:
    chosen = plan(**{"processes": world.size, "micro_batch_tokens": 40, **changes})
    return kind(made, lambda model: optimizer_of(model, recipe), chosen, world, recipe.clip)


def state_of(
    strategy: Strategy, recipe: Recipe = RECIPE, kind: type[Task] = Tiny, keyed: bool = True, steps: int = 3
) -> Training:
    noise = KeyedNoise(recipe.seed) if keyed else None
    if noise is not None:
        key_dropout(strategy.unwrapped, noise)
    strategy.unwrapped.train()
    sampler = Sampler(COUNT, recipe.batch_size, recipe.seed)
    return training(kind(recipe, None), strategy, source(), sampler, noise, steps)


class Votes(Hook):
    """Rank 1 asks for a stop; all say that they failed."""

    votes = ("stop", "failed")

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def vote(self, step: int) -> Mapping[str, float]:
        return {"stop": float(self.rank == 1), "failed": 1.0}


def trained(
    recipe: Recipe = RECIPE, steps: int = 3, most: int = 16, **changes: Any
) -> Callable[[Any], dict[str, Any]]:
    """A rank's part: some steps; its losses, norms and weights."""
    models = {rank: model() for rank in range(most)}  # made here: seeding is global, threads would mix it up

    def part(world: Any) -> dict[str, Any]:
        strategy = replicas(world, models[world.rank], recipe, **changes)
        state, hooks = state_of(strategy, recipe, steps=steps), Hooks([Votes(world.rank)])
        found: dict[str, Any] = {"sums": [], "norms": [], "scale": []}
        for batch in state.batches(0):
            figures = train_step(state, batch, hooks).read(state)
            found["sums"].append({name: figures.row[name] for name in figures.output.names})
            assert figures.votes == {"stop": float(world.size > 1), "failed": world.size}
            found["norms"].append(figures.norm)
            found["scale"].append(strategy.scale)
        found["weights"] = {n: p.detach().clone() for n, p in strategy.unwrapped.named_parameters()}
        return {**found, "seen": getattr(strategy, "seen", None)}

    return part


class Counting(ReplicatedStrategy):
    """Computes dummies, as ZeRO 3 must, and writes down what it is told of."""

    equal_counts = True
    computes_dummies = True

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.seen: list[str] = []

    @contextlib.contextmanager
    def accumulate_gradients(self) -> Iterator[None]:
        self.seen.append("begin")
        yield
        self.seen.append("end")

    @contextlib.contextmanager
    def forward_backward(self, last: bool) -> Iterator[None]:
        yield
        self.seen.append("last" if last else "one")

    def backward(self, loss: Tensor) -> None:
        self.seen.append("backward")
        super().backward(loss)


@pytest.fixture
def alone(run_ranks: Any) -> dict[str, Any]:
    """The whole batch at once on one rank."""
    (found,) = run_ranks(
        1, trained(micro_batch_samples=1000, micro_batch_tokens=10**6, micro_batch_cost=1e9)
    ).values
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_any_cut_and_world_takes_the_same_steps(size: int, run_ranks: Any, alone: dict[str, Any]) -> None:
    outcome = run_ranks(size, trained())
    for found in outcome.values:
        assert [sorted(s) for s in found["sums"]] == [["first", "next"]] * 3
        for one, other in zip(found["sums"], alone["sums"], strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        for name, weight in found["weights"].items():
            assert torch.allclose(weight, alone["weights"][name], atol=1e-6), name


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, pytest.param(512, marks=pytest.mark.slow)])
def test_every_rank_issues_the_same_collectives(size: int, run_ranks: Any) -> None:
    outcome = run_ranks(size, trained(steps=2, most=size))
    first = outcome.calls[0]
    assert all(calls == first for calls in outcome.calls)
    # Each step: who used which parameter, one bucket of gradients, losses and votes; before the first of the
    # last kind, the names of losses.
    parameters = list(model().parameters())
    used = sum(p.numel() for n, p in model().named_parameters() if not n.startswith("idle"))
    one = [
        ("sum", (len(parameters) + 1,), torch.int32),  # and whether there was work
        ("sum", (used,), torch.float32),
        ("sum", (4,), torch.float64),  # two losses and two votes
    ]
    assert first == [*one[:2], ("gather",), one[2], *one]


@pytest.mark.parametrize("size", [1, 3, 5])
def test_computed_dummies_change_nothing_and_even_out_the_counts(size: int, run_ranks: Any) -> None:
    recipe = Recipe(task="tiny", batch_size=4, lr=0.1, clip=0.0, optimizer="sgd", weight_decay=0.0)
    (single,) = run_ranks(1, trained(recipe, steps=1)).values
    outcome = run_ranks(size, trained(recipe, steps=1, kind=Counting, micro_batch_samples=1))
    for found in outcome.values:
        assert found["seen"] == outcome.values[0]["seen"]  # in step, whatever each has to do
        assert found["sums"][0] == pytest.approx(single["sums"][0], rel=1e-5)
        assert found["norms"] == pytest.approx(single["norms"], rel=1e-5)
        for name, weight in found["weights"].items():
            assert torch.allclose(weight, single["weights"][name], atol=1e-6), name
    begin, *micro_batches, end = outcome.values[0]["seen"]
    count = len(micro_batches) // 2
    assert (begin, end) == ("begin", "end")
    assert micro_batches == ["backward", "one"] * (count - 1) + ["backward", "last"]
    assert count == -(-4 // size)


def test_a_loss_is_its_sum_over_the_weight_of_the_whole_batch(run_ranks: Any) -> None:
    recipe = Recipe(task="tiny", batch_size=16, noise="keyed", clip=0.0, lr=0.0, optimizer="sgd")
    rows = source()
    samples = Sampler(COUNT, 16, 0).batch(0)

    def part(world: Any) -> tuple[dict[str, float], float]:
        made = model()
        state = state_of(replicas(world, made, recipe), recipe, steps=1)
        made.eval()  # without dropout, so that the sum can be taken here
        (batch,) = state.batches(0)
        result = train_step(state, batch, Hooks())
        total = 0.0
        for i in samples:
            row = torch.from_numpy(rows.fetch(np.array([i]))["tokens"].astype(np.int64))
            logits = made(row, torch.tensor([row.shape[1]]))[0, :-1]
            total += nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
        return dict(zip(result.names, result.sums.read(), strict=False)), total

    ((losses, total),) = run_ranks(1, part).values
    assert losses["next"] == pytest.approx(total / (rows.lengths(samples) - 1).sum(), rel=1e-5)


def test_clipping_uses_the_norm_of_the_whole_gradient(run_ranks: Any) -> None:
    recipe = Recipe(task="tiny", batch_size=16, lr=1.0, clip=0.01, optimizer="sgd", weight_decay=0.0)
    for size in (1, 3):
        found = run_ranks(size, trained(recipe, steps=1)).values[-1]
        before = dict(model().named_parameters())
        moved = torch.cat([(found["weights"][n] - before[n]).flatten() for n in before])
        assert found["norms"][0] > 0.05  # reported as it was before
        assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)  # lr 1 times the clipped norm


class Tied(Model):
    """Its table is its output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = self.embedding.weight


class Tables(ReplicatedStrategy):
    """Embeddings' gradients as torch has them, a whole table for each micro-batch."""

    def _use_sparse_gradients(self, yes: bool) -> None:
        super()._use_sparse_gradients(False)


@pytest.mark.parametrize("kind", [Model, Tied])
@pytest.mark.parametrize("size", [1, 2])
def test_rows_that_were_read_make_the_gradient_of_the_table(
    size: int, kind: type[nn.Module], run_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Model", kind)
    rows, tables = (run_ranks(size, trained(kind=k)).values[0] for k in (ReplicatedStrategy, Tables))
    assert rows["norms"] == pytest.approx(tables["norms"], rel=1e-5)
    for name, weight in tables["weights"].items():
        torch.testing.assert_close(rows["weights"][name], weight, rtol=1e-5, atol=1e-6)


class ByRows(ReplicatedStrategy):
    """Its embedding moves by the rows that were read."""

    def __init__(self, model: nn.Module, _: Any, plan: Any, world: Any, clip: float) -> None:
        sparse = [model.embedding.weight]
        recipe = Recipe(task="tiny", batch_size=16, lr=0.1, weight_decay=0.1)
        super().__init__(model, lambda m: optimizer_of(m, recipe, sparse), plan, world, clip, sparse)


@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_tables_by_rows_learn_the_same_on_any_number_of_ranks(clip: float, run_ranks: Any) -> None:
    recipe = Recipe(task="tiny", batch_size=16, lr=0.01, clip=clip, dropout=0.2)
    alone = run_ranks(1, trained(recipe, kind=ByRows)).values[0]
    for size in (2, 3, 20):  # of twenty, some have no samples
        for found in run_ranks(size, trained(recipe, kind=ByRows, most=20)).values:
            assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
            for name, weight in alone["weights"].items():
                torch.testing.assert_close(found["weights"][name], weight, rtol=1e-3, atol=1e-4)


class Doubled(nn.Linear, base.CachedWeightTransform):
    """Computes with twice its weight, and counts how often it was doubled."""

    leaf: Tensor | None = None
    times = 0

    def hold(self) -> None:
        self.times += 1
        self.double = 2 * self.weight
        self.leaf = self.double.detach().requires_grad_()

    def release(self, whole: bool) -> None:
        if whole and self.leaf is not None and self.leaf.grad is not None:
            self.double.backward(self.leaf.grad)
        self.leaf = None

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, 2 * self.weight if self.leaf is None else self.leaf, self.bias)


class Holding(Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = Doubled(8, 8)


def test_what_is_held_is_made_once_a_step_and_learns_the_same(
    run_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "Model", Holding)
    made: list[ReplicatedStrategy] = []

    class Kept(ReplicatedStrategy):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            made.append(self)

    once = run_ranks(1, trained(kind=Kept)).values[0]
    each = run_ranks(1, trained(kind=Counting)).values[0]  # whose backwards reduce: it holds nothing
    assert [m.unwrapped.hidden.times for m in made] == [3]
    assert once["norms"] == pytest.approx(each["norms"], rel=1e-5)
    for name, weight in each["weights"].items():
        torch.testing.assert_close(once["weights"][name], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_an_overflow_redoes_the_same_step_at_half_the_scale(
    size: int, run_ranks: Any, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # fp32 arithmetic overflows too where the scale is out of bounds: 2^128 is no float.
    monkeypatch.setattr(replicas_module, "SCALE_START", 2.0**130)
    outcome = run_ranks(size, trained(precision="fp16"))
    for found in outcome.values:
        assert 2.0**100 < found["scale"][0] < 2.0**130
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert [s["next"] for s in found["sums"]] == pytest.approx(
            [s["next"] for s in alone["sums"]], rel=1e-5
        )
    assert all(calls == outcome.calls[0] for calls in outcome.calls)


def test_native_noise_is_drawn_again_by_a_resumed_run_and_refused_to_tasks(run_ranks: Any) -> None:
    recipe = Recipe(task="tiny", batch_size=16, noise="native")

    def part(world: Any) -> list[float]:
        state = state_of(replicas(world, model(), recipe), recipe, keyed=False)
        drawn = []
        for _ in range(2):
            with state.bound(3, 1, {}, np.arange(4), lambda *_: None):
                drawn.append(float(torch.rand(())))
        with pytest.raises(TrainingError, match=r"draws noise \(shake\) of its own: use --noise keyed"):
            state.context(0).noise.uniform("shake", (1,))
        return drawn

    ((one, other),) = run_ranks(1, part).values
    assert one == other


class Recurrent(nn.Module):
    """Dropout inside torch's own GRU: nobody can key it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.gru = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)
        self.out = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, length: Tensor) -> Tensor:
        return self.out(self.gru(self.embed(tokens))[0])


@pytest.mark.parametrize(("kind", "foreign"), [(Recurrent, True), (Model, False)])
def test_noise_of_the_models_own_is_noticed(kind: type[nn.Module], foreign: bool, run_ranks: Any) -> None:
    def part(world: Any) -> bool | None:
        state = state_of(replicas(world, kind()))
        assert state.layout.foreign_noise is None
        train_step(state, next(state.batches(0, 1)), Hooks())
        return state.layout.foreign_noise

    assert run_ranks(1, part).values == [foreign]


class Recording(Tiny):
    """Records a vector beside its losses: per column, how many tokens there were."""

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        inside = torch.arange(20) < batch["length"][:, None]
        step.record("tokens", inside.sum(0))
        step.record("samples", torch.tensor(float(len(inside))))
        return super().loss(model, batch, step)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_what_a_loss_records_is_summed_in_the_losses_reduction(size: int, run_ranks: Any) -> None:
    models = {rank: model() for rank in range(size)}

    def part(world: Any) -> list[dict[str, Any]]:
        state = state_of(replicas(world, models[world.rank]), kind=Recording, steps=2)
        hooks, found = Hooks([Votes(world.rank)]), []
        for batch in state.batches(0):
            figures = train_step(state, batch, hooks).read(state)
            assert figures.votes["failed"] == size
            recorded = state.layout.recorded_in(np.array(figures.output.sums.read()))
            found.append({name: value.tolist() for name, value in recorded.items()})
        return found

    outcome = run_ranks(size, part)
    order = Sampler(COUNT, RECIPE.batch_size, RECIPE.seed)
    for found in outcome.values:
        for step, recorded in enumerate(found):
            lengths = source().lengths(order.batch(step))
            assert recorded["samples"] == len(lengths)
            assert recorded["tokens"] == [int((lengths > column).sum()) for column in range(20)]
    sums = [call for call in outcome.calls[0] if call[0] == "sum" and call[2] == torch.float64]
    assert sums == [("sum", (2 + 21 + 2,), torch.float64)] * 2
