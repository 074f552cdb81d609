"""Arrays in temporary files, so that they may be larger than memory."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

CHUNK_BYTES = 1 << 22


class SpooledColumns:
    """Arrays by name, each collected in an unnamed temporary file in `folder`, and then memory-mapped."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._files: dict[str, tuple[Any, np.dtype[Any]]] = {}

    def add(self, columns: Mapping[str, np.ndarray]) -> None:
        """Append values (n,) to each column, which has the type of its first values."""
        for name, values in columns.items():
            if name not in self._files:
                if self.folder is not None:
                    self.folder.mkdir(parents=True, exist_ok=True)
                self._files[name] = (tempfile.TemporaryFile(dir=self.folder), values.dtype)  # noqa: SIM115
            file, dtype = self._files[name]
            file.write(values.astype(dtype, copy=False).tobytes())

    def arrays(self) -> dict[str, np.ndarray]:
        """All columns; nothing can be added after this."""
        found: dict[str, np.ndarray] = {}
        for name, (file, dtype) in self._files.items():
            with file:
                file.flush()
                found[name] = np.memmap(file, dtype, "r") if file.tell() else np.empty(0, dtype)
        return found


def chunks_of(array: np.ndarray) -> Iterator[np.ndarray]:
    """At most CHUNK_BYTES at a time; of a mapped array only those stay resident."""
    rows, mapped = max(1, CHUNK_BYTES // max(1, array[:1].nbytes)), getattr(array, "_mmap", None)
    for start in range(0, len(array), rows):
        yield array[start : start + rows]
        if mapped is not None:  # the pages are read again when they are used
            mapped.madvise(mmap.MADV_DONTNEED)
