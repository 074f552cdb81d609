"""The clock for measuring intervals, and durations and byte counts formatted for people."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds of a monotonic clock: only differences between two calls are meaningful."""
    return time.perf_counter()


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
