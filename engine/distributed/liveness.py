"""Liveness: the peer monitor notices a process that has ended, the watchdog one that stands still.

Peer monitor: a rank that is blocked in a collective of NCCL runs no signal handler and gets no error. So
every rank keeps a connection to rank 0, which the kernel closes when a process ends, in whatever way; a slow
or a stopped process keeps its connection. Rank 0 tells the others. In between the threads sleep.

Watchdog: every process publishes what it is doing in the process group's store. A process without progress
for too long reads what the others published: the stuck rank is in no collective, or no longer publishes.
Clocks of different machines are never compared: the store counts all ranks' beats, and so says which came
first. Rank 0 writes where every rank is to the rank record, by which `doctor RUN` explains a hang.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import StopRequestedError

if TYPE_CHECKING:
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.distributed.stop_signals import StopFlag

OWN_ERROR_SECONDS = 1.0
"""A lost process is an error in gloo's collectives: the main thread has this long to report it itself."""
OTHER_RANKS_LATER_SECONDS = 0.5
"""Ranks above 0 wait this much longer, so that rank 0 writes the verdict."""
CONNECT_SECONDS = 60.0
LOOPBACK = "127.0.0.1"
FAREWELL = "bye"
"""The last line of a rank whose work is done: what then happens to its process is no loss."""
TIMEOUT_AFTER_SIGNAL_SECONDS = 30.0
"""The timeout after a stop signal: then a process without progress waits for one that has exited."""
SUSPENDED_SECONDS = 5.0
"""A thread that wakes so much later than it asked for was suspended with its process: no rank stood still."""
WAITING_RANK_DELAY_SECONDS = 2.0
"""Ranks blocked in a collective wait this much longer, so that the rank causing the stall reports first."""
BEATS_KEPT = 4096
"""Beats whose time is remembered: a rank's silence is measured back to the first of them at most."""
BEATS = "isobatch/beats"
"""Key of the store that counts the beats of all ranks."""
SECONDS_BETWEEN_RECORDS = 10.0
"""A thousand ranks are read in about 0.1 s."""


class PeerMonitor:
    """Its `with` block is this rank's work, which all ranks begin together; one process monitors nobody."""

    def __init__(self, world: Communicator, end: Callable[[str], None]) -> None:
        self.world = world
        self.end = end
        """`end(reason)` ends this process; called from the monitor's thread."""
        self._over = threading.Event()
        """Set when this rank's work is over: then nothing ends it any more."""
        self._noticed = threading.Event()
        self._lock = threading.Lock()
        self._reason = ""
        self._farewell = False
        self._server: socket.socket | None = None
        self._connections: list[socket.socket] = []

    def __enter__(self) -> PeerMonitor:
        if self.world.size > 1:
            self._server = _listen(self.world.nodes == 1) if self.world.is_main else None
            offer = self._server and (self._server.getsockname()[1], secrets.token_hex(16))
            port, token = self.world.broadcast_object(offer)
            # A loader process that is forked from this one would keep its connections open after its death.
            os.register_at_fork(after_in_child=self._close)
            hear = partial(self._serve, self._server) if self._server else partial(self._follow, port)
            threading.Thread(target=hear, args=(token,), name="peers", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Say farewell, but not after an error: others that wait for this rank end when its process does."""
        self._over.set()
        self._farewell = kind is None or issubclass(kind, StopRequestedError)
        if self._farewell:
            self._send(FAREWELL)

    def reason(self, within: float = OWN_ERROR_SECONDS) -> str:
        """Which rank was lost, for an error of a collective; empty if none is noticed in `within` seconds."""
        return self._reason if self.world.size > 1 and self._noticed.wait(within) else ""

    def _serve(self, server: socket.socket, token: str) -> None:
        """Rank 0's thread: every connection is heard by a thread of its own."""
        while True:
            connection, _ = server.accept()
            _keep_alive(connection)
            self._connections.append(connection)
            threading.Thread(target=self._hear, args=(connection, token), name="peer", daemon=True).start()

    def _hear(self, connection: socket.socket, token: str) -> None:
        """Hear a rank until its connection closes, and tell all where it has not said farewell."""
        lines = _lines(connection)
        said, _, rank = next(lines, "").partition(" ")
        is_rank = hmac.compare_digest(said.encode(), token.encode())  # else a stranger
        is_lost = is_rank and FAREWELL not in list(lines)
        self._connections.remove(connection)
        connection.close()
        if is_lost:
            self._send(f"lost {rank}")
            self._notice(int(rank))

    def _follow(self, port: int, token: str) -> None:
        """The thread of every other rank: hear rank 0."""
        host = LOOPBACK if self.world.nodes == 1 else os.environ.get("MASTER_ADDR", "localhost")
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        except OSError as error:
            why = f"rank {self.world.rank} cannot reach rank 0 at {host}:{port} ({error})"
            print(f"{why}: a lost process is noticed after --hang-timeout only", file=sys.stderr)
            return
        _keep_alive(connection)
        self._connections.append(connection)
        self._send(f"{token} {self.world.rank}")
        if self._farewell:
            self._send(FAREWELL)
        for line in _lines(connection):
            if line == FAREWELL:
                return
            self._notice(int(line.removeprefix("lost ")))
        self._notice(0)

    def _notice(self, rank: int) -> None:
        """Rank `rank` is lost: end this process unless its main thread does so itself."""
        world = self.world
        with self._lock:
            if self._noticed.is_set() or self._over.is_set():
                return
            place = f"{world.position}, waiting in {world.waiting}" if world.waiting else world.position
            self._reason = f"rank {rank} is lost, its process has ended; rank {world.rank} was at {place}"
            self._noticed.set()
        later = 0.0 if world.is_main else OTHER_RANKS_LATER_SECONDS
        if not self._over.wait(OWN_ERROR_SECONDS + later):
            self.end(self._reason)

    def _send(self, line: str) -> None:
        """Send a line to all that this rank is connected with."""
        for connection in [*self._connections]:
            with contextlib.suppress(OSError):  # it may be gone
                connection.sendall(f"{line}\n".encode())

    def _close(self) -> None:
        for connection in (*self._connections, *([self._server] if self._server else [])):
            connection.close()


def _lines(connection: socket.socket) -> Iterator[str]:
    """The lines that come from the other end of a connection, until it is closed."""
    text = b""
    with contextlib.suppress(OSError):
        while found := connection.recv(4096):
            *lines, text = (text + found).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)


def _listen(on_one_machine: bool) -> socket.socket:
    """A server on a free port: of this machine's networks only where others are to reach it."""
    if on_one_machine:
        return socket.create_server((LOOPBACK, 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel ask an idle peer for a sign of life: a machine without power closes no connection."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted: dict[str, Any] = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}  # about 70 s
    for name, value in wanted.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Watchdog:
    """Threads beside the main thread, which calls `world.mark_progress` and `world.waiting_for`.

    The rank record is written by a thread of its own: a disk that hangs stops neither the training nor the
    watchdog. It is removed at the end of the `with` block, and stays after an error.
    """

    def __init__(
        self, world: Communicator, stop: StopFlag, timeout: float, end: Callable[[str], None], record: Path
    ) -> None:
        self.world, self.stop, self.timeout, self.record = world, stop, timeout, record
        self.end = end
        """`end(reason)` ends this process."""
        self._process = f"{os.getpid()} on {socket.gethostname()}"
        self._parent = os.getppid()
        self._main_thread = threading.get_ident()
        self._stopped = threading.Event()
        self._period = max(0.2, min(1.0, timeout / 10))
        self._stores: dict[int, Any] = {}
        self._beats: deque[tuple[int, float]] = deque(maxlen=BEATS_KEPT)
        """Of this process: its beat's number among those of all ranks, and when that was by its own clock."""
        self._recorder = threading.Thread(target=self._record, name="rank record", daemon=True)

    def __enter__(self) -> Watchdog:
        self.world.mark_progress("the start")
        if self.timeout:
            threading.Thread(target=self._watch, name="watch", daemon=True).start()
        if self.timeout and self.world.is_main:
            self._recorder.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopped.set()
        if self._recorder.is_alive():
            self._recorder.join(1.0)
        if self.world.is_main and (kind is None or issubclass(kind, StopRequestedError)):
            self.record.unlink(missing_ok=True)

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._stopped.wait(self._period):
            since, looked = time.monotonic() - looked, time.monotonic()
            if since > self._period + SUSPENDED_SECONDS:
                self.world.moved_at = looked
            if os.getppid() != self._parent and self.world.size > 1:
                self.stop.request("the launcher that started it is gone")
            self._publish()
            idle_seconds = time.monotonic() - self.world.moved_at
            if idle_seconds > self.limit() and not self._stopped.is_set():
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                self.end(self._reason(idle_seconds))

    def _record(self) -> None:
        while True:
            with contextlib.suppress(OSError, RuntimeError):  # a full disk, a store that is gone
                self.write_record()
            if self._stopped.wait(SECONDS_BETWEEN_RECORDS):
                return

    def write_record(self) -> None:
        """Write the rank record anew. It is not synced: it is of use to this machine's present only."""
        ranks = [{"rank": rank, **self._position_of(rank)} for rank in range(self.world.size)]
        temporary = self.record.with_name(f".{self.record.name}.tmp")
        temporary.write_text(json.dumps({"written": time.time(), "ranks": ranks}), encoding="utf-8")
        if not self._stopped.is_set():
            temporary.replace(self.record)

    def limit(self) -> float:
        """Seconds without progress after which this process is ended."""
        stopping = self.stop.requested and not self.world.is_finishing
        limit = min(self.timeout, TIMEOUT_AFTER_SIGNAL_SECONDS) if stopping else self.timeout
        return limit + (WAITING_RANK_DELAY_SECONDS if self.world.waiting else 0)

    def _store(self) -> Any:
        """The store, by a connection of the calling thread's own.

        A count waits for the store's answer, for a minute where its host has ended; the main thread must not
        wait for the same lock.
        """
        thread = threading.get_ident()
        if thread not in self._stores and (store := self.world.store()) is not None:
            self._stores[thread] = store.clone() if hasattr(store, "clone") else store
        return self._stores.get(thread)

    def _publish(self) -> None:
        """Write what this process is doing to the store, for the others to read."""
        if (store := self._store()) is None:
            return
        with contextlib.suppress(RuntimeError):
            beat = store.add(BEATS, 1)
            self._beats.append((beat, time.monotonic()))
            store.set(_position_key(self.world.rank), json.dumps({**self._position(), "beat": beat}))

    def _position(self) -> dict[str, Any]:
        """What this process is doing: its place, the collective that it waits in, its line, since when."""
        return {
            "process": self._process,
            "place": self.world.position,
            "waiting": self.world.waiting,
            "code": self._innermost_line(),
            "still_seconds": round(time.monotonic() - self.world.moved_at, 1),
        }

    def _position_of(self, rank: int) -> dict[str, Any]:
        """What a rank published, and the seconds of its silence; empty where it was never heard of.

        Of its silence by this process's clock: the time since its own first beat after that rank's last.
        Raises RuntimeError where the store is gone.
        """
        if rank == self.world.rank:
            return {**self._position(), "silent_seconds": 0.0}
        store = self._store()
        if not store.check([_position_key(rank)]):
            return {}
        found: dict[str, Any] = json.loads(store.get(_position_key(rank)))
        last, now = found.pop("beat"), time.monotonic()
        heard = min((when for number, when in list(self._beats) if number > last), default=now)
        return {**found, "silent_seconds": round(now - heard, 1)}

    def _reason(self, idle_seconds: float) -> str:
        here = f"rank {self.world.rank} has stood still for {idle_seconds:.0f} s at {self.world.position}"
        if not self.world.waiting:
            return f"{here}, in {self._innermost_line()}"
        others = map(self._why_stuck, range(self.world.size))
        why = "; ".join(filter(None, others)) or "all of them wait as well"
        return f"{here}, waiting in {self.world.waiting} for the others: {why}"

    def _why_stuck(self, rank: int) -> str:
        """Why another rank may be the stuck one; empty for this rank and for ranks in a collective."""
        if rank == self.world.rank or self.world.size == 1:
            return ""
        try:
            found = self._position_of(rank)
        except RuntimeError:
            return "the store is gone"
        if not found:
            return f"rank {rank} was never heard of"
        place, silent = found["place"], found["silent_seconds"]
        if silent > 2 * self._period + 1:
            return f"rank {rank} has said nothing for {silent:.0f} s; it was at {place}"
        return "" if found["waiting"] else f"rank {rank} is at {place}, in {found['code']}"

    def _innermost_line(self) -> str:
        """The innermost line of the main thread outside installed libraries."""
        # Documented by Python, though its name begins with an underscore.
        frame: FrameType | None = sys._current_frames().get(self._main_thread)  # noqa: SLF001
        while frame is not None and ("site-packages" in frame.f_code.co_filename or frame.f_back is None):
            frame = frame.f_back
        if frame is None:
            return "a library"
        return f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _position_key(rank: int) -> str:
    """Key of the store under which a rank says what it is doing."""
    return f"isobatch/at/{rank}"
