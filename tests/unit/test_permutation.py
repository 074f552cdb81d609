"""Tests of engine/loading/permutation.py: a bijection, and uniform."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.engine.loading import permutation
from isobatch.engine.loading.permutation import SORTED, permute, shuffle

SIZES = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 100, 255, 256, 257, 1000, 4096, 4097, 65535, 65537, 100_003]


@pytest.mark.parametrize("permutation", [permute, shuffle])
@pytest.mark.parametrize("count", SIZES)
def test_every_number_comes_once(count: int, permutation: Any) -> None:
    found = permutation(np.arange(count), count, seed=1, epoch=2)
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(count))


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_every_number_comes_once_for_any_name(count: int, seed: int, epoch: int) -> None:
    assert len(set(permute(np.arange(count), count, seed, epoch).tolist())) == count


def test_of_many_entries_those_asked_for_are_distinct_and_in_range() -> None:
    count = 2**33 + 5
    places = np.concatenate([np.arange(2000), np.arange(count - 2000, count)])
    found = permute(places, count, seed=0, epoch=0)
    assert len(np.unique(found)) == 4000
    assert found.min() >= 0
    assert found.max() < count
    assert abs(found.mean() / count - 0.5) < 5 / np.sqrt(12 * 4000)  # 5 standard errors of a uniform's mean


def test_entries_do_not_depend_on_what_is_asked_beside_them() -> None:
    whole = permute(np.arange(70_000), 70_000, 5, 1)  # more than one chunk of 2^15
    some = np.array([[69_999, 0], [32_768, 32_767]])
    assert np.array_equal(permute(some, 70_000, 5, 1), whole[some])


def excess(permutation: Any, count: int, draws: int) -> float:
    """Chi-square of all orders of `count`, in standard deviations above its mean."""
    counts = Counter(tuple(permutation(np.arange(count), count, seed, 1).tolist()) for seed in range(draws))
    freedom = math.factorial(count) - 1
    expected = draws / (freedom + 1)
    absent = (freedom + 1 - len(counts)) * expected
    chi_square = sum((n - expected) ** 2 / expected for n in counts.values()) + absent
    return float((chi_square - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_likely(count: int) -> None:
    assert abs(excess(shuffle, count, 6000)) < 5


def test_above_the_sorted_sizes_both_are_one() -> None:
    places = np.arange(1000)
    assert not np.array_equal(shuffle(places, SORTED, 3, 1), permute(places, SORTED, 3, 1))
    assert np.array_equal(shuffle(places, SORTED + 1, 3, 1), permute(places, SORTED + 1, 3, 1))


def test_where_a_sample_lands_is_uniform() -> None:
    count, draws = 100, 2000
    places = np.array([permute(np.array([17]), count, seed, 1)[0] for seed in range(draws)])
    expected = draws / count
    chi_square = ((np.bincount(places, minlength=count) - expected) ** 2 / expected).sum()
    assert chi_square < 99 + 5 * np.sqrt(2 * 99)


@pytest.mark.parametrize("permutation", [permute, shuffle])
@pytest.mark.parametrize("place", [-1, 10, 11])
def test_a_place_outside_is_an_error_and_no_endless_walk(place: int, permutation: Any) -> None:
    with pytest.raises(AssertionError, match="outside the permutation"):
        permutation(np.array([0, place]), 10, 0, 0)


def test_nothing_asked_is_nothing_found() -> None:
    assert permute(np.empty(0, np.int64), 10, 0, 0).tolist() == []


def test_the_numbers_are_frozen() -> None:
    """Every run so far saw its samples in this order: another formula would break `verify` and resuming."""
    assert permute(np.arange(8), 8, seed=0, epoch=1).tolist() == [6, 3, 0, 4, 7, 5, 2, 1]
    assert permute(np.arange(5), 1000, seed=42, epoch=3).tolist() == [912, 294, 942, 784, 523]
    assert permute(np.arange(3), 2**33, seed=42, epoch=3).tolist() == [4850807304, 7589483212, 1405206514]
    assert permutation.ROUNDS == 8
    assert shuffle(np.arange(8), 8, seed=0, epoch=1).tolist() == [2, 5, 0, 3, 1, 4, 6, 7]
    assert shuffle(np.arange(5), 1000, seed=42, epoch=3).tolist() == [488, 70, 491, 481, 663]
    assert SORTED == 65536
