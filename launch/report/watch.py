"""`report RUN --watch`: the report page of a run, served to this machine alone and drawn anew."""

from __future__ import annotations

import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

LOCAL = "127.0.0.1"
DRAW_SECONDS = 5.0
"""Least time between two drawings: drawing takes processor time from the run."""


class Page:
    """The newest page, drawn when it is asked for and the last one is old."""

    def __init__(self, draw: Callable[[], str]) -> None:
        self._draw, self._lock = draw, threading.Lock()
        self._text, self._drawn_at = b"", float("-inf")

    def text(self) -> bytes:
        """The page as UTF-8. One request draws while others wait for it."""
        with self._lock:
            if time.monotonic() - self._drawn_at > DRAW_SECONDS:
                self._text = self._draw().encode(errors="replace")
                self._drawn_at = time.monotonic()
            return self._text


def make_server(draw: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """A server of the page that `draw` returns; port 0 takes any. Raises UserError where it cannot listen."""
    page = Page(draw)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").partition(":")[0] not in (LOCAL, "localhost"):
                # Another site's page may have this address under its own name (DNS rebinding).
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._answer()

        def _answer(self) -> None:
            try:
                text = page.text()
            except UserError as error:
                self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR, explain=str(error))
                return
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Requests are not worth a line each."""

    try:
        return ThreadingHTTPServer((LOCAL, port), Handler)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; leave it out to take any that is free") from None
