"""Tests of engine/loading/sampler.py: every sample once an epoch, batches computed from the step alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.engine.loading.permutation import shuffle
from isobatch.engine.loading.sampler import LENGTH_WINDOW, Sampler
from isobatch.engine.train.figures import extend_chain


def by_number(lengths: np.ndarray | None) -> Any:
    """What a source answers for sample numbers."""
    return None if lengths is None else lambda indices: lengths[indices]


def epoch(sampler: Sampler, number: int) -> list[np.ndarray]:
    first = number * sampler.steps_per_epoch
    return [sampler.batch(step) for step in range(first, first + sampler.steps_per_epoch)]


@given(st.integers(1, 500), st.integers(1, 64), st.integers(0, 2**63 - 1), st.integers(0, 3), st.booleans())
def test_every_sample_comes_once_an_epoch(count: int, size: int, seed: int, number: int, like: bool) -> None:
    lengths = np.random.default_rng(0).integers(1, 50, count) if like else None
    batches = epoch(Sampler(count, size, seed, lengths=by_number(lengths)), number)
    assert np.array_equal(np.sort(np.concatenate(batches)), np.arange(count))
    assert [len(b) for b in batches[:-1]] == [size] * (len(batches) - 1)
    assert len(batches[-1]) == count - size * (len(batches) - 1)  # the last is kept, with what is left


def test_a_fraction_is_a_prefix_of_the_permutation_of_epoch_0_and_stays() -> None:
    sampler = Sampler(100, 8, seed=5, fraction=0.3)
    subset = set(shuffle(np.arange(30), 100, 5, 0).tolist())
    for number in range(3):
        assert set(np.concatenate(epoch(sampler, number)).tolist()) == subset
    more = Sampler(100, 8, seed=5, fraction=0.6)
    assert subset < set(np.concatenate(epoch(more, 0)).tolist())  # more data holds the less


def test_a_batch_is_a_function_of_the_step_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 1000)
    forwards = [Sampler(1000, 24, 3, 0.7, lengths=by_number(lengths)).batch(k) for k in range(90)]
    fresh = Sampler(1000, 24, 3, 0.7, lengths=by_number(lengths))
    for step in reversed(range(90)):  # as a resumed run would: begin anywhere
        assert np.array_equal(fresh.batch(step), forwards[step])


def spread(batches: list[np.ndarray], lengths: np.ndarray) -> float:
    return float(np.mean([np.ptp(lengths[b]) for b in batches]))


def test_grouping_by_length_gives_batches_of_like_length_in_mixed_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 3000)
    plain, like = Sampler(3000, 16, 0), Sampler(3000, 16, 0, lengths=by_number(lengths))
    assert spread(epoch(like, 0), lengths) < spread(epoch(plain, 0), lengths) / 10
    means = np.array([lengths[b].mean() for b in epoch(like, 0)[:LENGTH_WINDOW]])
    # In order of length the correlation would be 1; 5 standard errors of chance is 5 / sqrt(64).
    assert abs(np.corrcoef(means, np.arange(LENGTH_WINDOW))[0, 1]) < 5 / np.sqrt(LENGTH_WINDOW)
    assert not np.array_equal(np.concatenate(epoch(like, 0)), np.concatenate(epoch(like, 1)))


def test_a_batch_holds_whole_cohorts() -> None:
    Sampler(100, 24, 0, cohort=8)
    with pytest.raises(AssertionError, match="whole cohorts"):
        Sampler(100, 20, 0, cohort=8)


SETS = st.lists(st.tuples(st.integers(1, 60), st.floats(0.05, 20)), min_size=1, max_size=4)


def mixed(sets: list[tuple[int, float]], size: int = 7, seed: int = 0, fraction: float = 1.0) -> Sampler:
    return Sampler(sum(n for n, _ in sets), size, seed, fraction, parts=tuple(sets))


def of_set(sampler: Sampler, number: int, samples: np.ndarray) -> np.ndarray:
    """Those of one set, as numbers in it."""
    start = sum(size for size, _ in sampler.parts[:number])
    mine = (samples >= start) & (samples < start + sampler.parts[number][0])
    return samples[mine] - start


@given(SETS, st.integers(1, 20), st.integers(0, 2**63 - 1), st.sampled_from([1.0, 0.6, 0.1]))
def test_every_sample_of_a_set_comes_once_before_any_comes_twice(
    sets: list[tuple[int, float]], size: int, seed: int, fraction: float
) -> None:
    sampler = mixed(sets, size, seed, fraction)
    batches = [batch for number in range(4) for batch in epoch(sampler, number)]
    for number, (count, _) in enumerate(sets):
        used = max(1, round(count * fraction))
        order = np.concatenate([of_set(sampler, number, batch) for batch in batches])
        assert len(order) == 4 * sampler.quotas[number]
        passes = [order[start : start + used] for start in range(0, len(order), used)]
        for one in passes:
            assert len(set(one.tolist())) == len(one)
            assert set(one.tolist()) <= set(passes[0].tolist())


@given(SETS, st.integers(1, 40))
def test_every_batch_has_the_shares(sets: list[tuple[int, float]], size: int) -> None:
    sampler = mixed(sets, size)
    for batch in epoch(sampler, 0):
        for number, quota in enumerate(sampler.quotas):
            wanted = len(batch) * quota / sampler.used
            # Dividing what is left among the sets behind may cost each of them one more place.
            assert abs(len(of_set(sampler, number, batch)) - wanted) <= 1 + number


def test_the_chain_names_one_order() -> None:
    one = extend_chain(extend_chain("", np.array([1, 2])), np.array([3]))
    assert one == extend_chain(extend_chain("", np.array([1, 2], np.int32)), np.array([3], np.uint16))
    others = [
        extend_chain(extend_chain("", np.array([2, 1])), np.array([3])),
        extend_chain(extend_chain("", np.array([3])), np.array([1, 2])),
        extend_chain("", np.array([1, 2, 3])),
        extend_chain(extend_chain("", np.array([1, 2])), np.array([4])),
    ]
    assert one not in others
    assert len({*others, one}) == 5
    assert len(one) == 16


def test_the_order_is_frozen() -> None:
    """Every run sees its samples in this order."""
    assert Sampler(93, 6, seed=0).batch(20).tolist() == [47, 3, 4, 69, 11, 77]
    assert Sampler(93, 6, seed=0, fraction=0.5).batch(20).tolist() == [17, 80, 71, 16, 27, 32]
    like = Sampler(93, 6, seed=0, lengths=by_number(np.arange(93) % 7))
    assert like.batch(20).tolist() == [25, 88, 81, 32, 18, 39]
    parts = ((33, 0.7), (60, 0.3))
    assert Sampler(93, 6, seed=0, parts=parts).batch(20).tolist() == [1, 25, 79, 7, 12, 92]
    assert extend_chain("", np.arange(3)) == "ab25350e3e65efeb"
