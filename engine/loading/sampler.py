"""Which samples make up global batch `step`: a pure function of the recipe, holding no state.

Resuming is "start at step k", on any number of processes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from isobatch.engine.loading.permutation import permute

LENGTH_WINDOW = 64
"""Batches sorted together where the recipe groups by length. Part of the recipe's meaning: do not change."""
_WINDOW_SEED = 0x5EED
_PART_SEED = 0x9A27


@dataclass(frozen=True, eq=False)
class Sampler:
    """The order of samples. Every epoch is a permutation of the same subset; its last batch may be short.

    Of several sets an epoch takes each by its share, and goes on in it where the epoch before stopped: every
    sample of a set comes once before any comes twice, whatever the share. (Grouping by length shuffles within
    its window.)
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
    """(samples, share) of each set where several lie end to end; shares of any sum."""

    def __post_init__(self) -> None:
        assert self.count > 0
        assert not self.parts or sum(size for size, _ in self.parts) == self.count, "parts are all samples"
        assert self.batch_size % self.cohort == 0, "a batch holds whole cohorts"

    @property
    def used(self) -> int:
        """Samples per epoch."""
        return max(1, round(self.count * self.fraction))

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.used / self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """The samples of global batch `step`, (<= batch_size,) int64, in the recipe's order."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if self.lengths is not None:
            return self._batch_of_like_lengths(epoch, place)
        return self._samples(epoch, place * self.batch_size, (place + 1) * self.batch_size)

    def _samples(self, epoch: int, start: int, stop: int) -> np.ndarray:
        places = np.arange(start, min(stop, self.used))
        if self.parts:
            return self._samples_of_parts(places, epoch)
        places = permute(places, self.used, self.seed, epoch + 1)
        return places if self.fraction == 1 else permute(places, self.count, self.seed, 0)

    def _samples_of_parts(self, places: np.ndarray, epoch: int) -> np.ndarray:
        """The samples at these places of an epoch, over which each set's are spread evenly.

        A set's turns come in order, so that no pass over it begins before the last has ended. Of every `left`
        places the set takes `quota`; the places it leaves are divided among the sets behind it.
        """
        samples = np.empty_like(places)
        open_, left, offset = np.arange(len(places)), self.used, 0
        for number, ((size, _), quota) in enumerate(zip(self.parts, self.quotas, strict=True)):
            before = places * quota // left
            mine = (places + 1) * quota // left > before
            turns = epoch * quota + before[mine]
            samples[open_[mine]] = offset + self._turns(turns, size, self.seed + _PART_SEED * (number + 1))
            open_, places = open_[~mine], (places - before)[~mine]
            left, offset = left - quota, offset + size
            if not left:
                break
        return samples

    def _turns(self, turns: np.ndarray, size: int, seed: int) -> np.ndarray:
        """What a set of `size` samples gives at these turns: pass after pass over all that is used of it."""
        used = max(1, round(size * self.fraction))
        passes, places = np.divmod(turns, used)
        samples = np.empty_like(places)
        for number in np.unique(passes).tolist():
            mine = passes == number
            samples[mine] = permute(places[mine], used, seed, number + 1)
        return samples if self.fraction == 1 else permute(samples, size, seed, 0)

    @property
    def quotas(self) -> list[int]:
        """Samples of each set in an epoch."""
        return divide_by_shares([share for _, share in self.parts], self.used)

    def _batch_of_like_lengths(self, epoch: int, place: int) -> np.ndarray:
        """Samples are sorted by length within a window of batches, and the window's batches shuffled."""
        assert self.lengths is not None
        window, within = divmod(place, LENGTH_WINDOW)
        span = LENGTH_WINDOW * self.batch_size
        samples = self._samples(epoch, window * span, (window + 1) * span)
        samples = samples[np.argsort(self.lengths(samples), kind="stable")]
        batches = math.ceil(len(samples) / self.batch_size)
        full = batches if len(samples) % self.batch_size == 0 else batches - 1
        if within < full:  # a short last batch stays last
            within = int(
                permute(np.array([within]), full, self.seed + _WINDOW_SEED, epoch * 65537 + window)[0]
            )
        return samples[within * self.batch_size : (within + 1) * self.batch_size]


def divide_by_shares(shares: Sequence[float], count: int) -> list[int]:
    """`count` divided by shares: rounded down, and the rest to those that lost most (largest remainder)."""
    wanted = [count * share / math.fsum(shares) for share in shares]
    found = [math.floor(w) for w in wanted]
    by_loss = sorted(range(len(shares)), key=lambda k: found[k] - wanted[k])
    for k in by_loss[: count - sum(found)]:
        found[k] += 1
    return found


def extend_chain(previous: str, samples: np.ndarray) -> str:
    """The hash over all samples seen so far: sixteen hex digits that name one order and no other."""
    data = np.ascontiguousarray(samples, dtype="<i8").tobytes()
    return hashlib.sha256(previous.encode() + data).hexdigest()[:16]
