"""Tests of engine/loading/microbatching.py: each sample once, within the budget, evenly over the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.engine.loading.microbatching import (
    MicroBatch,
    MicroBatchBudget,
    make_micro_batches,
    padding_fraction,
)

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=120).map(np.array)
BUDGETS = st.builds(
    MicroBatchBudget,
    samples=st.integers(1, 40),
    tokens=st.integers(1, 2000),
    fixed_cost=st.sampled_from([0.0, 16.0, 256.0]),
    square_cost=st.sampled_from([0.0, 0.01]),
    pad_multiple=st.sampled_from([1, 8, 64]),
)
WORLDS = st.sampled_from([1, 2, 3, 5, 8, 16])


def places(ranks: list[list[MicroBatch]]) -> np.ndarray:
    return np.concatenate([m.positions for rank in ranks for m in rank])


@given(LENGTHS, WORLDS, BUDGETS)
def test_every_place_once_within_the_budget_on_every_rank(
    lengths: np.ndarray, world: int, budget: MicroBatchBudget
) -> None:
    ranks = make_micro_batches(lengths, world, budget)
    assert len(ranks) == world
    assert np.array_equal(np.sort(places(ranks)), np.arange(len(lengths)))
    for rank in ranks:
        assert rank, "a rank with nothing to do takes part with a dummy"
        for micro in rank:
            rows = len(micro.positions)
            assert rows or len(rank) == 1  # a dummy is alone
            if rows:
                longest = int(lengths[micro.positions].max())
                assert micro.width == -(-longest // budget.pad_multiple) * budget.pad_multiple
            if rows > 1:
                assert rows <= budget.samples
                assert rows * micro.width <= budget.tokens


@given(LENGTHS, WORLDS, BUDGETS, st.sampled_from([2, 3, 8]))
def test_cohorts_stay_whole_and_in_order(
    lengths: np.ndarray, world: int, budget: MicroBatchBudget, cohort: int
) -> None:
    ranks = make_micro_batches(lengths, world, budget, cohort)
    assert np.array_equal(np.sort(places(ranks)), np.arange(len(lengths)))
    for micro in (m for rank in ranks for m in rank):
        for start in range(0, len(micro.positions), cohort):
            part = micro.positions[start : start + cohort]
            first = part[0] // cohort * cohort
            assert part.tolist() == list(range(first, min(first + cohort, len(lengths))))
        if len(micro.positions) > cohort:  # a single cohort is computed whatever it takes
            assert len(micro.positions) <= budget.samples
            assert len(micro.positions) * micro.width <= budget.tokens


@given(st.lists(st.integers(50, 100), min_size=1, max_size=200).map(np.array), WORLDS)
def test_no_rank_has_much_more_than_its_share(lengths: np.ndarray, world: int) -> None:
    ranks = make_micro_batches(lengths, world, MicroBatchBudget(samples=1000, tokens=1_000_000))
    slowest = max(sum(m.cost for m in rank) for rank in ranks)
    # Dealt row by row nobody has more than n / world + 1 rows of 100 tokens, and n is at most sum / 50.
    assert slowest <= 2 * lengths.sum() / world + 100


@given(LENGTHS, WORLDS)
def test_dummies_where_the_batch_is_smaller_than_the_world(lengths: np.ndarray, world: int) -> None:
    ranks = make_micro_batches(lengths, world, MicroBatchBudget(samples=1, tokens=1_000_000))
    idle = sum(len(rank[0].positions) == 0 for rank in ranks)
    assert idle == max(0, world - len(lengths))


@pytest.mark.parametrize(("count", "world"), [(3, 5), (1, 8), (5, 5), (6, 5), (93, 5)])
def test_equal_lengths_are_dealt_evenly(count: int, world: int) -> None:
    ranks = make_micro_batches(np.full(count, 7), world, MicroBatchBudget(samples=1000, tokens=100_000))
    rows = [sum(len(m.positions) for m in rank) for rank in ranks]
    assert max(rows) == -(-count // world)  # 93 on 5: nobody has more than 19
    assert sum(rows) == count


def test_the_cost_by_hand() -> None:
    budget = MicroBatchBudget(samples=4, tokens=100, fixed_cost=10, square_cost=0.5, pad_multiple=8)
    assert budget.width(9) == 16
    assert budget.width(0) == 8  # an empty row is still a row
    assert budget.cost(3, 9) == 10 + 3 * (16 + 0.5 * 16 * 16)  # 442
    assert budget.rows(9) == 4  # 100 // 16 = 6 rows of 16 tokens, but 4 samples at most
    assert budget.rows(30) == 3  # 100 // 32
    assert budget.rows(1000) == 1  # one row is computed whatever it takes
    assert budget.rows(9, max_cost=300) == 2  # (300 - 10) / 144


def test_short_and_long_samples_are_not_mixed_where_padding_would_cost_more() -> None:
    lengths = np.array([100] * 4 + [5] * 4)
    (rank,) = make_micro_batches(lengths, 1, MicroBatchBudget(samples=8, tokens=800, fixed_cost=20))
    # Together: 20 + 8 * 100 = 820. Apart: 20 + 400 and 20 + 20 = 460.
    assert sorted(m.width for m in rank) == [5, 100]
    assert padding_fraction(lengths, [rank]) == 0


def test_a_dear_micro_batch_is_not_cut() -> None:
    lengths = np.array([100] * 4 + [90] * 4)
    (rank,) = make_micro_batches(lengths, 1, MicroBatchBudget(samples=8, tokens=800, fixed_cost=1000))
    assert [len(m.positions) for m in rank] == [8]  # 1000 + 800 against 2000 + 760
    assert padding_fraction(lengths, [rank]) == pytest.approx(1 - 760 / 800)


@pytest.mark.parametrize("cohort", [1, 4])
def test_a_cut_is_a_function_of_its_arguments(cohort: int) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 50)

    def again() -> Any:
        ranks = make_micro_batches(lengths, 3, MicroBatchBudget(8, 400), cohort)
        return [[(m.positions.tolist(), m.width) for m in rank] for rank in ranks]

    assert again() == again()
