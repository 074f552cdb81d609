"""The watchdog: a thread that ends the process when training makes no progress, and says which rank is stuck.

Every process publishes what it is doing in the process group's store. A process without progress for too
long reads what the others published: the stuck rank is in no collective, or no longer publishes. Clocks of
different machines are never compared: the store counts all ranks' beats, and so says which came first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.distributed.stop_signals import StopFlag

TIMEOUT_AFTER_SIGNAL_SECONDS = 30.0
"""The timeout after a stop signal: then a process without progress waits for one that has exited."""
SUSPENDED_SECONDS = 5.0
"""A thread that wakes so much later than it asked for was suspended with its process: no rank stood still."""
WAITING_RANK_DELAY_SECONDS = 2.0
"""Ranks blocked in a collective wait this much longer, so that the rank causing the stall reports first."""


BEATS_KEPT = 4096
"""Beats whose time is remembered: a rank's silence is measured back to the first of them at most."""


class Watchdog:
    """A daemon thread beside the main thread, which calls `world.mark_progress` and `world.waiting_for`."""

    def __init__(
        self, world: Communicator, stop: StopFlag, timeout: float, end: Callable[[str], None]
    ) -> None:
        self.world, self.stop, self.timeout = world, stop, timeout
        self.end = end
        """`end(reason)` ends this process."""
        self._process = f"{os.getpid()} on {socket.gethostname()}"
        self._parent = os.getppid()
        self._main_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._period = max(0.2, min(1.0, timeout / 10))
        self._store: Any = None
        self._beats: deque[tuple[int, float]] = deque(maxlen=BEATS_KEPT)
        """Of this process: its beat's number among those of all ranks, and when that was by its own clock."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watchdog:
        self.world.mark_progress("the start")
        if self.timeout:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._stopped.wait(self._period):
            since, looked = time.monotonic() - looked, time.monotonic()
            if since > self._period + SUSPENDED_SECONDS:
                self.world.moved_at = looked
            if os.getppid() != self._parent and self.world.size > 1:
                self.stop.request("the launcher that started it is gone")
            self._publish_position()
            idle_seconds = time.monotonic() - self.world.moved_at
            if idle_seconds > self.limit() and not self._stopped.is_set():
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self.end(self._reason(idle_seconds))

    def limit(self) -> float:
        """Seconds without progress after which this process is ended."""
        stopping = self.stop.requested and not self.world.is_finishing
        limit = min(self.timeout, TIMEOUT_AFTER_SIGNAL_SECONDS) if stopping else self.timeout
        return limit + (WAITING_RANK_DELAY_SECONDS if self.world.waiting else 0)

    def _connection(self) -> Any:
        """The store, by a connection of this thread's own.

        A count waits for the store's answer, for a minute where its host has ended; the main thread must not
        wait for the same lock.
        """
        if self._store is None and (store := self.world.store()) is not None:
            self._store = store.clone() if hasattr(store, "clone") else store
        return self._store

    def _publish_position(self) -> None:
        """Write what this process is doing to the store, for the others to read."""
        if (store := self._connection()) is None:
            return
        with contextlib.suppress(RuntimeError):
            beat = store.add(BEATS, 1)
            self._beats.append((beat, time.monotonic()))
            store.set(position_key(self.world.rank), json.dumps({**self.position(), "beat": beat}))

    def position(self) -> dict[str, Any]:
        """What this process is doing: its place, the collective that it waits in, its line, since when."""
        return {
            "process": self._process,
            "place": self.world.position,
            "waiting": self.world.waiting,
            "code": self._innermost_line(),
            "still_seconds": round(time.monotonic() - self.world.moved_at, 1),
        }

    def _reason(self, idle_seconds: float) -> str:
        here = f"rank {self.world.rank} has stood still for {idle_seconds:.0f} s"
        if not self.world.waiting:
            return f"{here} at {self.world.position}, in {self._innermost_line()}"
        others = {rank: self._describe_rank(rank) for rank in range(self.world.size)}
        why = "; ".join(filter(None, others.values())) or "all of them wait as well"
        return f"{here} at {self.world.position}, waiting in {self.world.waiting} for the others: {why}"

    def _describe_rank(self, rank: int) -> str:
        """Why another rank may be the stuck one; empty for this rank and for ranks in a collective."""
        store = self.world.store()
        if rank == self.world.rank or store is None:
            return ""
        try:
            if not store.check([position_key(rank)]):
                return f"rank {rank} was never heard of"
            position: dict[str, Any] = json.loads(store.get(position_key(rank)))
        except RuntimeError:
            return "the store is gone"
        silent_seconds = self._seconds_since(position["beat"])
        if silent_seconds > 2 * self._period + 1:
            return f"rank {rank} has said nothing for {silent_seconds:.0f} s; it was at {position['place']}"
        return "" if position["waiting"] else f"rank {rank} is at {position['place']}, in {position['code']}"

    def _seconds_since(self, beat: int) -> float:
        """By this process's clock, the time since its own first beat after that one of another rank."""
        now = time.monotonic()
        return now - next((when for number, when in self._beats if number > beat), now)

    def _innermost_line(self) -> str:
        """The innermost line of the main thread outside installed libraries."""
        # Documented by Python, though its name begins with an underscore.
        frame: FrameType | None = sys._current_frames().get(self._main_thread)  # noqa: SLF001
        while frame is not None and ("site-packages" in frame.f_code.co_filename or frame.f_back is None):
            frame = frame.f_back
        if frame is None:
            return "a library"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


BEATS = "isobatch/beats"
"""Key of the store that counts the beats of all ranks."""


def position_key(rank: int) -> str:
    """Key of the store under which a rank says what it is doing."""
    return f"isobatch/at/{rank}"
