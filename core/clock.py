"""The clock that intervals are measured with."""

from __future__ import annotations

import time


def now() -> float:
    """Seconds from an arbitrary start, never set back: only differences mean anything."""
    return time.perf_counter()
