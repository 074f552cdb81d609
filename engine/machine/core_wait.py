"""How much a process waits for a core: the share of its threads' time in which other programs ran there."""

from __future__ import annotations

import contextlib
from pathlib import Path

THREADS = Path("/proc/self/task")
DISTURBED = 0.05
"""Share of waiting from which on what was timed is no property of this machine (idle machine: 0.01, one other
program on two cores: 0.24)."""


class CoreWait:
    """The share of waiting since this object was made; 0 where the system keeps no such account."""

    def __init__(self) -> None:
        self._before = _scheduled()

    def share(self) -> float:
        """Waiting over waiting and running, of all threads of this process."""
        ran, waited = (now - before for now, before in zip(_scheduled(), self._before, strict=True))
        # Threads that ended meanwhile have taken their times with them.
        return max(0, waited) / max(1, max(0, ran) + max(0, waited))


def _scheduled() -> tuple[int, int]:
    """(nanoseconds that this process's threads ran, nanoseconds that they waited for a core): proc(5)."""
    total = [0, 0]
    for file in THREADS.glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # a thread that ended
            ran, waited, _ = map(int, file.read_text().split())
            total = [total[0] + ran, total[1] + waited]
    return total[0], total[1]
