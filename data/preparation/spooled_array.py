"""Arrays in temporary files, so that they may be larger than memory."""

from __future__ import annotations

import mmap
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

CHUNK_BYTES = 1 << 22


class SpooledArray:
    """An array that is collected in an unnamed temporary file, and then memory-mapped."""

    def __init__(self, dtype: type | np.dtype[Any], folder: Path | None) -> None:
        self.dtype, self.file = dtype, _temporary_file(folder)

    def add(self, values: np.ndarray) -> None:
        """Append values (n,)."""
        self.file.write(values.astype(self.dtype, copy=False).tobytes())

    def array(self) -> np.ndarray:
        """All values that were added; nothing can be added after this."""
        with self.file:
            self.file.flush()
            return np.memmap(self.file, self.dtype, "r") if self.file.tell() else np.empty(0, self.dtype)


class SpooledColumns:
    """Arrays by name that are collected together, each in a temporary file in `folder`."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._spooled: dict[str, SpooledArray] = {}

    def add(self, columns: Mapping[str, np.ndarray]) -> None:
        """Append values (n,) to each column, which has the type of its first values."""
        for name, values in columns.items():
            if name not in self._spooled:
                self._spooled[name] = SpooledArray(values.dtype, self.folder)
            self._spooled[name].add(values)

    def arrays(self) -> dict[str, np.ndarray]:
        """All columns; nothing can be added after this."""
        return {name: spooled.array() for name, spooled in self._spooled.items()}


def spool_to_array(
    chunks: Iterable[np.ndarray], dtype: type | np.dtype[Any], folder: Path | None
) -> np.ndarray:
    """The chunks joined, by way of a temporary file in `folder`."""
    spooled = SpooledArray(dtype, folder)
    for chunk in chunks:
        spooled.add(chunk)
    return spooled.array()


def chunks_of(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """At most CHUNK_BYTES of each array at a time, the same rows of all; only those stay resident."""
    widest = max(array[:1].nbytes for array in arrays)
    rows = max(1, CHUNK_BYTES // max(1, widest))
    for start in range(0, len(arrays[0]), rows):
        yield tuple(array[start : start + rows] for array in arrays)
        for array in arrays:
            release(array)


def release(array: np.ndarray) -> None:
    """Let the system take back the pages of a mapped array, which are read again when they are used."""
    mapped = getattr(array, "_mmap", None)
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)


def _temporary_file(folder: Path | None) -> Any:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)
