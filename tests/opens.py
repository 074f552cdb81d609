"""Counts what the threads of this process open: each simulates a rank."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Opens:
    """Name of a thread -> how often it opened a file in the folder."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self._folder = ""
        sys.addaudithook(self._hear)  # it stays, and hears nothing without a folder

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._folder and event == "open" and str(arguments[0]).startswith(self._folder):
            self.count[threading.current_thread().name] += 1

    @contextlib.contextmanager
    def within(self, folder: Path) -> Iterator[Counter[str]]:
        """The counts of a stretch of the program."""
        self._folder, self.count = f"{folder}/", Counter()
        try:
            yield self.count
        finally:
            self._folder = ""


OPENS = Opens()
