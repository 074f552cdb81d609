"""A signal only sets a flag; ranks agree on it at the border of a step."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopFlag:
    """Set by SIGTERM, SIGINT or SIGUSR1 inside its `with` block. A second SIGINT stops at once."""

    def __init__(self, catch_signals: bool = True) -> None:
        self.catch_signals = catch_signals
        """False where the process is another program's, whose handlers stay as they are."""
        self.requested = False
        self.reason = "asked to stop by a signal"
        self.cause = ""
        self._before: dict[int, Any] = {}

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def request(self, reason: str) -> None:
        """Ask for a stop from inside."""
        if not self.requested:
            self.requested, self.reason, self.cause = True, reason, "lost"

    def __enter__(self) -> StopFlag:
        # Python lets only the main thread set handlers; a run inside another program's thread has none.
        if self.catch_signals and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
