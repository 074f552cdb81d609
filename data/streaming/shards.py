"""Shards as they lie in a store, cut into groups of neighbouring rows, each read by one range of bytes.

A group is so many row groups of a Parquet file, or so many whole lines, that it has GROUP_BYTES; a compressed
file of lines is one group, because it can only be read from its beginning.
"""

from __future__ import annotations

import gzip
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import TrainingError, explain_errors
from isobatch.data.readers import without_nulls
from isobatch.data.streaming.store import ObjectFile, Store, StoredObject, file_format

if TYPE_CHECKING:
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


class Shard(ABC):
    """An object that holds rows. Threads may read its groups at once. `wanted`: columns; None: all."""

    def __init__(self, store: Store, stored: StoredObject, wanted: Sequence[str] | None = None) -> None:
        self.store, self.stored, self.wanted = store, stored, wanted

    @abstractmethod
    def groups(self) -> Iterator[tuple[Extent, Rows]]:
        """Its groups from the first to the last, with their rows."""

    @abstractmethod
    def rows(self, extent: Extent) -> Rows:
        """The rows of a group."""

    @abstractmethod
    def columns(self) -> list[str]:
        """The names of its columns, of lines those of the first; none where it has no rows."""

    def largest_group(self) -> int:
        """Bytes of its largest group, about."""
        return min(GROUP_BYTES, self.stored.size)


class Lines(Shard):
    """A file of JSON objects, one a line. All columns are given: what is not read is counted."""

    def groups(self) -> Iterator[tuple[Extent, Rows]]:
        for extent, block in self._blocks():
            yield extent, self._parse(block, extent.start)

    def rows(self, extent: Extent) -> Rows:
        return self._parse(self._read(*extent), extent.start)

    def columns(self) -> list[str]:
        _, rows = next(self.groups(), (None, []))
        return list(rows[0]) if rows else []

    def _read(self, start: int, stop: int) -> bytes:
        return self.store.read(self.stored.address, start, stop)

    def _blocks(self) -> Iterator[tuple[Extent, bytes]]:
        """Whole lines of about GROUP_BYTES at a time."""
        start, size = 0, self.stored.size
        while start < size:
            stop = min(size, start + GROUP_BYTES)
            block = self._read(start, stop)
            while stop < size and b"\n" not in block:
                more = min(size, stop + GROUP_BYTES)
                block, stop = block + self._read(stop, more), more
            if stop < size:
                block = block[: block.rfind(b"\n") + 1]
            yield Extent(start, start + len(block)), block
            start += len(block)

    def _parse(self, block: bytes, start: int) -> Rows:
        rows: Rows = []
        for line in block.split(b"\n"):
            if line.strip():
                where = f"{self.stored.address} byte {start:,}"
                try:
                    rows.append(record := json.loads(line))
                except ValueError as error:  # not UTF-8, or not JSON
                    raise TrainingError(f"{where}: is not a line of JSON: {error}") from None
                if not isinstance(record, dict):
                    what = f'{type(record).__name__}, not an object such as {{"text": "..."}}'
                    raise TrainingError(f"{where}: is {what}")
            start += len(line) + 1
        return rows


class GzippedLines(Lines):
    """The same, compressed: one group."""

    def largest_group(self) -> int:
        return USUAL_COMPRESSION * self.stored.size

    def rows(self, extent: Extent) -> Rows:  # noqa: ARG002  it has one
        return self._parse(self._unpacked(), 0)

    def _blocks(self) -> Iterator[tuple[Extent, bytes]]:
        yield Extent(0, self.stored.size), self._unpacked()

    def _unpacked(self) -> bytes:
        kinds = gzip.BadGzipFile, EOFError, zlib.error
        with explain_errors(f"{self.stored.address}: is no whole gzip file", *kinds, to=TrainingError):
            if self.stored.size:  # nothing would be read as no lines
                return gzip.decompress(self._read(0, self.stored.size))
            raise EOFError("it has 0 bytes")


class ParquetShard(Shard):
    """A Parquet file, of which only the columns that are asked for are read."""

    _metadata: FileMetaData | None = None

    def rows(self, extent: Extent) -> Rows:
        with self._opened() as file:
            rows: Rows = file.read_row_groups(range(*extent), columns=self.wanted).to_pylist()
            return [{name: without_nulls(value) for name, value in row.items()} for row in rows]

    def columns(self) -> list[str]:
        with self._opened() as file:
            return file.schema_arrow.names

    def groups(self) -> Iterator[tuple[Extent, Rows]]:
        """Consecutive row groups that together have GROUP_BYTES."""
        sizes = self._row_group_bytes()
        start = size = 0
        for number, of_this in enumerate(sizes):
            size += of_this
            if size >= GROUP_BYTES or number == len(sizes) - 1:
                extent = Extent(start, number + 1)
                yield extent, self.rows(extent)
                start, size = number + 1, 0

    def largest_group(self) -> int:
        return max(GROUP_BYTES, *self._row_group_bytes(), 0)

    def _row_group_bytes(self) -> list[int]:
        """Bytes in the file of the columns of each row group that are read."""
        with self._opened() as file:
            groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        parts = [[group.column(place) for place in range(group.num_columns)] for group in groups]
        wanted = self.wanted
        is_read = (lambda part: part.path_in_schema.partition(".")[0] in wanted) if wanted else bool
        return [sum(part.total_compressed_size for part in filter(is_read, ones)) for ones in parts]

    @contextmanager
    def _opened(self) -> Iterator[ParquetFile]:
        """A file for one thread, with the metadata of the first that was opened."""
        import pyarrow
        from pyarrow import parquet

        source = pyarrow.PythonFile(ObjectFile(self.store, self.stored), "r")
        options = {"pre_buffer": True, "page_checksum_verification": True}
        kinds = pyarrow.ArrowException, OSError, UnicodeDecodeError
        with (
            explain_errors(f"{self.stored.address}: is no whole Parquet file", *kinds, to=TrainingError),
            parquet.ParquetFile(source, metadata=self._metadata, **options) as file,
        ):
            self._metadata = file.metadata
            yield file


SHARDS: dict[str | None, type[Shard]] = {"parquet": ParquetShard, "jsonl": Lines, "jsonl.gz": GzippedLines}


def shard_of(store: Store, stored: StoredObject, wanted: Sequence[str] | None = None) -> Shard:
    """The shard that an object is; of Parquet only the `wanted` columns are read."""
    return SHARDS[file_format(stored.address)](store, stored, wanted)
