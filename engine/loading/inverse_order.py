"""The sampler backwards: the steps whose global batch holds a sample, without walking through the order.

Each epoch costs the inverse of a permutation at one entry. Grouped by length, it costs the samples of the
window that the sample falls into as well, because those are sorted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from isobatch.engine.loading.permutation import unshuffle
from isobatch.engine.loading.sampler import LENGTH_WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.engine.loading.sampler import Sampler


def steps_with(sampler: Sampler, sample: int, steps: int) -> list[int]:
    """The steps, of the first `steps`, whose batch holds a sample; ascending, a step for each time."""
    assert 0 <= sample < sampler.count
    epochs = math.ceil(steps / sampler.steps_per_epoch)
    places = _places_in_sets(sampler, sample, epochs) if sampler.parts else _places(sampler, sample, epochs)
    if sampler.lengths is None:
        found = (_step(sampler, epoch, position // sampler.batch_size) for epoch, position in places)
    else:
        span = LENGTH_WINDOW * sampler.batch_size
        windows = {(epoch, position // span) for epoch, position in places}
        found = (step for window in windows for step in _steps_of_window(sampler, sample, *window))
    return sorted(step for step in found if step < steps)


def is_used(sampler: Sampler, sample: int) -> bool:
    """Whether a sample belongs to the `fraction` of the samples that is trained on."""
    if sampler.groups is not None:
        return sampler.groups.is_used(sample)
    return _rank(sampler, *_place_of_sample(sampler, sample)[1:]) is not None


def _step(sampler: Sampler, epoch: int, batch: int) -> int:
    return epoch * sampler.steps_per_epoch + batch


def _inverse(entry: int, count: int, seed: int, epoch: int) -> int:
    """Where the permutation of range(count) named by (seed, epoch) gives this entry."""
    return int(unshuffle(np.array([entry]), count, seed, epoch)[0])


def _rank(sampler: Sampler, sample: int, count: int, seed: int) -> int | None:
    """A sample's number among those of `count` that are used; None where it is not."""
    if sampler.fraction == 1:
        return sample
    rank = _inverse(sample, count, seed, 0)
    return rank if rank < _used(sampler, count) else None


def _used(sampler: Sampler, count: int) -> int:
    return max(1, round(count * sampler.fraction))


def _places(sampler: Sampler, sample: int, epochs: int) -> Iterator[tuple[int, int]]:
    """(epoch, position in it) of a sample: once an epoch."""
    if sampler.groups is not None:
        if sampler.groups.is_used(sample):
            yield from ((epoch, sampler.groups.position(sample, epoch)) for epoch in range(epochs))
        return
    if (rank := _rank(sampler, sample, sampler.count, sampler.seed)) is not None:
        for epoch in range(epochs):
            yield epoch, _inverse(rank, sampler.used, sampler.seed, epoch + 1)


def _places_in_sets(sampler: Sampler, sample: int, epochs: int) -> Iterator[tuple[int, int]]:
    """(epoch, position in it) of a sample of one of several sets: once in each pass over its set."""
    number, local, size, seed = _place_of_sample(sampler, sample)
    used, quota = _used(sampler, size), sampler.quotas[number]
    if (rank := _rank(sampler, local, size, seed)) is None:
        return
    for one in range(-(-epochs * quota // used)):
        draw = one * used + _inverse(rank, used, seed, one + 1)
        epoch, within = divmod(draw, quota)
        if epoch < epochs:
            yield epoch, _position_of_draw(sampler, number, within)


def _place_of_sample(sampler: Sampler, sample: int) -> tuple[int, int, int, int]:
    """(number of its set, number in it, size of the set, seed of the set's permutations)."""
    if not sampler.parts:
        return 0, sample, sampler.count, sampler.seed
    offset = 0
    for number, (size, _) in enumerate(sampler.parts):
        if sample < offset + size:
            return number, sample - offset, size, sampler.seed_of_set(number)
        offset += size
    raise AssertionError("a sample of no set")


def _position_of_draw(sampler: Sampler, number: int, draw: int) -> int:
    """The position in an epoch of a set's draw: `Sampler._samples_of_sets` backwards.

    Of `left` positions a set takes position x where (x + 1) * quota // left exceeds x * quota // left. So its
    draw d is at ceil((d + 1) * left / quota) - 1, and what it leaves over at place k is at
    k * left // (left - quota).
    """
    quotas = sampler.quotas
    left = [sampler.used - sum(quotas[:k]) for k in range(number + 1)]
    position = -(-(draw + 1) * left[number] // quotas[number]) - 1
    for earlier in reversed(range(number)):
        position = position * left[earlier] // (left[earlier] - quotas[earlier])
    return position


def _steps_of_window(sampler: Sampler, sample: int, epoch: int, window: int) -> Iterator[int]:
    """The steps of a window of batches, sorted by length and then shuffled, that hold a sample."""
    samples = sampler.sorted_window(epoch, window)
    whole = len(samples) // sampler.batch_size
    for place in np.flatnonzero(samples == sample).tolist():
        batch = place // sampler.batch_size
        if batch < whole:
            batch = _inverse(batch, whole, *sampler.window_key(epoch, window))
        yield _step(sampler, epoch, window * LENGTH_WINDOW + batch)
