"""The sampler: which samples make up global batch `step`, as a pure function of the recipe, without state.

Steps count from 0. So a run resumes at any step, on any number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.recipe import Recipe
from isobatch.data.base import Source
from isobatch.engine.loading.group_order import GroupOrder
from isobatch.engine.loading.permutation import shuffle

LENGTH_WINDOW = 64
"""Batches sorted together where the recipe groups by length. Another number changes what recipes mean."""
_WINDOW_SEED = 0x5EED
_BATCHES_AT_ONCE = 256
"""Batches that `batches` computes together: one by one they cost 30 times as much."""
_PART_SEED = 0x9A27


@dataclass(frozen=True, eq=False)
class Sampler:
    """The order of samples. Every epoch is a permutation of the same subset; its last batch may be short.

    With several sets, an epoch takes from each by its share, and continues in it where the previous epoch
    stopped: whatever the share, every sample of a set is used once before any is used again. (Grouping by
    length shuffles within its window.)
    """

    count: int
    """Samples in the split."""
    batch_size: int
    """Global batch, in samples."""
    seed: int
    fraction: float = 1.0
    """Share of the samples used: a prefix of the permutation of epoch 0."""
    cohort: int = 1
    """Samples that stay together; batches hold whole cohorts."""
    lengths: Callable[[np.ndarray], np.ndarray] | None = None
    """Sample numbers -> their lengths, where batches are to hold samples of like length."""
    parts: tuple[tuple[int, float], ...] = ()
    """(samples, share) of each set where the split is several sets in a row; shares of any sum."""
    groups: GroupOrder | None = None
    """The order by groups of neighbours, where the recipe has --order shards."""
    _window: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, init=False, repr=False)
    """(epoch, window) -> the samples sorted by length, of the window that was asked for last."""

    def __post_init__(self) -> None:
        assert self.count > 0
        assert not self.parts or sum(size for size, _ in self.parts) == self.count, "parts are all samples"
        assert self.batch_size % self.cohort == 0, "a batch holds whole cohorts"

    @property
    def used(self) -> int:
        """Samples per epoch."""
        return max(1, round(self.count * self.fraction)) if self.groups is None else self.groups.used

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the last may be of a short batch."""
        return math.ceil(self.used / self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """The samples of global batch `step`, (<= batch_size,) int64, in the recipe's order."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self.lengths is not None:
            return self._batch_of_like_lengths(epoch, number)
        return self._samples(epoch, number * self.batch_size, (number + 1) * self.batch_size)

    def batches(self, step: int = 0) -> Iterator[np.ndarray]:
        """Batches `step`, `step` + 1, ... without end; many are computed at once."""
        while True:
            epoch, number = divmod(step, self.steps_per_epoch)
            count = min(_BATCHES_AT_ONCE, self.steps_per_epoch - number)
            if self.lengths is not None:
                yield from (self.batch(step + k) for k in range(count))
            else:
                samples = self._samples(epoch, number * self.batch_size, (number + count) * self.batch_size)
                for k in range(count):
                    yield samples[k * self.batch_size : (k + 1) * self.batch_size]
            step += count

    def _samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions start..stop-1 of an epoch."""
        positions = np.arange(start, min(stop, self.used))
        if self.parts:
            return self._samples_of_sets(positions, epoch)
        if self.groups is not None:
            return self.groups.samples(positions, epoch)
        samples = shuffle(positions, self.used, self.seed, epoch + 1)
        return samples if self.fraction == 1 else shuffle(samples, self.count, self.seed, 0)

    def _samples_of_sets(self, positions: np.ndarray, epoch: int) -> np.ndarray:
        """The samples at these positions of an epoch, over which the samples of each set are spread evenly.

        Of every `left` positions a set takes `quota`; the others are divided among the sets after it.
        A set's draws are numbered in order over all epochs, so that a pass over it ends before the next.
        """
        samples = np.empty_like(positions)
        unfilled, left, offset = np.arange(len(positions)), self.used, 0
        for number, ((size, _), quota) in enumerate(zip(self.parts, self.quotas, strict=True)):
            before = _scale(positions, quota, left)
            taken = _scale(positions + 1, quota, left) > before
            draws = epoch * quota + before[taken]
            seed = self.seed + _PART_SEED * (number + 1)
            samples[unfilled[taken]] = offset + self._draws_of_set(draws, size, seed)
            unfilled, positions = unfilled[~taken], (positions - before)[~taken]
            left, offset = left - quota, offset + size
            if not left:
                break
        return samples

    def _draws_of_set(self, draws: np.ndarray, size: int, seed: int) -> np.ndarray:
        """The samples of a set of `size` at these draws: each pass permutes the used part of the set."""
        used = max(1, round(size * self.fraction))
        passes, positions = np.divmod(draws, used)
        samples = np.empty_like(positions)
        for number in np.unique(passes).tolist():
            inside = passes == number
            samples[inside] = shuffle(positions[inside], used, seed, number + 1)
        return samples if self.fraction == 1 else shuffle(samples, size, seed, 0)

    @property
    def quotas(self) -> list[int]:
        """Samples of each set in an epoch: whole numbers by the largest remainder method."""
        total = math.fsum(share for _, share in self.parts)  # they need not sum to one
        wanted = [self.used * share / total for _, share in self.parts]
        found = [math.floor(w) for w in wanted]
        by_loss = sorted(range(len(wanted)), key=lambda k: found[k] - wanted[k])
        for k in by_loss[: self.used - sum(found)]:
            found[k] += 1
        return found

    def _batch_of_like_lengths(self, epoch: int, number: int) -> np.ndarray:
        """Samples are sorted by length within a window of batches, and the window's batches are shuffled."""
        assert self.lengths is not None
        window, within = divmod(number, LENGTH_WINDOW)
        if (samples := self._window.get((epoch, window))) is None:
            span = LENGTH_WINDOW * self.batch_size
            samples = self._samples(epoch, window * span, (window + 1) * span)
            samples = samples[order_by_length(self.lengths(samples))]
            self._window.clear()
            self._window[epoch, window] = samples
        full = len(samples) // self.batch_size
        if within < full:  # a short last batch stays last
            key = self.seed + _WINDOW_SEED, epoch * 65537 + window
            within = int(shuffle(np.array([within]), full, *key)[0])
        return samples[within * self.batch_size : (within + 1) * self.batch_size]


def make_sampler(recipe: Recipe, source: Source, cohort: int) -> Sampler:
    """The sampler of a recipe's training samples.

    Raises UserError where several sets are mixed but the task needs cohorts, or a set's share has no sample.
    """
    lengths = source.lengths if recipe.group_by_length else None
    parts = source.parts
    if parts and cohort > 1:
        why = f"this task computes {cohort} samples together"
        raise UserError(f"--data {recipe.data}: {why}, so that it takes one set")
    groups = None
    if recipe.order != "rows":
        assert source.groups is not None, "data with has_groups opens sources with groups"
        groups = GroupOrder(source.groups, recipe.shuffle_window, recipe.seed, recipe.train_fraction)
    sampler = Sampler(
        len(source), recipe.batch_size, recipe.seed, recipe.train_fraction, cohort, lengths, parts, groups
    )
    if parts and 0 in sampler.quotas:
        raise UserError(
            f"--mix {','.join(f'{share:g}' for _, share in parts)}: of the {sampler.used:,} samples of an"
            f" epoch set {sampler.quotas.index(0) + 1} would have none: raise its share"
        )
    return sampler


def order_by_length(lengths: np.ndarray) -> np.ndarray:
    """Places of the lengths in ascending order; equal ones as they come. Lengths of 16 bits by radix sort."""
    return np.argsort(lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths, kind="stable")


def _scale(numbers: np.ndarray, factor: int, divisor: int) -> np.ndarray:
    """numbers * factor // divisor of numbers up to `divisor`, exactly: a product may be beyond int64."""
    if factor * divisor < 1 << 63:
        return numbers * factor // divisor
    return (numbers.astype(object) * factor // divisor).astype(np.int64)
