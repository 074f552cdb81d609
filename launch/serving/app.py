"""The ASGI application of a served model: requests are read and checked, and a fault is one sentence."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.data.interactions.formats import usual_column
from isobatch.launch.predicting.predict import Answerer
from isobatch.launch.predicting.tables import ITEMS_COLUMN, UnansweredRowError, UserReader, without_values
from isobatch.models.protocols import Predictor

Asked = tuple[Sequence[Any], asyncio.Future[list[dict[str, Any]]]]
"""Samples, and where their answers go."""


MAX_BODY_BYTES = 1 << 20
MAX_ANSWERED = 500
"""Characters of a sentence: it may repeat what was sent."""
MAX_SAMPLES = 1024
"""Texts or rows of a request."""
MAX_CHARACTERS = 1 << 16
"""Of one of them: all are tokenized, though the model reads less."""
LIST_FIELDS, MAX_TOP = ("user", ITEMS_COLUMN, "top", "without"), 1000
"""What only a recommender reads, and the longest list that a client may ask for."""
PART_SAMPLES, BATCH_SAMPLES = 32, 256
"""A request takes turns with others after so many; a batch takes no further request once it has so many."""


def error_body(message: str, status: int) -> dict[str, Any]:
    """The body of an error, as OpenAI's API has it."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    said = " ".join(message.split())[:MAX_ANSWERED]
    return {"error": {"message": said, "type": kind, "param": None, "code": None}}


def error_response(message: str, status: int) -> JSONResponse:
    """The answer to a request that cannot be answered."""
    return JSONResponse(error_body(message, status), status)


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body. Raises HTTPException."""
    # A web page may send other kinds to any server without asking it first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "Content-Type: must be application/json (curl --json '{...}')")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB: send less")
    try:
        found = json.loads(text := body.decode())
        if "\\u" in text:  # halves of characters can be no text
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise HTTPException(400, f"the body is {type(found).__name__}, not a JSON object")
    return found


def refuse_unknown(body: Mapping[str, Any], known: Collection[str], where: str = "") -> None:
    """Raise HTTPException for a field that means nothing here, or `where`, an object within the body."""
    for name in body:
        if name not in known:
            said = f"there is no such field{nearest_hint(name[:100], known)}; there are {', '.join(known)}"
            raise HTTPException(400, f"{where}{name[:100]}: {said}")


class BatchingQueue:
    """Answers what several requests ask together. While the model computes, the next batch gathers."""

    def __init__(self, predict: Predictor) -> None:
        self._predict, self._thread = predict, ThreadPoolExecutor(1, thread_name_prefix="model")
        self._waiting: list[Asked] = []
        self._turn = asyncio.Lock()

    async def ask(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """An answer for each sample. Raises what the model raises for these samples."""
        answers: asyncio.Future[list[dict[str, Any]]] = asyncio.get_running_loop().create_future()
        self._waiting.append((samples, answers))
        async with self._turn:  # who has it computes for all who wait
            while not answers.done():
                taken: list[Asked] = []
                while self._waiting and sum(len(samples) for samples, _ in taken) < BATCH_SAMPLES:
                    taken.append(self._waiting.pop(0))
                await asyncio.shield(self._answer(taken))
        return await answers

    async def _answer(self, taken: Sequence[Asked]) -> None:
        """Raises nothing: an error is for those whose samples they are."""
        together = [sample for samples, _ in taken for sample in samples]
        try:
            loop = asyncio.get_running_loop()
            found = iter(await loop.run_in_executor(self._thread, self._predict, together))
        except Exception as error:
            if isinstance(error, UserError) and len(taken) > 1:  # only whose sample is wrong shall hear of it
                for asked in taken:
                    await self._answer([asked])
                return
            for _, answers in taken:
                answers.set_exception(error)
            return
        for samples, answers in taken:
            own = [next(found) for _ in samples]
            if not answers.done():  # a client that left has cancelled it
                answers.set_result(own)


def prediction_app(name: str, answerer: Answerer) -> Starlette:
    """POST /predict with {"texts": [...]} or {"rows": [{...}]}: {"predictions": [...]}.

    A recommender also takes {"items": [...]}, what a user took who was not in training, `top` and `without`.
    Of whom it knows nothing it gives the popular list.
    """
    queue = BatchingQueue(answerer.predict)

    async def predict(request: Request) -> Response:
        answers, (samples, unanswered) = [], _samples(await read_body(request), answerer)
        for start in range(0, len(samples), PART_SAMPLES):
            if await request.is_disconnected():
                raise ClientDisconnect
            answers += await queue.ask(samples[start : start + PART_SAMPLES])
        blank = without_values(answers[0])
        for place, why in unanswered.items():  # in order: each finds those before it in their places
            answers.insert(place, {**blank, "error": why})
        return JSONResponse({"model": name, "predictions": answers})

    return application([Route("/predict", predict, methods=["POST"])], name)


def _samples(body: dict[str, Any], answerer: Answerer) -> tuple[list[Any], dict[int, str]]:
    """The samples, and place -> why one has no answer. Raises HTTPException, and UserError for a text or row
    that cannot be read, or where none has an answer.
    """
    rows, top, without = answerer.rows, None, list[Any]()
    users = rows if isinstance(rows, UserReader) else None
    refuse_unknown(body, ("texts", "rows", *(LIST_FIELDS if users else ())))
    if users:
        top, without = body.pop("top", None), body.pop("without", [])
        if top is not None and (type(top) is not int or not 1 <= top <= MAX_TOP):
            raise HTTPException(400, f"top: must be a whole number from 1 to {MAX_TOP:,}")
        if not isinstance(without, list) or len(without) > MAX_SAMPLES:
            raise HTTPException(400, f"without: must be a list of ids or titles, {MAX_SAMPLES:,} at most")
        if body and body.keys() <= {"user", ITEMS_COLUMN}:
            body = {"rows": [{users.column or k if k == "user" else k: v for k, v in body.items()}]}
    if len(body) != 1:
        raise HTTPException(400, 'give {"texts": [...]} or {"rows": [{...}]}')
    ((field, values),) = body.items()
    if not isinstance(values, list) or not 1 <= len(values) <= MAX_SAMPLES:
        raise HTTPException(400, f"{field}: must be a list of 1 to {MAX_SAMPLES} entries")
    if field == "rows" and not all(isinstance(row, dict) for row in values):
        raise HTTPException(400, "rows: must be objects, as columns by name")
    if any(len(str(value)) > MAX_CHARACTERS for value in values):
        raise HTTPException(400, f"{field}: each may have at most {MAX_CHARACTERS:,} characters")
    if users and field == "texts":
        values = [{users.column or "user": value} for value in values]
    read = rows.from_row if users or field == "rows" else rows.from_text
    samples, unanswered = list[Any](), dict[int, str]()
    for place, value in enumerate(values):
        if users:  # of what a row may hold nothing must be there, so that a wrong field would go unnoticed
            column = users.column or usual_column("user", value) or "user"
            refuse_unknown(value, (column, ITEMS_COLUMN), f"{field}[{place}]: ")
        try:
            samples.append(read(value, f"{field}[{place}]"))
        except UnansweredRowError as error:
            unanswered[place] = str(error)
    if not samples:
        raise UserError(unanswered[0])
    out = tuple(dict.fromkeys(map(str, without)))
    return [one._replace(top=top, without=out) for one in samples] if users else samples, unanswered


def application(routes: list[Route], name: str) -> Starlette:
    """The routes, a description at /, and an answer in one sentence to whatever goes wrong."""
    paths = [route.path for route in routes]

    async def describe(_: Request) -> Response:
        return JSONResponse({"model": name, "paths": paths})

    async def refuse(request: Request, error: Exception) -> Response:
        """To a client who has left anything may be said."""
        status, said = getattr(error, "status_code", 400), getattr(error, "detail", str(error))
        if said == "Not Found":
            said = f"{request.method} {request.scope['path']}: no such path; there are {', '.join(paths)}"
        return error_response(said, status)

    async def report_bug(_: Request, error: Exception) -> Response:
        traceback.print_exception(error)
        return error_response("the server failed; its terminal says why", 500)

    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, UserError, ClientDisconnect), refuse)
    handlers[Exception] = report_bug
    return Starlette(routes=[Route("/", describe), *routes], exception_handlers=handlers)
