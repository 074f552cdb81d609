"""Tests of engine/loading/inverse_order.py and the inverses of permutation.py: where a sample came."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.engine.loading.inverse_order import is_used, steps_with
from isobatch.engine.loading.permutation import SORTED, permute, shuffle, unpermute, unshuffle
from isobatch.engine.loading.sampler import LENGTH_WINDOW, Sampler

SIZES = [*range(1, 40), 255, 256, 257, 4095, 4096, 10_007, SORTED, SORTED + 1, 300_000]
HUGE = 10**10


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("forwards", "backwards"), [(permute, unpermute), (shuffle, unshuffle)])
def test_the_inverse_undoes_the_permutation(size: int, forwards: Any, backwards: Any) -> None:
    places = np.unique(np.linspace(0, size - 1, 3000).astype(np.int64))
    for seed, epoch in ((0, 0), (2**63 - 1, 7)):
        entries = forwards(places, size, seed, epoch)
        assert np.array_equal(backwards(entries, size, seed, epoch), places)


@given(st.integers(1 << 16, 1 << 52), st.integers(0, 2**63 - 1), st.integers(0, 99), st.data())
def test_the_inverse_of_any_size(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    places = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5)))
    assert np.array_equal(unpermute(permute(places, size, seed, epoch), size, seed, epoch), places)


def walked(sampler: Sampler, steps: int) -> dict[int, list[int]]:
    """Sample -> steps, from the batches themselves."""
    found: dict[int, list[int]] = defaultdict(list)
    for step in range(steps):
        for sample in sampler.batch(step).tolist():
            found[sample].append(step)
    return found


SETS = st.lists(st.tuples(st.integers(1, 60), st.floats(0.05, 20)), max_size=4)


@given(
    SETS,
    st.integers(1, 150),
    st.integers(1, 40),
    st.integers(0, 2**63 - 1),
    st.sampled_from([1.0, 0.6, 0.1]),
    st.booleans(),
    st.integers(1, 40),
)
def test_the_steps_are_those_whose_batches_hold_the_sample(
    sets: list[tuple[int, float]],
    count: int,
    size: int,
    seed: int,
    fraction: float,
    like: bool,
    steps: int,
) -> None:
    count = sum(n for n, _ in sets) or count
    lengths = np.random.default_rng(0).integers(1, 50, count)
    by_number = (lambda numbers: lengths[numbers]) if like else None
    sampler = Sampler(count, size, seed, fraction, lengths=by_number, parts=tuple(sets))
    if sets and 0 in sampler.quotas:  # refused by make_sampler
        return
    expected = walked(sampler, steps)
    for sample in range(count):
        assert steps_with(sampler, sample, steps) == expected[sample]
        assert is_used(sampler, sample) or not expected[sample]


@pytest.mark.parametrize("like", [False, True])
def test_a_thousand_samples_of_many_windows_and_epochs(like: bool) -> None:
    count, size = LENGTH_WINDOW * 16 * 3 + 5, 16
    lengths = np.random.default_rng(0).integers(1, 500, count)
    sampler = Sampler(count, size, 3, 0.9, lengths=(lambda n: lengths[n]) if like else None)
    steps = round(2.5 * sampler.steps_per_epoch)
    expected = walked(sampler, steps)
    for sample in np.random.default_rng(1).choice(count, 1000, replace=False).tolist():
        assert steps_with(sampler, sample, steps) == expected[sample]


def test_a_sample_outside_the_fraction_is_never_seen() -> None:
    sampler = Sampler(1000, 10, 0, fraction=0.25)
    used = set(np.concatenate([sampler.batch(step) for step in range(sampler.steps_per_epoch)]).tolist())
    assert {sample for sample in range(1000) if is_used(sampler, sample)} == used
    assert len(used) == 250


def test_a_huge_mixture_is_mixed_exactly() -> None:
    """Position times quota is beyond int64 here."""
    sampler = Sampler(HUGE, 64, 7, parts=((4 * 10**9, 0.5), (6 * 10**9, 0.5)))
    for step in (0, sampler.steps_per_epoch - 1):
        batch = sampler.batch(step)
        assert 31 <= (batch < 4 * 10**9).sum() <= 33
        assert all(step in steps_with(sampler, sample, sampler.steps_per_epoch) for sample in batch.tolist())


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_ten_thousand_million_samples_are_answered_at_once(fraction: float) -> None:
    """In closed form: nothing of the order's length is made."""
    sampler = Sampler(HUGE, 4096, 7, fraction)
    steps = 3 * sampler.steps_per_epoch
    chosen = [int(sampler.batch(step)[17]) for step in (0, 1_000_000, steps - 2)]
    began = time.perf_counter()
    found = [steps_with(sampler, sample, steps) for sample in chosen]
    assert time.perf_counter() - began < 1
    for sample, seen in zip(chosen, found, strict=True):
        assert len(seen) == 3  # once an epoch
        assert all(sample in sampler.batch(step) for step in seen)
