"""The lookout: a thread that notices when the process of another rank has ended, and then ends this one.

A rank that is blocked in a collective of NCCL runs no signal handler and gets no error. So every rank keeps
a connection to rank 0, which the kernel closes when a process ends, in whatever way; a slow or a stopped
process keeps its connection. Rank 0 tells the others. In between the threads sleep: a step costs nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import StopRequestedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from isobatch.engine.distributed.communicator import Communicator

OWN_ERROR_SECONDS = 1.0
"""A lost process is an error in gloo's collectives: the main thread has this long to report it itself."""
OTHER_RANKS_LATER_SECONDS = 0.5
"""Ranks above 0 wait this much longer, so that rank 0 writes the verdict."""
CONNECT_SECONDS = 60.0
LOOPBACK = "127.0.0.1"
FAREWELL = "bye"
"""The last line of a rank whose work is done: what then happens to its process is no loss."""


class Lookout:
    """Its `with` block is this rank's work, which all ranks begin together; one process looks for nobody."""

    def __init__(self, world: Communicator, end: Callable[[str], None]) -> None:
        self.world = world
        self.end = end
        """`end(reason)` ends this process; called from the lookout's thread."""
        self._over = threading.Event()
        """Set when this rank's work is over: then nothing ends it any more."""
        self._noticed = threading.Event()
        self._reason = ""
        self._farewell = False
        self._server: socket.socket | None = None
        self._connections: list[socket.socket] = []

    def __enter__(self) -> Lookout:
        if self.world.size > 1:
            self._server = _listen(_on_one_machine()) if self.world.is_main else None
            offer = self._server and (self._server.getsockname()[1], secrets.token_hex(16))
            port, token = self.world.broadcast_object(offer)
            # A loader process that is forked from this one would keep its connections open after its death.
            os.register_at_fork(after_in_child=self._close)
            threading.Thread(target=self._run, args=(port, token), name="lookout", daemon=True).start()
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

    def _run(self, port: int, token: str) -> None:
        if self._server is not None:
            self._serve(self._server, token)
        else:
            self._follow(port, token)

    def _serve(self, server: socket.socket, token: str) -> None:
        """Rank 0's thread: hear every rank, and tell all of the first that is lost."""
        present: set[int] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ, None)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        connection, _ = server.accept()
                        _keep_alive(connection)
                        selector.register(connection, selectors.EVENT_READ, _Peer(connection, token))
                        self._connections.append(connection)
                        continue
                    peer: _Peer = key.data
                    for line in peer.read():
                        present = present - {peer.rank} if line == FAREWELL else present | {peer.rank}
                    if peer.closed:
                        selector.unregister(peer.connection)
                        self._connections.remove(peer.connection)
                        peer.connection.close()
                        if peer.rank in present:
                            self._send(f"lost {peer.rank}")
                            self._notice(peer.rank)

    def _follow(self, port: int, token: str) -> None:
        """The thread of every other rank: hear rank 0."""
        host = LOOPBACK if _on_one_machine() else os.environ.get("MASTER_ADDR", "localhost")
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
        rank_0 = _Peer(connection)
        while not rank_0.closed:
            for line in rank_0.read():
                if line == FAREWELL:
                    return
                self._notice(int(line.removeprefix("lost ")))
        self._notice(0)

    def _notice(self, rank: int) -> None:
        """Rank `rank` is lost: end this process unless its main thread does so itself."""
        if self._noticed.is_set() or self._over.is_set():
            return
        world = self.world
        place = f"{world.position}, waiting in {world.waiting}" if world.waiting else world.position
        self._reason = f"rank {rank} is lost, its process has ended; rank {world.rank} was at {place}"
        self._noticed.set()
        later = 0.0 if world.is_main else OTHER_RANKS_LATER_SECONDS
        if not self._over.wait(OWN_ERROR_SECONDS + later):
            self.end(self._reason)

    def _send(self, line: str) -> None:
        """Send a line to all that this rank is connected with."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it may be gone
                connection.sendall(f"{line}\n".encode())

    def _close(self) -> None:
        for connection in (*self._connections, *([self._server] if self._server else [])):
            connection.close()


class _Peer:
    """The other end of a connection: reads its lines. With a token, the first must be `TOKEN RANK`."""

    def __init__(self, connection: socket.socket, token: str = "") -> None:
        self.connection, self._token = connection, token
        self.rank = -1
        """Unknown, until its first line."""
        self.closed = False
        self._text = b""

    def read(self) -> Iterator[str]:
        """Wait for bytes; the whole lines among them."""
        try:
            found = self.connection.recv(4096)
        except OSError:
            found = b""
        self.closed = not found
        *lines, self._text = (self._text + found).split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            if self._token and self.rank < 0:
                said, _, rank = text.partition(" ")
                if not hmac.compare_digest(said.encode(), self._token.encode()):
                    self.closed = True  # a stranger
                    return
                self.rank = int(rank)
            yield text


def _on_one_machine() -> bool:
    """Whether the launcher says that all processes of the world are on this machine."""
    local, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return local is not None and local == world


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
