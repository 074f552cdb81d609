"""A thread that notices when training stands still, and says where.

Every process tells the others through the world's store what it is at. Whoever stands still too long looks at
what the others said: the one that is not waiting for anybody, or says nothing any more, is the one to name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.distributed.stop_signals import StopFlag

TIMEOUT_AFTER_SIGNAL_SECONDS = 30.0
"""A process that was asked to stop and does not move is waiting for one that is gone."""
WAITING_RANK_DELAY_SECONDS = 2.0
"""Those who wait let the one that holds them up speak first."""


class Watchdog:
    """Runs beside the main thread, which says `world.at(...)` whenever it moves."""

    def __init__(
        self, world: Communicator, stop: StopFlag, timeout: float, end: Callable[[str], None]
    ) -> None:
        self.world, self.stop, self.timeout = world, stop, timeout
        self.end = end
        """Ends this process for the reason given."""
        self._parent = os.getppid()
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._pause = max(0.2, min(1.0, timeout / 10))
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watchdog:
        self.world.mark_progress("the start")
        if self.timeout:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            if os.getppid() != self._parent and self.world.size > 1:
                self.stop.request("the launcher that started it is gone")
            self._publish_position()
            still = time.monotonic() - self.world.moved_at
            limit = min(self.timeout, TIMEOUT_AFTER_SIGNAL_SECONDS) if self.stop.requested else self.timeout
            if (
                still > limit + (WAITING_RANK_DELAY_SECONDS if self.world.waiting else 0)
                and not self._over.is_set()
            ):
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self.end(self._verdict(still))

    def _publish_position(self) -> None:
        """Where this process is, for the others to read."""
        if (store := self.world.store()) is not None:
            said = {
                "place": self.world.place,
                "waiting": self.world.waiting,
                "code": self._innermost_line(),
                "time": time.time(),
            }
            with contextlib.suppress(RuntimeError):
                store.set(_key(self.world.rank), json.dumps(said))

    def _verdict(self, still: float) -> str:
        here = f"rank {self.world.rank} has stood still for {still:.0f} s"
        if not self.world.waiting:
            return f"{here} at {self.world.place}, in {self._innermost_line()}"
        others = [text for rank in range(self.world.size) if (text := self._describe_rank(rank))]
        why = "; ".join(others) or "no other says why"
        return f"{here} at {self.world.place}, waiting in {self.world.waiting} for the others: {why}"

    def _describe_rank(self, rank: int) -> str:
        """What is odd about another rank, or nothing."""
        store = self.world.store()
        if rank == self.world.rank or store is None:
            return ""
        try:
            if not store.check([_key(rank)]):
                return f"rank {rank} was never heard of"
            said: dict[str, Any] = json.loads(store.get(_key(rank)))
        except RuntimeError:
            return "the store is gone"
        silent = time.time() - said["time"]
        if silent > 2 * self._pause + 1:
            return f"rank {rank} has said nothing for {silent:.0f} s; it was at {said['place']}"
        return "" if said["waiting"] else f"rank {rank} is at {said['place']}, in {said['code']}"

    def _innermost_line(self) -> str:
        """The innermost line of the main thread outside installed libraries."""
        frame: FrameType | None = sys._current_frames().get(self._main)  # noqa: SLF001  documented by Python
        while frame is not None and ("site-packages" in frame.f_code.co_filename or frame.f_back is None):
            frame = frame.f_back
        if frame is None:
            return "a library"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _key(rank: int) -> str:
    return f"isobatch/at/{rank}"
