"""Tests of engine/loading/group_order.py: the order of --order shards, from the sizes of the groups."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isobatch.core.errors import UserError
from isobatch.engine.loading.group_order import GroupOrder
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.registry import complete

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


def sampler(sizes: list[int], window: int, batch: int, seed: int, fraction: float = 1.0) -> Sampler:
    groups = GroupOrder(np.array(sizes), window, seed, fraction)
    return Sampler(sum(sizes), batch, seed, fraction, groups=groups)


@given(SIZES, st.integers(1, 14), st.integers(1, 50), st.integers(0, 2**63 - 1), st.sampled_from([1.0, 0.5]))
def test_an_epoch_has_every_sample_once(
    sizes: list[int], window: int, batch: int, seed: int, fraction: float
) -> None:
    made = sampler(sizes, window, batch, seed, fraction)
    per_epoch = made.steps_per_epoch
    batches = [made.batch(step) for step in range(2 * per_epoch)]
    used = sorted(np.concatenate(batches[:per_epoch]).tolist())
    assert len(used) == len(set(used)) == made.used
    for epoch in (batches[:per_epoch], batches[per_epoch:]):
        assert sorted(np.concatenate(epoch).tolist()) == used
        assert {len(one) for one in epoch[:-1]} <= {batch}  # only the last is short


def test_a_step_needs_the_groups_of_its_window_only() -> None:
    sizes = [7, 30, 1, 12, 25, 9, 18, 3, 40, 11]
    made = sampler(sizes, window=3, batch=4, seed=5)
    group_of = np.repeat(np.arange(len(sizes)), sizes)
    order = group_of[np.concatenate([made.batch(step) for step in range(made.steps_per_epoch)])]
    first = [int(np.flatnonzero(order == group)[0]) for group in range(len(sizes))]
    last = [int(np.flatnonzero(order == group)[-1]) for group in range(len(sizes))]
    by_beginning = np.argsort(first)
    windows = [set(by_beginning[at : at + 3].tolist()) for at in range(0, len(sizes), 3)]
    for earlier, later in itertools.pairwise(windows):
        assert max(last[g] for g in earlier) < min(first[g] for g in later)
    assert len({tuple(order[a:b]) for a, b in ((0, 20), (20, 40))}) == 2
    runs = 1 + int((np.diff(order) != 0).sum())
    assert runs > 3 * len(sizes), "the samples of a window are mixed"


def test_the_order_is_frozen() -> None:
    """Recipes of earlier versions mean this."""
    made = sampler([5, 3, 8, 4], window=2, batch=7, seed=3)
    found = [made.batch(step).tolist() for step in range(6)]
    assert found == [
        [4, 16, 17, 19, 2, 0, 18],
        [1, 3, 9, 5, 10, 11, 14],
        [7, 6, 13, 12, 8, 15],
        [18, 19, 17, 7, 6, 16, 5],
        [0, 4, 8, 14, 11, 12, 3],
        [1, 15, 2, 9, 10, 13],
    ]


def test_data_in_a_store_is_ordered_by_shards() -> None:
    asked = {"data": "s3://bucket/*.parquet"}
    assert complete("causal-lm", asked)[0].order == "shards"
    assert complete("causal-lm", {**asked, "order": "rows"})[0].order == "rows"
    local = complete("causal-lm", {"data": "demo"})[0]
    assert local.order == "rows"
    shuffled = dataclasses.replace(complete("causal-lm", asked)[0], shuffle_window=7)
    assert shuffled.hash() != complete("causal-lm", asked)[0].hash()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"data": "demo", "order": "shards"}, "--order shards: all of the data is on this machine"),
        (
            {"data": "s3://bucket/a.jsonl", "order": "rows", "shuffle_window": 4},
            "--shuffle-window 4: it is that of --order shards; leave it out",
        ),
    ],
)
def test_what_has_no_effect_is_refused(asked: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        complete("causal-lm", asked)
