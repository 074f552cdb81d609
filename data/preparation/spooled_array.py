"""Arrays that are collected in a temporary file, so that they may be larger than memory."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


class SpooledArray:
    """An array that is collected in an unnamed temporary file, and then memory-mapped."""

    def __init__(self, dtype: type | np.dtype[Any], folder: Path | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.dtype, self.file = dtype, tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def add(self, values: np.ndarray) -> None:
        """Append values (n,)."""
        self.file.write(values.astype(self.dtype, copy=False).tobytes())

    def array(self) -> np.ndarray:
        """All values that were added; nothing can be added after this."""
        with self.file:
            self.file.flush()
            return np.memmap(self.file, self.dtype, "r") if self.file.tell() else np.empty(0, self.dtype)


def spool_to_array(chunks: Iterable[np.ndarray], dtype: type, folder: Path | None) -> np.ndarray:
    """The chunks joined, by way of a temporary file in `folder`."""
    spooled = SpooledArray(dtype, folder)
    for chunk in chunks:
        spooled.add(chunk)
    return spooled.array()
