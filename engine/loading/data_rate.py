"""How fast this machine reads samples: a few batches, fetched as a run would fetch them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isobatch.core.measures import now
from isobatch.engine.loading.device_copies import to_tensors

if TYPE_CHECKING:
    from isobatch.data.base import Source

SECONDS = 0.1
"""How long samples are read, unless one batch takes longer."""
MOST_BATCHES = 20
"""Where reading is so fast that a moment holds more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRate:
    """What a sample costs in one thread, on average."""

    sample_seconds: float
    """To fetch and pad it."""
    busy_seconds: float
    """The part of it that a core is busy; the rest waits for a disk or a network."""
    sample_bytes: float
    """In a batch, with padding."""


def measure_data_rate(source: Source, batch: int) -> DataRate:
    """Read random batches of `batch` samples for a moment, after one sample that imports and opens what it
    needs.
    """
    numbers = np.random.default_rng(0)
    _read(source, _some_rows(source, 1, numbers))
    seconds = busy = 0.0
    samples = size = 0
    while samples == 0 or (seconds < SECONDS and samples < MOST_BATCHES * batch):
        rows = _some_rows(source, batch, numbers)
        at, busy_at = now(), time.thread_time()
        size += _read(source, rows)
        seconds, busy = seconds + now() - at, busy + time.thread_time() - busy_at
        samples += batch
    return DataRate(
        sample_seconds=seconds / samples,
        busy_seconds=min(seconds, busy) / samples,
        sample_bytes=size / samples,
    )


def _some_rows(source: Source, count: int, numbers: np.random.Generator) -> np.ndarray:
    """Random rows; those of a group that a run would have here already, where samples are read by groups."""
    if source.groups is None:
        return numbers.integers(len(source), size=count)
    return np.arange(count) % int(source.groups[0])


def _read(source: Source, rows: np.ndarray) -> int:
    """Bytes of the batch of these samples."""
    arrays = to_tensors(source.fetch(rows, int(source.lengths(rows).max())), pin=False)
    return sum(tensor.nbytes for tensor in arrays.values())
