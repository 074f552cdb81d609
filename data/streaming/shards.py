"""Shards as they lie in a store, cut into groups of neighbouring rows, each read by one range of bytes.

A group is so many row groups of a Parquet file, or so many whole lines, that it has GROUP_BYTES; a compressed
file of lines is one group, because it can only be read from its beginning.
"""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import TrainingError, UserError
from isobatch.data.streaming import locations
from isobatch.data.streaming.store import ObjectFile, Store, StoredObject

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from pyarrow.parquet import FileMetaData, ParquetFile

GROUP_BYTES = 2 << 20
"""Bytes of a group, of Parquet those of the columns that are read. Another number is another order."""
USUAL_COMPRESSION = 3
"""Of text by gzip."""
Rows = list[dict[str, Any]]


class Extent(NamedTuple):
    """Where a group lies in its shard: bytes of lines, or numbers of a Parquet file's row groups."""

    start: int
    stop: int


def shard_of(store: Store, stored: StoredObject) -> Shard:
    """The shard that an object is."""
    kinds: dict[str, type[Lines] | type[ParquetShard]] = {
        "parquet": ParquetShard,
        "jsonl": Lines,
        "jsonl.gz": GzippedLines,
    }
    return kinds[locations.file_format(stored.address) or ""](store, stored)


class Shard(ABC):
    """An object that holds rows. Threads may read its groups at the same time."""

    compared = False
    """Whether the store was asked if it is still the object that was indexed."""

    def __init__(self, store: Store, stored: StoredObject) -> None:
        self.store, self.stored = store, stored

    @abstractmethod
    def groups(self, columns: Sequence[str] | None) -> Iterator[tuple[Extent, Rows]]:
        """Its groups from the first to the last, with their rows; `columns` None: all."""

    @abstractmethod
    def rows(self, extent: Extent, columns: Sequence[str] | None) -> Rows:
        """The rows of a group."""

    @abstractmethod
    def columns(self) -> list[str]:
        """The names of its columns, of lines those of the first; none where it has no rows."""

    def largest_group(self, columns: Sequence[str] | None) -> int:  # noqa: ARG002  of Parquet alone
        """Bytes of its largest group, about."""
        return min(GROUP_BYTES, self.stored.size)

    def _require(self, columns: Sequence[str] | None, there: Collection[str]) -> None:
        """Raise UserError where a column is not there: other shards may have it."""
        for name in columns or () if there else ():
            if name not in there:
                raise UserError(
                    f"{self.stored.address} has no column {name}, and the first object has; it has:"
                    f" {', '.join(sorted(there)[:20])}"
                )


class Room:
    """Memory, in bytes, that threads share: who needs more than is free waits."""

    def __init__(self, size: int) -> None:
        self._size, self._taken, self._changed = size, 0, threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Take so much for the block; more than there is at all, when nobody else has any."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + size <= self._size)
            self._taken += size
        try:
            yield
        finally:
            with self._changed:
                self._taken -= size
                self._changed.notify_all()


class Lines(Shard):
    """A file of JSON objects, one a line. All columns are given: what is not read is counted."""

    def groups(self, columns: Sequence[str] | None) -> Iterator[tuple[Extent, Rows]]:
        start = 0
        while start < self.stored.size:
            block = self._lines_from(start)
            extent = Extent(start, start + len(block))
            rows = self._parse(block, start)
            if start == 0:
                self._require(columns, {name for row in rows for name in row})
            yield extent, rows
            start = extent.stop

    def rows(self, extent: Extent, columns: Sequence[str] | None) -> Rows:  # noqa: ARG002
        return self._parse(self._read(*extent), extent.start)

    def columns(self) -> list[str]:
        _, rows = next(self.groups(None), (None, []))
        return list(rows[0]) if rows else []

    def _read(self, start: int, stop: int) -> bytes:
        return self.store.read(self.stored.address, start, stop)

    def _lines_from(self, start: int) -> bytes:
        """Whole lines of about GROUP_BYTES, or all that is left."""
        stop = min(self.stored.size, start + GROUP_BYTES)
        block = self._read(start, stop)
        while stop < self.stored.size and b"\n" not in block:
            more = min(self.stored.size, stop + GROUP_BYTES)
            block, stop = block + self._read(stop, more), more
        return block if stop == self.stored.size else block[: block.rfind(b"\n") + 1]

    def _parse(self, block: bytes, start: int) -> Rows:
        rows: Rows = []
        offset = start
        for line in block.split(b"\n"):
            if line.strip():
                rows.append(_record(line, f"{self.stored.address} byte {offset:,}"))
            offset += len(line) + 1
        return rows


class GzippedLines(Lines):
    """The same, compressed."""

    def groups(self, columns: Sequence[str] | None) -> Iterator[tuple[Extent, Rows]]:
        extent = Extent(0, self.stored.size)
        rows = self.rows(extent, None)
        self._require(columns, {name for row in rows for name in row})
        yield extent, rows

    def largest_group(self, columns: Sequence[str] | None) -> int:  # noqa: ARG002
        return USUAL_COMPRESSION * self.stored.size

    def rows(self, extent: Extent, columns: Sequence[str] | None) -> Rows:  # noqa: ARG002
        try:
            return self._parse(gzip.decompress(self._read(*extent)), 0)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise TrainingError(f"{self.stored.address}: is no whole gzip file: {error}") from None


class ParquetShard(Shard):
    """A Parquet file, of which only the columns that are asked for are read."""

    _metadata: FileMetaData | None = None

    def groups(self, columns: Sequence[str] | None) -> Iterator[tuple[Extent, Rows]]:
        for extent in self._extents(columns):
            yield extent, self.rows(extent, columns)

    def rows(self, extent: Extent, columns: Sequence[str] | None) -> Rows:
        with self._explained(), self._open() as file:
            rows: Rows = file.read_row_groups(range(*extent), columns=columns).to_pylist()
            return rows

    def columns(self) -> list[str]:
        with self._explained(), self._open() as file:
            names: list[str] = file.schema_arrow.names
            return names

    def _extents(self, columns: Sequence[str] | None) -> Iterator[Extent]:
        """Consecutive row groups that together have GROUP_BYTES."""
        with self._explained(), self._open() as file:
            metadata = file.metadata
            self._require(columns, file.schema_arrow.names)
        start = size = 0
        for number in range(metadata.num_row_groups):
            size += _row_group_bytes(metadata, number, columns)
            if size >= GROUP_BYTES or number == metadata.num_row_groups - 1:
                yield Extent(start, number + 1)
                start, size = number + 1, 0

    def largest_group(self, columns: Sequence[str] | None) -> int:
        with self._explained(), self._open() as file:
            metadata = file.metadata
        sizes = (_row_group_bytes(metadata, n, columns) for n in range(metadata.num_row_groups))
        return max(GROUP_BYTES, *sizes, 0)

    def _open(self) -> ParquetFile:
        """A file for one thread, with the metadata of the first that was opened."""
        import pyarrow
        from pyarrow import parquet

        source = pyarrow.PythonFile(ObjectFile(self.store, self.stored), "r")
        options = {"pre_buffer": True, "page_checksum_verification": True}
        file = parquet.ParquetFile(source, metadata=self._metadata, **options)
        self._metadata = file.metadata
        return file

    @contextmanager
    def _explained(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise TrainingError(f"{self.stored.address}: is no whole Parquet file: {error}") from None


def _row_group_bytes(metadata: FileMetaData, number: int, columns: Sequence[str] | None) -> int:
    """Bytes in the file of the columns of a row group that are read."""
    group = metadata.row_group(number)
    parts = [group.column(place) for place in range(group.num_columns)]
    return sum(
        part.total_compressed_size
        for part in parts
        if columns is None or part.path_in_schema.partition(".")[0] in columns
    )


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # not UTF-8, or not JSON
        raise TrainingError(f"{where}: is not a line of JSON: {error}") from None
    if not isinstance(record, dict):
        raise TrainingError(f'{where}: is {type(record).__name__}, not an object such as {{"text": "..."}}')
    return record
