"""One client's connection: a request has a limited time to come, and a limited share of the server's."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from asyncio import TimerHandle

READ_SECONDS = 20.0
"""How long a request may take to come, its body with it."""
PARSE_SECONDS = 0.03
"""The processor time that it may take to be parsed: a mebibyte in ordinary pieces takes 0.01."""
BYTES_AT_A_TIME = 8192
"""Others are served between so many bytes: in pieces of one byte they take 14 ms to parse."""


class LimitedConnection(H11Protocol, asyncio.BufferedProtocol):
    """HTTP/1.1 as uvicorn reads it, which sets no limit but to an idle connection that has asked before.

    What a client sends behind an early answer counts too.
    """

    _buffer = bytearray(BYTES_AT_A_TIME)
    """Of all connections: what comes is copied at once."""
    _parsing = 0.0
    _deadline: TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def get_buffer(self, _: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse what came, and end a request that has had its share."""
        began = time.thread_time()
        self.data_received(bytes(self._buffer[:nbytes]))
        self._parsing += time.thread_time() - began
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):  # the request is whole
            self._deadline.cancel()
            self._parsing = 0.0
        elif self._parsing > PARSE_SECONDS:
            self._end("the request comes in too many pieces")
        elif self._deadline.cancelled():
            self._watch()

    def _watch(self) -> None:
        said = f"the request did not come within {READ_SECONDS:g} seconds"
        self._deadline = self.loop.call_later(READ_SECONDS, self._end, said)

    def _end(self, why: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            self.send_400_response(why)
        self.transport.close()
