"""Who may ask a served model, and what is answered while it loads."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from isobatch.core.errors import UserError
from isobatch.launch.serving.requests import error_response

if TYPE_CHECKING:
    from concurrent.futures import Future

    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY_VARIABLE = "ISOBATCH_API_KEY"


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
