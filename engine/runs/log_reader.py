"""Parses parts of a long log of JSON rows, not all of it: the row at a place, rows evenly spread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobatch.core.atomic_files import lines_in, parse_row

TAIL_BYTES = 1 << 16
WHOLE_BYTES = 4 << 20
"""Up to this size `thinned_rows` reads all rows."""


def newest_rows(path: Path) -> list[dict[str, Any]]:
    """The rows in the last TAIL_BYTES of a log, oldest first; one that is being written is left out."""
    if not path.exists():
        return []
    lines = _tail(path, path.stat().st_size).splitlines()
    return [row for line in lines if (row := parse_row(line)) is not None]


def _tail(path: Path, stop: int) -> bytes:
    """The last TAIL_BYTES of a log's first `stop` bytes."""
    with path.open("rb") as stream:
        start = stream.seek(max(0, stop - TAIL_BYTES))
        return stream.read(stop - start)


def damaged_rows(path: Path) -> int:
    """Whole lines of a log that are no rows; of a long log, in its first WHOLE_BYTES."""
    if not path.exists():
        return 0
    with path.open("rb") as stream:
        lines = stream.read(WHOLE_BYTES).split(b"\n")[:-1]
    return sum(parse_row(line) is None for line in lines)


def last_row_before(path: Path, offset: int) -> dict[str, Any] | None:
    """The row that ends at byte `offset`; None where none does."""
    if not path.exists() or path.stat().st_size < offset:
        return None
    block = _tail(path, offset)
    return parse_row(block[block.rfind(b"\n", 0, -1) + 1 :]) if block.endswith(b"\n") else None


def thinned_rows(path: Path, count: int, fields: Sequence[str]) -> list[dict[str, Any]]:
    """About `count` rows spread over a long log, its last one, and rows that have one of `fields`; of a short
    log, all. The other rows are not parsed.
    """
    size = path.stat().st_size if path.exists() else 0
    names = [f'"{field}":'.encode() for field in fields]
    apart, place, due, line, found = size / count if size > WHOLE_BYTES else 0, 0, 0.0, b"", []
    for line in lines_in(path):
        if place >= due or any(name in line for name in names):
            found.append(line)
        due += apart if place >= due else 0
        place += len(line)
    return [row for line in dict.fromkeys([*found, line]) if (row := parse_row(line)) is not None]
