"""How far the reading of raw files is, for the status line: megabytes done, the rate, the time left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from isobatch.core.measures import format_duration, now
from isobatch.core.terminal import doing

MEGABYTE = 1_000_000


class InputPosition:
    """Bytes of the files that are read now: readers say what they have read, whoever waits shows it."""

    done = total = began = 0.0

    def begin(self, files: Iterable[Path], total: int | None = None) -> None:
        """Count from 0 to the size of these files, or to `total` bytes."""
        self.total = sum(file.stat().st_size for file in files) if total is None else total
        self.done, self.began = 0.0, now()

    def advance(self, count: float) -> None:
        """Count bytes that were read."""
        self.done += count

    def show(self, text: str) -> None:
        """Say what is done with the input, and how much of it is."""
        if self.total < MEGABYTE:
            doing(text)
            return
        rate = max(1.0, self.done) / max(1e-3, now() - self.began)
        left = format_duration(max(0.0, self.total - self.done) / rate)
        done, total = round(min(self.total, self.done) / MEGABYTE), round(self.total / MEGABYTE)
        doing(text, done, total, (f"{left} left", f"{rate / MEGABYTE:.1f} MB/s"))


position = InputPosition()
"""Of this process: it reads one thing after another."""
