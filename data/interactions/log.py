"""A log of interactions on disk, in the order of the file; read in chunks, or user by user in buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isobatch.data.preparation.spooled_array import SpooledArray, SpooledColumns, chunks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

BUCKET_ROWS = 1 << 20
"""Interactions that are sorted at once."""


class InteractionArrays(NamedTuple):
    """Interactions as arrays (n,): numbers of users and items, times (0 where there are none), and rows."""

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    row: np.ndarray
    """The place in the log."""

    def take(self, rows: np.ndarray) -> InteractionArrays:
        """The interactions at these indices, or where this mask is true."""
        return InteractionArrays(*(column[rows] for column in self))


class InteractionLog:
    """Columns (n,) by name: `user` and `item` int32, and perhaps `time` and `rating`."""

    def __init__(self, columns: Mapping[str, np.ndarray], folder: Path | None) -> None:
        """`folder` takes temporary files."""
        self.columns, self.folder = dict(columns), folder
        self.user, self.item = self.columns["user"], self.columns["item"]

    @classmethod
    def collect(cls, chunks: Iterable[Mapping[str, np.ndarray]], folder: Path | None) -> InteractionLog:
        """The chunks one after the other; without any, no interactions."""
        spooled = SpooledColumns(folder)
        for chunk in chunks:
            spooled.add(chunk)
        empty = {"user": np.empty(0, np.int32), "item": np.empty(0, np.int32)}
        return cls(spooled.arrays() or empty, folder)

    def __len__(self) -> int:
        return len(self.user)

    def chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """Some rows of all columns at a time."""
        for values in chunks_of(*self.columns.values()):
            yield dict(zip(self.columns, values, strict=True))

    def where(self, kept: np.ndarray) -> InteractionLog:
        """The interactions of which `kept` (n,) is true."""

        def chunks() -> Iterator[dict[str, np.ndarray]]:
            start = 0
            for chunk in self.chunks():
                mask = kept[start : start + len(chunk["user"])]
                yield {name: values[mask] for name, values in chunk.items()}
                start += len(mask)

        return self if kept.all() else InteractionLog.collect(chunks(), self.folder)

    def counts(self, column: str, most: int) -> np.ndarray:
        """(most,) int64: interactions of each user or item."""
        found = np.zeros(most, np.int64)
        for (values,) in chunks_of(self.columns[column]):
            found += np.bincount(values, minlength=most)
        return found

    def by_user(self, users: int) -> Iterator[InteractionArrays]:
        """The interactions of some users at a time, users in order, each bucket in the order of the log."""
        last = np.cumsum(self.counts("user", users))
        buckets = _bucket_count(len(self))
        of_user = np.maximum(last - 1, 0) * buckets // max(1, len(self))
        return self._buckets(buckets, lambda chunk: of_user[chunk["user"]])

    def by_time(self) -> Iterator[InteractionArrays]:
        """The interactions of a stretch of time after the other, each bucket in the order of the log."""
        buckets = _bucket_count(len(self))
        sample = np.sort(self.columns["time"][:: max(1, len(self) // (buckets * 1000))])
        borders = sample[np.arange(1, buckets) * len(sample) // buckets]
        return self._buckets(buckets, lambda chunk: np.searchsorted(borders, chunk["time"], side="right"))

    def _buckets(
        self, count: int, bucket_of: Callable[[dict[str, np.ndarray]], np.ndarray]
    ) -> Iterator[InteractionArrays]:
        """The interactions of each bucket; they lie in temporary files meanwhile."""
        for spooled in self._scatter(count, bucket_of):
            found = spooled.array()
            yield InteractionArrays(*(np.array(found[name]) for name in InteractionArrays._fields))

    def _scatter(
        self, count: int, bucket_of: Callable[[dict[str, np.ndarray]], np.ndarray]
    ) -> list[SpooledArray]:
        time = self.columns["time"].dtype if "time" in self.columns else np.dtype(np.int64)
        dtype: Any = np.dtype([("user", np.int32), ("item", np.int32), ("time", time), ("row", np.int64)])
        spooled = [SpooledArray(dtype, self.folder) for _ in range(count)]
        start = 0
        for chunk in self.chunks():
            rows = np.zeros(len(chunk["user"]), dtype)
            for name in set(chunk) & set(rows.dtype.names):
                rows[name] = chunk[name]
            rows["row"] = np.arange(start, start + len(rows))
            start += len(rows)
            bucket = bucket_of(chunk)
            ends = np.cumsum(np.bincount(bucket, minlength=count))
            for number, part in enumerate(np.split(rows[np.argsort(bucket, kind="stable")], ends[:-1])):
                spooled[number].add(part)
        return spooled


def _bucket_count(rows: int) -> int:
    return -(-rows // BUCKET_ROWS) or 1
