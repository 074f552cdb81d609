"""Who may ask a served model, what is answered while it loads, and what a connection may take."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import os
import signal
import time
from asyncio import TimerHandle
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from isobatch.core.errors import DONE, UserError
from isobatch.launch.serving.app import error_response

LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY_VARIABLE = "ISOBATCH_API_KEY"
READ_SECONDS = 20.0
"""How long a request may take to come, its body with it."""
PARSE_SECONDS = 0.03
"""The processor time that it may take to be parsed: a mebibyte in ordinary pieces takes 0.01."""
BYTES_AT_A_TIME = 8192
"""Others are served between so many bytes: in pieces of one byte they take 14 ms to parse."""


class Door:
    """The ASGI application that stands before that of the model.

    `hosts`: names by which the server may be called, beside those of loopback: a web page of another name
    cannot be led to it (DNS rebinding). `key`: what clients must send.
    """

    def __init__(self, name: str, model: Future[ASGIApp], hosts: list[str], key: str | None) -> None:
        self._anywhere = not {"0.0.0.0", "::"}.isdisjoint(hosts)
        self._names = {host.strip().lower() for host in (*LOOPBACK, *hosts)} - {""}
        self._name, self._model, self._key = name, model, key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer(Headers(scope=scope), scope["path"])
        await (answer or self._model.result())(scope, receive, send)

    def _answer(self, headers: Headers, path: str) -> Response | None:
        """What is answered here; None where the model is asked."""
        if not self._is_named(host := headers.get("host", "")):
            return error_response(f"Host: {host!r} is no name of this server: see --allow-host", 403)
        is_ready = self._model.done() and not self._model.exception()
        if path in ("/health", "/ready"):  # without a key: a supervisor has none
            said = {"model": self._name, "ready": is_ready}
            return JSONResponse(said, 200 if is_ready or path == "/health" else 503)
        # Headers are read as latin-1, whatever was sent; bytes are compared in constant time.
        given, expected = headers.get("authorization", "").encode("latin-1"), f"Bearer {self._key}".encode()
        if self._key and not hmac.compare_digest(given, expected):
            return error_response("Authorization: must be 'Bearer KEY', with this server's key", 401)
        waiting = "the model is being loaded: /ready answers 200 once it can be asked"
        return None if is_ready else error_response(waiting, 503)

    def _is_named(self, header: str) -> bool:
        """Whether a `Host` is this server; where it listens everywhere, any address in digits is."""
        try:
            name = (urlsplit(f"//{header}").hostname or "").rstrip(".")
            return name in self._names or (self._anywhere and bool(ipaddress.ip_address(name)))
        except ValueError:
            return False


def read_key(file: str | None) -> str | None:
    """The key that clients must send: of --api-key, else of the environment; None where there is none.

    Raises UserError, which never repeats what was typed: it may be the key.
    """
    if file is None and KEY_VARIABLE not in os.environ:
        return None
    with contextlib.suppress(OSError, ValueError):
        text = Path(file).expanduser().read_text(encoding="utf-8") if file else os.environ[KEY_VARIABLE]
        if (key := text.strip()) and key.isprintable():
            return key
    raise UserError(f"--api-key: give a file that holds the key in one line, or set {KEY_VARIABLE} to it")


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


class Server(uvicorn.Server):
    """uvicorn's, which Ctrl-C ends at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig != signal.SIGINT:
            return super().handle_exit(sig, frame)
        # Nothing is to be saved, and an interpreter takes seconds to take torch and its threads down.
        os.write(2, b"isobatch: the server has ended\n")
        os._exit(DONE)


def new_server(app: Any) -> Server:
    """The server of an application, with what a connection may take."""
    # Errors are printed by the application; what is open at Ctrl-C is cut off without a word. More than 512
    # connections are answered with 503, as a process may often hold 1,024 open files.
    settings: dict[str, Any] = {"log_level": "critical", "access_log": False, "timeout_graceful_shutdown": 0}
    settings |= {"http": LimitedConnection, "ws": "none", "lifespan": "off", "proxy_headers": False}
    return Server(uvicorn.Config(app, **settings, limit_concurrency=512))
