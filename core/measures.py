"""Time and size: the clock that intervals are measured with, bytes and seconds as people say them."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds from an arbitrary start, never set back: only differences mean anything."""
    return time.perf_counter()


def format_duration(seconds: float) -> str:
    """minutes:seconds, or hours:minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_bytes(count: float) -> str:
    """Bytes as people say them, in powers of 1000."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
