"""Threads that get groups before they are needed."""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

THREADS = 8
LEAST_REMEMBERED = 128
"""Groups that were asked for last, which are not asked for again."""


BUSY_SECONDS = 0.05
"""Until a group that could not be read, because its lock was taken, is tried again."""


class ReadAhead:
    """Calls `read` with each group that is expected, in threads that end with the process.

    Again later where it returns None.
    """

    def __init__(self, read: Callable[[int], Any]) -> None:
        self._read = read
        self._waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._known: OrderedDict[int, None] = OrderedDict()
        self._started = False

    def expect(self, groups: Sequence[int]) -> None:
        """These groups are needed soon. Who needs one does not wait for these threads."""
        for group in groups:
            if group not in self._known:
                self._waiting.put(group)
            self._known[group] = None
            self._known.move_to_end(group)
        while len(self._known) > LEAST_REMEMBERED + 4 * len(groups):
            self._known.popitem(last=False)
        if not self._started:
            self._started = True
            for number in range(THREADS):
                threading.Thread(target=self._work, name=f"read ahead {number}", daemon=True).start()

    def _work(self) -> None:
        while True:
            group = self._waiting.get()
            with suppress(Exception):  # who needs the group meets the error too, and is told
                if self._read(group) is None:  # another group may only have had the same lock
                    time.sleep(BUSY_SECONDS)
                    self._waiting.put(group)
