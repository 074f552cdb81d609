"""The lines of a run that trains elsewhere, printed here as they come."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from isobatch.core.measures import printable

if TYPE_CHECKING:
    from pathlib import Path


class RunLog:
    """Follows log.txt, which rank 0 writes where all nodes see it."""

    def __init__(self, path: Path, quiet: bool) -> None:
        self._path, self._quiet = path, quiet
        self._read = path.stat().st_size if path.exists() else 0
        self._last = ""

    def print_new(self) -> None:
        """Print what has been written since the last call, in whole lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._read)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.decode(errors="replace").splitlines()
        for line in lines if not self._quiet else ():
            print(printable(line), file=sys.stderr)
        self._last = lines[-1] if lines else self._last

    def print_unless_said(self, line: str) -> None:
        """Print a line that is not the last one of the log."""
        self.print_new()
        if line not in self._last:
            print(printable(f"isobatch: {line}"), file=sys.stderr)
