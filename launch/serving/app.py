"""The ASGI application of a served model."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from isobatch.core.errors import UserError
from isobatch.launch.predicting.rows import ITEMS_COLUMN, UserReader
from isobatch.launch.serving.model_thread import BatchingQueue, ModelThread
from isobatch.launch.serving.openai_api import LanguageModelApi
from isobatch.launch.serving.requests import RequestError, error_response, read_body, refuse_unknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.responses import Response

    from isobatch.data.text.chat_templates import ChatTemplate
    from isobatch.launch.predicting.answerer import Answerer
    from isobatch.models.protocols import WrittenText

MAX_SAMPLES = 1024
"""Texts or rows of a request."""
MAX_CHARACTERS = 1 << 16
"""Of one of them: all are tokenized, though the model reads less."""
PART_CHARACTERS = 1 << 13
"""A request takes turns with others after so many; a sample counts as 64 at least."""


def language_model_app(
    name: str, write_text: Callable[[Any, Any], WrittenText], template: ChatTemplate | None
) -> Starlette:
    """OpenAI's endpoints. `template`: how the conversations were written that it was trained on."""
    thread = ModelThread()
    return _application(LanguageModelApi(name, write_text, template, thread).routes(), name)


def prediction_app(name: str, answerer: Answerer) -> Starlette:
    """POST /predict with {"texts": [...]}, {"text": "..."} or {"rows": [{...}]}: {"predictions": [...]}.

    A recommender also takes {"items": [...]}, what a user took who was not in training.
    """
    thread = ModelThread()
    queue = BatchingQueue(answerer.predict, thread)

    async def predict(request: Request) -> Response:
        answers = []
        for part in _parts(_samples(await read_body(request), answerer)):
            if await request.is_disconnected():
                raise ClientDisconnect
            answers += await queue.ask(part)
        return JSONResponse({"model": name, "predictions": answers})

    return _application([Route("/predict", predict, methods=["POST"])], name)


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
    refuse_unknown(body, ("texts", "text", "rows"))
    if len(body) != 1:
        raise RequestError('give {"texts": [...]}, {"text": "..."} or {"rows": [{...}]}')
    ((field, values),) = body.items()
    if field == "text":
        field, values = "texts", values if isinstance(values, list) else [values]
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_SAMPLES:
        raise RequestError(f"{field}: must be a list of 1 to {MAX_SAMPLES} entries", field=field)
    if field == "texts":
        return [answerer.rows.from_text(value, f"texts[{n}]") for n, value in enumerate(values)]
    if not all(isinstance(row, dict) for row in values):
        raise RequestError("rows: must be objects, as columns by name", field="rows")
    return [answerer.rows.from_row(row, f"rows[{n}]") for n, row in enumerate(values)]


def _application(routes: list[Route], name: str) -> Starlette:
    paths = [route.path for route in routes if "{" not in route.path]

    async def describe(_: Request) -> Response:
        return JSONResponse({"model": name, "paths": paths})

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        there = f"{request.method} {request.scope['path']}: no such path; there are {', '.join(paths)}"
        return error_response(there if error.status_code == 404 else error.detail, error.status_code)

    handlers: dict[Any, Any] = {HTTPException: http_error, RequestError: _refuse, Exception: _report_bug}
    handlers |= {UserError: _refuse, ClientDisconnect: _refuse}
    return Starlette(routes=[Route("/", describe), *routes], exception_handlers=handlers)


async def _refuse(_: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return error_response(error.message, error.status, error.field)
    # To a client who has left anything may be said.
    return error_response(" ".join(str(error).split()), 499 if isinstance(error, ClientDisconnect) else 400)


async def _report_bug(_: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return error_response("the server failed; its terminal says why", 500)
