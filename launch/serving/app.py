"""The ASGI application of a served model: requests are read and checked, and a fault is one sentence."""

from __future__ import annotations

import json
import traceback
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.launch.predicting.rows import ITEMS_COLUMN, UserReader
from isobatch.launch.serving.model_thread import BatchingQueue

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from starlette.responses import Response

    from isobatch.launch.predicting.answerer import Answerer

MAX_BODY_BYTES = 1 << 20
MAX_ANSWERED = 500
"""Characters of a sentence: it may repeat what was sent."""
MAX_SAMPLES = 1024
"""Texts or rows of a request."""
MAX_CHARACTERS = 1 << 16
"""Of one of them: all are tokenized, though the model reads less."""
PART_CHARACTERS = 1 << 13
"""A request takes turns with others after so many; a sample counts as 64 at least."""


class RequestError(Exception):
    """A request that cannot be answered: one sentence, an HTTP status, and the field that is wrong."""

    def __init__(self, message: str, status: int = 400, field: str | None = None) -> None:
        super().__init__(message)
        self.status, self.field = status, field


def error_body(message: str, status: int, field: str | None = None) -> dict[str, Any]:
    """The body of an error, as OpenAI's API has it."""
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


def prediction_app(name: str, answerer: Answerer) -> Starlette:
    """POST /predict with {"texts": [...]} or {"rows": [{...}]}: {"predictions": [...]}.

    A recommender also takes {"items": [...]}, what a user took who was not in training.
    """
    queue = BatchingQueue(answerer.predict)

    async def predict(request: Request) -> Response:
        answers = []
        for part in _parts(_samples(await read_body(request), answerer)):
            if await request.is_disconnected():
                raise ClientDisconnect
            answers += await queue.ask(part)
        return JSONResponse({"model": name, "predictions": answers})

    return application([Route("/predict", predict, methods=["POST"])], name)


def _parts(samples: list[Any]) -> list[list[Any]]:
    parts, size = list[list[Any]](), PART_CHARACTERS
    for number, sample in enumerate(samples):
        length = len(str(sample))
        if length > MAX_CHARACTERS:
            raise RequestError(f"sample {number}: has {length:,} characters, at most {MAX_CHARACTERS:,}")
        if size >= PART_CHARACTERS:
            parts.append([])
            size = 0
        parts[-1].append(sample)
        size += max(length, 64)
    return parts


def _samples(body: dict[str, Any], answerer: Answerer) -> list[Any]:
    """Raises RequestError, and UserError for a text or row that cannot be read."""
    if isinstance(answerer.rows, UserReader) and body.keys() == {ITEMS_COLUMN}:
        return [answerer.rows.from_row(body, "the request")]
    refuse_unknown(body, ("texts", "rows"))
    if len(body) != 1:
        raise RequestError('give {"texts": [...]} or {"rows": [{...}]}')
    ((field, values),) = body.items()
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_SAMPLES:
        raise RequestError(f"{field}: must be a list of 1 to {MAX_SAMPLES} entries", field=field)
    if field == "rows" and not all(isinstance(row, dict) for row in values):
        raise RequestError("rows: must be objects, as columns by name", field="rows")
    read = answerer.rows.from_text if field == "texts" else answerer.rows.from_row
    return [read(value, f"{field}[{n}]") for n, value in enumerate(values)]


def application(routes: list[Route], name: str) -> Starlette:
    """The routes, a description at /, and an answer in one sentence to whatever goes wrong."""
    paths = [route.path for route in routes]

    async def describe(_: Request) -> Response:
        return JSONResponse({"model": name, "paths": paths})

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        there = f"{request.method} {request.scope['path']}: no such path; there are {', '.join(paths)}"
        return error_response(there if error.status_code == 404 else error.detail, error.status_code)

    async def refuse(_: Request, error: Exception) -> Response:
        if isinstance(error, RequestError):
            return error_response(str(error), error.status, error.field)
        # To a client who has left anything may be said.
        return error_response(
            " ".join(str(error).split()), 499 if isinstance(error, ClientDisconnect) else 400
        )

    async def report_bug(_: Request, error: Exception) -> Response:
        traceback.print_exception(error)
        return error_response("the server failed; its terminal says why", 500)

    handlers: dict[Any, Any] = dict.fromkeys((RequestError, UserError, ClientDisconnect), refuse)
    handlers |= {HTTPException: http_error, Exception: report_bug}
    return Starlette(routes=[Route("/", describe), *routes], exception_handlers=handlers)
