"""Reads parts of a long log of JSON rows, not all of it: the row at a place, rows evenly spread."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import parse_row, rows_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TAIL_BYTES = 1 << 16
WHOLE_BYTES = 4 << 20
"""Up to this size `thinned_rows` reads all rows."""
MOST_RARE_ROWS = 20_000
"""Most rows that `thinned_rows` finds by their fields."""


def newest_rows(path: Path) -> list[dict[str, Any]]:
    """The rows in the last TAIL_BYTES of a log, oldest first; one that is being written is left out."""
    if not path.exists():
        return []
    with path.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
        return [row for line in stream.read().splitlines() if (row := parse_row(line)) is not None]


def damaged_rows(path: Path) -> int:
    """Whole lines of a log that are no rows; of a long log, in its first WHOLE_BYTES."""
    if not path.exists():
        return 0
    with path.open("rb") as stream:
        lines = stream.read(WHOLE_BYTES).split(b"\n")[:-1]
    return sum(parse_row(line) is None for line in lines)


def last_row_before(path: Path, offset: int) -> dict[str, Any] | None:
    """The row that ends at byte `offset`; None where none does."""
    if offset <= 0 or not path.exists() or path.stat().st_size < offset:
        return None
    with path.open("rb") as stream:
        return _row_before(stream, offset)


def _row_before(stream: Any, offset: int) -> dict[str, Any] | None:
    size = 1 << 16
    start = max(0, offset - size)
    stream.seek(start)
    block = stream.read(offset - start)
    if not block.endswith(b"\n"):
        return None
    return parse_row(block[block.rfind(b"\n", 0, -1) + 1 :])


def thinned_rows(path: Path, count: int, fields: Sequence[str]) -> list[dict[str, Any]]:
    """About `count` rows evenly over a long log, and all rows that have one of `fields`; of a short log, all.

    A long log is not read through: rows are picked by their place in the file, and the fields are looked for
    as bytes.
    """
    if not path.exists():
        return []
    size = path.stat().st_size
    if size <= WHOLE_BYTES:
        return list(rows_in(path))
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        starts = {_line_start(content, size * k // count) for k in range(count)}
        starts |= {_line_start(content, _last_complete(content) - 1)}
        for field in fields:
            starts |= set(_rows_with(content, field))
        lines = (content[start : content.find(b"\n", start) + 1] for start in sorted(starts))
        return [row for line in lines if (row := parse_row(line)) is not None]


def _last_complete(content: mmap.mmap) -> int:
    """Where the last complete line ends."""
    return content.rfind(b"\n") + 1


def _line_start(content: mmap.mmap, place: int) -> int:
    """Where the line that holds byte `place` begins."""
    return content.rfind(b"\n", 0, max(0, place)) + 1


def _rows_with(content: mmap.mmap, field: str) -> Iterator[int]:
    """Starts of the lines that name a field, at most MOST_RARE_ROWS: a field of every row is not rare."""
    name, place, found = f'"{field}":'.encode(), 0, 0
    while found < MOST_RARE_ROWS and (place := content.find(name, place)) >= 0:
        yield _line_start(content, place)
        place, found = max(place, content.find(b"\n", place)), found + 1
