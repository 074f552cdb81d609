"""OpenAI's endpoints for one language model: /v1/models, /v1/completions, /v1/chat/completions.

Requests take turns by the token: each piece of text is one task of the model's thread.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.package import table_beside
from isobatch.data.chat_formats import VALUES_COLUMN, parse_message_list, template_values
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.launch.serving.app import application, error_body, read_body, refuse_unknown
from isobatch.models.causal_lm.generation import Sampling, TextStream

COMPLETION_TOKENS, ANSWER_TOKENS = 16, 256
"""`max_tokens` where the request has none: OpenAI's, and enough for an answer."""
MAX_TOKENS, MAX_SEED = 1 << 20, (1 << 63) - 1
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_RENDERED = 1 << 25
"""Messages times characters, at least 64 of each: what stands before each answer is rendered anew."""
_FIELDS = table_beside(__file__, "openai_fields")
ONLY: dict[str, list[Any]] = _FIELDS["only"]
"""Fields of which only these values are supported."""


def _number(least: float, most: float, *kinds: type) -> tuple[Callable[[Any], bool], str]:
    def is_right(value: Any) -> bool:
        return type(value) in kinds and least <= value <= most

    return is_right, f"must be a {'' if float in kinds else 'whole '}number from {least:g} to {most:g}"


def _are_stops(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    is_few = isinstance(texts, list) and len(texts) <= MAX_STOPS
    return is_few and all(isinstance(text, str) and 1 <= len(text) <= MAX_STOP_LENGTH for text in texts)


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("model", "messages", "tools", *_FIELDS["changes_nothing"]), (lambda _: True, "")),
    VALUES_COLUMN: (lambda value: isinstance(value, dict), "must be an object"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), _number(1, MAX_TOKENS, int)),
    "temperature": _number(0, 2, int, float),
    "top_p": _number(1e-6, 1, int, float),
    "top_k": _number(0, MAX_TOKENS, int),
    "seed": _number(-MAX_SEED - 1, MAX_SEED, int),
    "stop": (
        _are_stops,
        f"must be a text of 1 to {MAX_STOP_LENGTH} characters, or a list of {MAX_STOPS} at most",
    ),
    "prompt": (lambda value: isinstance(value, str), "must be a text"),
    "stream": (lambda value: isinstance(value, bool), "must be true or false"),
    "stream_options": (
        lambda value: isinstance(value, dict) and value.get("include_usage") in (None, True, False),
        'must be {"include_usage": true}, or false',
    ),
    **{name: (values.__contains__, f"only {values[0]!r} is supported") for name, values in ONLY.items()},
}
"""Field -> what is right, and what is said of everything else."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What is to be written, and how many tokens that took so far."""

    model: str
    prompt: Any
    """A text, or segments of a conversation."""
    sampling: Sampling
    stops: list[str]
    is_chat: bool
    stream: bool
    include_usage: bool
    """Whether a stream ends with the number of tokens."""
    usage: Counter[str] = field(default_factory=Counter)

    def head(self) -> dict[str, Any]:
        """The fields of a whole answer, and of each piece of a stream."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        kind += ".chunk" if self.is_chat and self.stream else ""
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}

    def choice(self, text: str, reason: str | None, **role: str) -> dict[str, Any]:
        """A text; of a conversation a whole `message`, or the `delta` to one."""
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"delta" if self.stream else "message": {**role, "content": text}}
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def parse(body: Mapping[str, Any], name: str, template: ChatTemplate | None, is_chat: bool) -> Completion:
    """A request for the text behind a prompt, or for the answer in a conversation. A null is as no field.
    Raises HTTPException; UserError for messages that are none, or that the chat template refuses.
    """
    body = {field: value for field, value in body.items() if value is not None}
    of_chats = {"messages", "max_completion_tokens", "tools", VALUES_COLUMN}
    refuse_unknown(body, [name for name in FIELDS if name not in ({"prompt"} if is_chat else of_chats)])
    for one, value in (body if is_chat else {"prompt": None, **body}).items():
        is_right, said = FIELDS[one]
        if not is_right(value):
            raise HTTPException(400, f"{one}: {said}")
    if (model := body.get("model", name)) != name:
        raise HTTPException(404, f"model: there is no {model!r} here: this server has {name!r}")
    usual = ANSWER_TOKENS if is_chat else COMPLETION_TOKENS
    most = body.get("max_completion_tokens", body.get("max_tokens", usual))
    end = template.end_id if is_chat and template else None
    drawn = {name: body[name] for name in ("temperature", "top_p", "top_k", "seed") if name in body}
    sampling = Sampling(max_new_tokens=most, stop_token_id=end, **{"temperature": 1.0, **drawn})
    prompt = _conversation(body, name, template) if is_chat else body["prompt"]
    usage = bool(body.get("stream_options", {}).get("include_usage"))
    stops = [found] if isinstance(found := body.get("stop", []), str) else found
    return Completion(name, prompt, sampling, stops, is_chat, body.get("stream", False), usage)


def _conversation(body: Mapping[str, Any], name: str, template: ChatTemplate | None) -> Any:
    if template is None:
        raise HTTPException(400, f"{name} was not trained on conversations: use /v1/completions")
    messages = parse_message_list({"messages": body.get("messages")}, "messages", "the request")
    if len(messages) * sum(max(len(message["content"]), 64) for message in messages) > MAX_RENDERED:
        raise HTTPException(413, f"messages: {len(messages)} are too long together: leave out the first")
    if not messages or messages[-1]["role"] == "assistant":
        raise HTTPException(400, "messages: must be a list of messages, and the last one not the assistant's")
    values = template_values({k: v for k, v in body.items() if k in ("tools", VALUES_COLUMN)}, "the request")
    return template.prompt_segments(messages, "messages", values)


def until_stop(text: TextStream, stops: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(text, None) for each token, up to a stop string: what may be its beginning is held back, so that the
    text may be empty. At the end the rest, and why it ended.
    """
    starts = [stop[:length] for stop in stops for length in range(1, len(stop))]
    held = ""
    for piece in text:
        held += piece
        if places := [at for stop in stops if (at := held.find(stop)) >= 0]:
            yield held[: min(places)], None
            yield "", "stop"
            return
        length = len(held) - max((len(start) for start in starts if held.endswith(start)), default=0)
        yield held[:length], None
        held = held[length:]
    yield held, "length" if text.is_full else "stop"


def language_model_app(
    name: str, write_text: Callable[[Any, Any], TextStream], template: ChatTemplate | None
) -> Starlette:
    """OpenAI's endpoints. `template`: how the conversations were written that it was trained on."""
    model, rendering, began = ThreadPoolExecutor(1), ThreadPoolExecutor(1), int(time.time())

    async def models(_: Request) -> Response:
        described = {"id": name, "object": "model", "created": began, "owned_by": "isobatch"}
        return JSONResponse({"object": "list", "data": [described]})

    async def completions(request: Request) -> Response:
        """Of both kinds, by the path."""
        body, is_chat = await read_body(request), "chat" in request.url.path
        loop = asyncio.get_running_loop()
        # One process renders templates: a text to go on with does not wait for it.
        thread = rendering if is_chat else None
        asked = await loop.run_in_executor(thread, parse, body, name, template, is_chat)
        if asked.stream:
            return StreamingResponse(events(asked), media_type="text/event-stream")
        text, reason = "", ""
        async for piece, why in written(asked):
            text, reason = text + piece, why or ""
            if await request.is_disconnected():
                raise ClientDisconnect
        choice = asked.choice(text, reason, role="assistant")
        return JSONResponse(asked.head() | {"choices": [choice], "usage": asked.usage})

    async def events(asked: Completion) -> AsyncIterator[str]:
        """Server-sent events: a JSON object for each piece of text, and [DONE]."""
        head = asked.head() | ({"usage": None} if asked.include_usage else {})
        role = {"role": "assistant"}
        try:
            async for piece, reason in written(asked):
                if piece or reason or role:
                    yield _event(head | {"choices": [asked.choice(piece, reason, **role)]})
                role = {}
            if asked.include_usage:
                yield _event(head | {"choices": [], "usage": asked.usage})
        except UserError as error:
            yield _event(error_body(str(error), 400))
        yield "data: [DONE]\n\n"

    async def written(asked: Completion) -> AsyncIterator[tuple[str, str | None]]:
        """As of `until_stop`, each piece a task of the model's thread."""
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(model, write_text, asked.prompt, asked.sampling)
        pieces = until_stop(text, asked.stops)
        while found := await loop.run_in_executor(model, next, pieces, None):
            yield found
        asked.usage.update(prompt_tokens=text.prompt_tokens, completion_tokens=text.tokens)
        asked.usage.update(total_tokens=text.prompt_tokens + text.tokens)

    paths = ("/v1/completions", "/v1/chat/completions")
    posted = [Route(path, completions, methods=["POST"]) for path in paths]
    return application([Route("/v1/models", models), *posted], name)


def _event(value: dict[str, Any]) -> str:
    return f"data: {atomic_files.json_text(value, ensure_ascii=False)}\n\n"
