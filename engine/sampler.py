"""Which samples make up global batch `step`: a pure function of the recipe, holding no state.

Resuming is "start at step k", on any number of processes.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from engine.permutation import permute

LENGTH_WINDOW = 64
"""Batches sorted together where the recipe groups by length. Part of the recipe's meaning: do not change."""
_WINDOW_SEED = 0x5EED


@dataclass(frozen=True, eq=False)
class Sampler:
    """The order of samples. Every epoch is a permutation of the same subset; its last batch may be short."""

    count: int
    """Samples in the split."""
    batch_size: int
    """Global batch, in samples."""
    seed: int
    fraction: float = 1.0
    """Share of the samples used: a prefix of the permutation of epoch 0."""
    cohort: int = 1
    """Samples that stay together; batches hold whole cohorts."""
    lengths: np.ndarray | None = None
    """(count,) lengths, where batches are to hold samples of like length."""

    def __post_init__(self) -> None:
        assert self.count > 0
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
        places = permute(np.arange(start, min(stop, self.used)), self.used, self.seed, epoch + 1)
        return places if self.fraction == 1 else permute(places, self.count, self.seed, 0)

    def _batch_of_like_lengths(self, epoch: int, place: int) -> np.ndarray:
        """Samples are sorted by length within a window of batches, and the window's batches shuffled."""
        assert self.lengths is not None
        window, within = divmod(place, LENGTH_WINDOW)
        span = LENGTH_WINDOW * self.batch_size
        samples = self._samples(epoch, window * span, (window + 1) * span)
        samples = samples[np.argsort(self.lengths[samples], kind="stable")]
        batches = math.ceil(len(samples) / self.batch_size)
        full = batches if len(samples) % self.batch_size == 0 else batches - 1
        if within < full:  # a short last batch stays last
            within = int(
                permute(np.array([within]), full, self.seed + _WINDOW_SEED, epoch * 65537 + window)[0]
            )
        return samples[within * self.batch_size : (within + 1) * self.batch_size]


def chain(previous: str, samples: np.ndarray) -> str:
    """The hash over all samples seen so far: sixteen hex digits that name one order and no other."""
    data = np.ascontiguousarray(samples, dtype="<i8").tobytes()
    return hashlib.sha256(previous.encode() + data).hexdigest()[:16]
