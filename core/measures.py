"""The clock and the memory of this process; durations, byte counts and foreign text formatted for people."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import re
import resource
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that steer a terminal, or turn the direction of text; not the tab and the line break."""
STATUS = Path("/proc/self/status")


now = time.perf_counter
"""Seconds of a monotonic clock: only differences between two calls are meaningful."""


def wait_for(done: Callable[[], bool], seconds: float, pause: float = 0.1) -> bool:
    """Poll `done` until it is true or the time is over, in seconds; whether it became true."""
    end = time.monotonic() + seconds
    while not (is_done := done()) and time.monotonic() <= end:
        time.sleep(pause)
    return is_done


def peak_resident_bytes() -> int:
    """The most memory that this program had resident.

    Linux's VmHWM: ru_maxrss of a started process begins with what its parent held.
    """
    with contextlib.suppress(OSError, StopIteration):
        lines = STATUS.read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def format_duration(seconds: float) -> str:
    """Seconds as minutes:seconds, or hours:minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_bytes(count: float) -> str:
    """Bytes with a unit (B, KB, MB, GB) in powers of 1000."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def gigabytes(count: float) -> str:
    """Bytes in GB, for where figures of memory stand beside each other."""
    return f"{count / 1e9:.2f} GB"


def counted(count: int, noun: str) -> str:
    """A number with its noun: `1 row`, `1,200 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: object) -> str:
    r"""Text from anywhere, for a terminal or a log: characters that would steer it are written as \x1b."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def wrapped(text: str, width: int) -> str:
    """Text whose lines have at most `width` characters: longer ones are broken at spaces and go on below with
    an indent; a longer word, such as a path, stays whole.
    """
    lines = ([s] if len(s) <= width else _broken(s, width, "  ", False) for s in text.split("\n"))
    return "\n".join(itertools.chain(*lines))


def _broken(line: str, width: int, indent: str = "", cuts_words: bool = True) -> list[str]:
    wrapper = textwrap.TextWrapper(width, "", indent, break_long_words=cuts_words, break_on_hyphens=False)
    return [part.replace("\xa0", " ") for part in wrapper.wrap(_held(line))] or [""]


def _held(line: str) -> str:
    """A line in which a name and its figure stay together."""
    return re.sub(r"(?<=\w) (?=-?[\d.e+-]+(?:  |$))", "\xa0", line)


def aligned(rows: Sequence[Sequence[str]], width: int = 0) -> list[str]:
    """Rows of one length as lines with their columns below each other, and within `width` unless it is 0.

    Where that is too narrow, the widest cells go on below; where their words do not fit beside each other,
    the last columns follow in a table of their own, behind the first one again.
    """
    columns = list(zip(*rows, strict=True))
    widths, gaps = [max(map(len, column)) for column in columns], 2 * len(columns) - 2
    if width and sum(widths) + gaps > width:
        most = width // 2 - 1 if gaps else width
        least = [
            min(most, max(len(w) for cell in column for w in _held(cell).split(" "))) for column in columns
        ]
        if sum(least) + gaps > width:
            ends = itertools.accumulate(min(have, most) + 2 for have in widths)
            fit = sum(end - 2 <= width for end in ends)
            rest = [[row[0], *row[fit:]] for row in rows]
            return [*aligned([row[:fit] for row in rows], width), "", *aligned(rest, width)]
        while sum(widths) + gaps > width:
            spare = [(have > need) * have for have, need in zip(widths, least, strict=True)]
            widths[spare.index(max(spare))] -= 1
    lines = []
    for row in rows:
        cells = [_broken(cell, max(1, room)) for cell, room in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(c.ljust(w) for c, w in zip(parts, widths, strict=True)).rstrip())
    return lines


DURATION = "".join(rf"(?:(\d+(?:\.\d+)?){unit})?" for unit in "dhms")
"""Days, hours, minutes and seconds, as in 6h, 90m or 1d12h."""


def parse_duration(text: str) -> float:
    """Seconds of a duration such as 6h, 90m or 1d12h. Raises ValueError."""
    match = re.fullmatch(DURATION, text.strip().lower())
    parts = [float(part or 0) for part in match.groups()] if match else [0.0]
    seconds = sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
    if seconds <= 0:
        raise ValueError("is no time such as 6h, 90m or 1d12h")
    return seconds


def format_p_value(p: float) -> str:
    """The p-value of a test; below 0.001 that alone is said."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def return_freed_memory() -> None:
    """Give the system what glibc keeps of freed memory, in fragments; nothing with another C library.

    Measured every eighth step of a training: 1.04 GB became 0.84, and the step took 0.96 to 1.0 of its time.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
