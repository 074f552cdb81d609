"""Tests of engine/loading/microbatching.py: each sample once, within the budget, evenly over the ranks."""

from __future__ import annotations

import dataclasses
import heapq
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.engine.loading.microbatching import MicroBatch, MicroBatchBudget, cut_batch, deal

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=120).map(np.array)
BUDGETS = st.builds(
    MicroBatchBudget,
    samples=st.integers(1, 40),
    tokens=st.integers(1, 2000),
    fixed_cost=st.sampled_from([0.0, 16.0, 256.0]),
    pad_multiple=st.sampled_from([1, 8, 64]),
)
WORLDS = st.sampled_from([1, 2, 3, 5, 8, 16])


def micro_batches(
    lengths: np.ndarray, world: int, budget: MicroBatchBudget, cohort: int = 1
) -> list[list[MicroBatch]]:
    """Of every rank."""
    cut = cut_batch(lengths, world, budget, cohort)
    return [cut.of_rank(rank) for rank in range(world)]


def places(ranks: list[list[MicroBatch]]) -> np.ndarray:
    return np.concatenate([m.positions for rank in ranks for m in rank])


@given(LENGTHS, WORLDS, BUDGETS)
def test_every_place_once_within_the_budget_on_every_rank(
    lengths: np.ndarray, world: int, budget: MicroBatchBudget
) -> None:
    ranks = micro_batches(lengths, world, budget)
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
    ranks = micro_batches(lengths, world, budget, cohort)
    assert np.array_equal(np.sort(places(ranks)), np.arange(len(lengths)))
    for micro in (m for rank in ranks for m in rank):
        for start in range(0, len(micro.positions), cohort):
            part = micro.positions[start : start + cohort]
            first = part[0] // cohort * cohort
            assert part.tolist() == list(range(first, min(first + cohort, len(lengths))))
        if len(micro.positions) > cohort:  # a single cohort is computed whatever it takes
            assert len(micro.positions) <= budget.samples
            assert len(micro.positions) * micro.width <= budget.tokens


def test_the_cost_by_hand() -> None:
    budget = MicroBatchBudget(samples=4, tokens=100, fixed_cost=10, pad_multiple=8)
    widths = budget.widths(np.array([9, 0, 30, 1000]))
    assert widths.tolist() == [16, 8, 32, 1000]  # an empty row is still a row
    # 100 // 16 = 6 rows of 16 tokens, but 4 samples at most; 100 // 32; one row of any width.
    assert budget.rows(widths).tolist() == [4, 4, 3, 1]
    assert budget.rows(widths, max_cost=50).tolist()[0] == 2  # (50 - 10) / 16
    lengths = np.array([9, 9, 9])
    (micro,) = cut_batch(lengths, 1, budget).of_rank(0)
    assert micro.cost == 10 + 3 * 16


@given(LENGTHS, WORLDS, BUDGETS, st.sampled_from([1, 3]), st.booleans())
def test_the_padding_is_counted(
    lengths: np.ndarray, world: int, budget: MicroBatchBudget, cohort: int, packed: bool
) -> None:
    cut = cut_batch(lengths, world, dataclasses.replace(budget, packed=packed), cohort)
    ranks = [cut.of_rank(rank) for rank in range(world)]
    slots = sum(m.width * len(m.positions) for rank in ranks for m in rank)
    assert cut.padding(lengths) == pytest.approx(1 - lengths.sum() / slots)
    assert cut.most == max(sum(len(m.positions) > 0 for m in rank) for rank in ranks)
    assert all(len(cut.of_rank(rank, at_least=cut.most)) == cut.most for rank in range(world))


@given(LENGTHS, WORLDS, BUDGETS)
def test_packed_micro_batches_fit_without_padding(
    lengths: np.ndarray, world: int, budget: MicroBatchBudget
) -> None:
    ranks = micro_batches(lengths, world, dataclasses.replace(budget, packed=True))
    assert np.array_equal(np.sort(places(ranks)), np.arange(len(lengths)))
    for micro in (m for rank in ranks for m in rank if len(m.positions) > 1):
        assert len(micro.positions) <= budget.samples
        assert lengths[micro.positions].sum() <= budget.tokens


@given(st.lists(st.integers(0, 60), min_size=1, max_size=200), st.integers(1, 40))
def test_dealing_at_once_is_dealing_one_by_one(costs: list[int], world: int) -> None:
    """Graham's rule with a heap, where a tie may go to another rank: the loads are the same."""
    loads = [0] * world
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    ranks, slowest = deal(np.array(costs, float), world)
    assert sorted(np.bincount(ranks, costs, world).tolist()) == sorted(loads)
    assert slowest == max(loads)


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_are_even_and_quickly_so(packed: bool) -> None:
    """The slowest of 512 ranks has no more than 3.5 % above the mean; nor does the cut take long."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(4.8, 0.8, 65_536).astype(int) + 1, 2048)
    budget = MicroBatchBudget(64, 8192, fixed_cost=300, pad_multiple=8, packed=packed)
    began = time.process_time()
    cut = cut_batch(lengths, 512, budget)
    assert time.process_time() - began < 0.2  # 0.01 s; rank by rank in Python it took seconds
    loads = np.bincount(cut.ranks, cut.costs, 512)
    assert loads.max() <= 1.035 * loads.mean()
