"""How far the reading of raw files is, for the status line: megabytes done, the rate, the time left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.core.measures import format_duration, now
from isobatch.core.terminal.status import doing

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MEGABYTE = 1_000_000


class InputPosition:
    """Bytes of the files that are read now: readers say what they have read, whoever waits shows it."""

    def __init__(self) -> None:
        self.done, self.total, self.began = 0.0, 0, now()

    def begin(self, files: Iterable[Path], total: int | None = None) -> None:
        """Count from 0 to the size of these files, or to `total` bytes."""
        self.total = sum(file.stat().st_size for file in files) if total is None else total
        self.done, self.began = 0.0, now()

    def advance(self, count: float) -> None:
        """Count bytes that were read."""
        self.done += count

    def show(self, text: str) -> None:
        """Say what is done with the input, and how much of it is."""
        total = round(self.total / MEGABYTE)
        if not total:
            doing(text)
            return
        seconds = max(1e-3, now() - self.began)
        rate = self.done / seconds
        left = format_duration(max(0.0, self.total - self.done) / rate) if rate else "?"
        figures = (f"{left} left", f"{rate / MEGABYTE:.1f} MB/s")
        doing(text, min(total, round(self.done / MEGABYTE)), total, figures)


position = InputPosition()
"""Of this process: it reads one thing after another."""
