"""Requests that are read and checked; what is wrong is answered in one sentence, as OpenAI's API does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse

from isobatch.core.flags import nearest_hint

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from starlette.requests import Request

MAX_BODY_BYTES = 1 << 20
MAX_ANSWERED = 500
"""Characters of a sentence: it may repeat what was sent."""


class RequestError(Exception):
    """A request that cannot be answered: an HTTP status and one sentence."""

    def __init__(self, message: str, status: int = 400, field: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.field = message, status, field


def error_body(message: str, status: int, field: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message[:MAX_ANSWERED], "type": kind, "param": field, "code": None}}


def error_response(message: str, status: int, field: str | None = None) -> JSONResponse:
    """The answer to a request that cannot be answered."""
    return JSONResponse(error_body(message, status, field), status)


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body. Raises RequestError."""
    # A web page may send other kinds to any server without asking it first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("Content-Type: must be application/json (curl --json '{...}')", 415)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(
                f"the body is larger than {MAX_BODY_BYTES >> 20} MiB: send less at a time", 413
            )
    try:
        text = body.decode()
        found = json.loads(text)
        if "\\u" in text:  # halves of characters can be no text
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"the body is {type(found).__name__}, not a JSON object")
    return found


def refuse_unknown(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise RequestError for a field that means nothing here."""
    for name in body:
        if name not in known:
            raise RequestError(f"{name}: there is no such field{nearest_hint(name[:100], known)}", field=name)


def number_in(
    body: Mapping[str, Any], name: str, default: float, least: float, most: float, whole: bool = False
) -> Any:
    """A number in a field, `default` where there is none or null. Raises RequestError."""
    value: Any = body.get(name)
    if value is None:
        return default
    kinds: tuple[type, ...] = (int,) if whole else (int, float)
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name}: must be {kind} from {least:g} to {most:g}", field=name)
    return value


def switch_in(body: Mapping[str, Any], name: str) -> bool:
    """true or false in a field. Raises RequestError."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name}: must be true or false", field=name)
    return bool(value)
