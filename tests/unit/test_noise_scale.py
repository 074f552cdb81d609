"""The gradient noise scale: its estimate, which no cut changes, beside training that it does not change."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.core.flags import Interval
from isobatch.engine.optimization import noise_scale
from isobatch.engine.runs.run_options import RunOptions
from isobatch.tests.unit.test_cuts import BATCH, CASES, finished, open_session, whole_plan

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["finished"]
STEPS = 4
MEASURED = [
    "causal-lm",
    "LoRA",
    "classifier",
    "pruning",
    "qat",
    "recommender",
    "bce",
    "cohorts",
    "sequence-vae",
]


def test_the_estimates_are_unbiased() -> None:
    """|G|^2 = 10 x 0.2^2 = 0.4 and tr(Sigma) = 10 x 3^2 = 90, from halves of unequal size."""
    generator, found = np.random.default_rng(1), []
    for _ in range(20_000):
        samples = generator.normal(0.2, 3.0, (9, 10))
        whole, half = samples.mean(axis=0), samples[:5].mean(axis=0)
        found.append(noise_scale.estimates(whole @ whole, half @ half, whole @ half, 5 / 9, 9))
    squared, variance = np.mean(found, axis=0)
    assert squared == pytest.approx(0.4, abs=0.12)
    assert variance == pytest.approx(90, rel=0.01)


def test_halves_are_drawn_by_cohort_and_not_by_place() -> None:
    halves = np.array([noise_scale.first_half(7, step, 32, 4) for step in range(400)])
    assert (halves.sum(axis=1) == 16).all()
    assert (halves.reshape(400, 8, 4).std(axis=2) == 0).all()
    assert np.abs(halves.mean(axis=0) - 0.5).max() < 0.1
    assert noise_scale.first_half(7, 0, 4, 4).all()
    assert noise_scale.first_half(7, 3, 5).sum() == 3


def rows(squared: float, variance: float, count: int = 60) -> list[dict[str, Any]]:
    """Measurements that are as noisy as one from two halves is."""
    generator = np.random.default_rng(3)
    return [
        {
            noise_scale.SQUARED: squared + generator.normal(0, 0.3),
            noise_scale.VARIANCE: variance * generator.uniform(0.5, 1.5),
            noise_scale.COST: 0.5,
        }
        for _ in range(count)
    ]


def test_the_scale_has_a_spread_that_holds_the_truth() -> None:
    found = noise_scale.noise_scale([{"loss": 1.0}, *rows(0.5, 50.0), {"split": "valid"}])
    assert found is not None
    assert found.low < 100 < found.high
    assert found.low < found.value < found.high
    assert (found.measurements, found.seconds) == (60, 30.0)


def test_a_gradient_that_is_lost_in_noise_has_no_upper_end() -> None:
    found = noise_scale.noise_scale(rows(0.0, 50.0))
    assert found is not None
    assert found.high == math.inf


def test_few_or_broken_measurements_say_nothing() -> None:
    assert noise_scale.noise_scale(rows(1.0, 1.0, 4)) is None
    broken = [{noise_scale.SQUARED: "1", noise_scale.VARIANCE: float("nan")}] * 9
    assert noise_scale.noise_scale(broken) is None


@pytest.mark.parametrize("text", ["10m", "0", "0ep"])
def test_it_is_counted_in_steps(text: str) -> None:
    with pytest.raises(UserError, match="--noise-scale-every"):
        RunOptions(noise_scale_every=Interval.parse(text))


def trained(
    name: str, finished: Mapping[str, str], measures: bool, **plan: Any
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Figures of STEPS steps of a case, and the bytes of all its weights and buffers after them."""
    task, phase, flags = CASES[name]
    starts = {k: finished[v] for k, v in flags.items() if k in ("model", "pruned", "teacher")}
    session = open_session(task, {**flags, **starts})
    session.replan(dataclasses.replace(whole_plan(), **plan))
    with session, session.phase(session.schedules[phase]) as active:
        found = [active.step(loaded, (), measures).figures for loaded in active.batches(0, STEPS)]
        state = session.model.state_dict()
        return found, {name: value.detach().float().numpy().tobytes() for name, value in state.items()}


@pytest.mark.parametrize("name", MEASURED)
def test_what_is_learnt_has_the_same_bits(name: str, finished: dict[str, str]) -> None:
    figures, weights = trained(name, finished, measures=True)
    plain, same = trained(name, finished, measures=False)
    assert weights == same
    assert not set(noise_scale.FIELDS) & {key for row in plain for key in row}
    assert noise_scale.SQUARED not in figures[0]  # the first step finds out what later ones need
    assert all(row[noise_scale.VARIANCE] > 0 for row in figures[1:])
    assert all(row[noise_scale.COST] > 0 for row in figures[1:])


@pytest.mark.parametrize("name", ["causal-lm", "recommender", "cohorts"])
def test_no_cut_changes_the_estimate(name: str, finished: dict[str, str]) -> None:
    whole, _ = trained(name, finished, measures=True)
    cut, _ = trained(name, finished, measures=True, micro_batch_samples=5, activation_checkpointing=True)
    for one, other in zip(whole[1:], cut[1:], strict=True):
        assert one[noise_scale.VARIANCE] == pytest.approx(other[noise_scale.VARIANCE], rel=1e-4)
        assert one[noise_scale.SQUARED] == pytest.approx(other[noise_scale.SQUARED], rel=1e-3)


def test_sparse_tables_are_not_measured_and_say_why() -> None:
    task, phase, flags = CASES["sparse tables"]
    session = open_session(task, flags)
    with session, session.phase(session.schedules[phase]) as active:
        results = [active.step(loaded, (), True) for loaded in active.batches(0, 2)]
        assert "rows that were read" in active.stepper.why_no_half_gradient
    assert noise_scale.SQUARED not in results[1].figures


def test_the_gradient_of_a_half_is_what_its_samples_say() -> None:
    """Their own gradients, one sample at a time, add up to it."""
    task, phase, flags = CASES["classifier"]
    session = open_session(task, flags)
    with session, session.phase(session.schedules[phase]) as active:
        first, second = active.batches(0, 2)
        active.step(first)
        half = active.stepper._half_gradient(second)  # noqa: SLF001
        assert half is not None
        chosen = noise_scale.first_half(session.recipe.seed, 1, BATCH)
        active.session.replan(dataclasses.replace(whole_plan(), micro_batch_samples=1))
        (single,) = active.batches(1, 2)
        wanted = []
        for micro, host in zip(single.work.micro_batches, single.batches, strict=True):
            if chosen[micro.positions].all():
                one = type(single)(dataclasses.replace(single.work, micro_batches=[micro]), [host])
                active.stepper.backward(one)
                wanted.append([None if p.grad is None else p.grad.to_dense() for p in half.parameters])
                for p in session.model.parameters():
                    p.grad = None
        assert len(wanted) == BATCH // 2
        for found, *parts in zip(half.sums, *wanted, strict=True):
            assert found is not None
            assert float((found - sum(g for g in parts if g is not None)).norm()) < 1e-6
