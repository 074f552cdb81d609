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
    """Read random batches of `batch` samples for a moment; the first is not counted where there are more."""
    numbers = np.random.default_rng(0)
    took: list[tuple[float, float]] = []
    size = 0
    began = now()
    while len(took) < 2 or (now() - began < SECONDS and len(took) < MOST_BATCHES):
        rows = numbers.integers(len(source), size=batch)
        at, busy = now(), time.thread_time()
        arrays = to_tensors(source.fetch(rows, int(source.lengths(rows).max())), pin=False)
        took.append((now() - at, time.thread_time() - busy))
        size = sum(tensor.nbytes for tensor in arrays.values())
        if now() - began > SECONDS:
            break
    counted = took[1:] or took
    seconds, busy_seconds = (sum(parts) / len(counted) / batch for parts in zip(*counted, strict=True))
    return DataRate(
        sample_seconds=seconds, busy_seconds=min(seconds, busy_seconds), sample_bytes=size / batch
    )
