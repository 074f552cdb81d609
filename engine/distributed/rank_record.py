"""The rank record: where every rank is, in a small file that rank 0 writes every few seconds.

A run that hangs is then explained from outside (`doctor RUN`), before its watchdog ends it and after. A
thread of its own writes it: a disk that hangs stops neither the training nor the watchdog.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import StopRequestedError
from isobatch.engine.distributed.watchdog import position_key

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.engine.distributed.watchdog import Watchdog

SECONDS_BETWEEN_RECORDS = 10.0
"""A thousand ranks are read in about 0.1 s."""


class RankRecord:
    """Its `with` block is the training. The file is removed at its end, and stays after an error."""

    def __init__(self, watchdog: Watchdog, path: Path) -> None:
        self._watchdog, self._path = watchdog, path
        self._beats: dict[int, tuple[int, float]] = {}
        """Rank -> its newest beat, and when that was first seen by this process's clock."""
        self._store: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank record", daemon=True)

    def __enter__(self) -> RankRecord:
        if self._watchdog.timeout and self._watchdog.world.is_main:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        if self._watchdog.world.is_main and (kind is None or issubclass(kind, StopRequestedError)):
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(OSError, RuntimeError):  # a full disk, a store that is gone
                self.write()
            if self._ended.wait(SECONDS_BETWEEN_RECORDS):
                return

    def write(self) -> None:
        """Write the file anew. It is not synced: it is of use to this machine's present only."""
        world = self._watchdog.world
        ranks = [self._position(rank) for rank in range(world.size)]
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        temporary.write_text(json.dumps({"written": time.time(), "ranks": ranks}), encoding="utf-8")
        if not self._ended.is_set():
            temporary.replace(self._path)

    def _position(self, rank: int) -> dict[str, Any]:
        world = self._watchdog.world
        if rank == world.rank:
            return {"rank": rank, **self._watchdog.position(), "silent_seconds": 0.0}
        store = self._connection()
        if not store.check([position_key(rank)]):
            return {"rank": rank}
        said = json.loads(store.get(position_key(rank)))
        beat, now = said.pop("beat"), time.monotonic()
        if self._beats.get(rank, (None, 0.0))[0] != beat:
            self._beats[rank] = (beat, now)
        return {"rank": rank, **said, "silent_seconds": round(now - self._beats[rank][1], 1)}

    def _connection(self) -> Any:
        """The store, by a connection of this thread's own: nobody else waits for its answers."""
        if self._store is None:
            store = self._watchdog.world.store()
            self._store = store.clone() if hasattr(store, "clone") else store
        return self._store
