"""OpenAI's endpoints for one language model: /v1/models, /v1/completions, /v1/chat/completions.

Requests take turns by the token: each piece of text is one task of the model's thread.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.data.chat_formats import parse_message_list
from isobatch.launch.serving.app import application, error_body, read_body, refuse_unknown
from isobatch.models.causal_lm.generation import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from starlette.applications import Starlette
    from starlette.responses import Response

    from isobatch.data.text.chat_templates import ChatTemplate
    from isobatch.models.protocols import WrittenText

COMPLETION_TOKENS, ANSWER_TOKENS = 16, 256
"""`max_tokens` where the request has none: OpenAI's, and enough for an answer."""
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_PROMPTS = 128
MAX_RENDERED = 1 << 25
"""Messages times characters, at least 64 of each: what stands before each answer is rendered anew."""
NUMBERS: dict[str, tuple[float, float, float]] = {
    "max_tokens": (COMPLETION_TOKENS, 1, 1 << 20),
    "temperature": (1.0, 0, 2),
    "top_p": (1.0, 1e-6, 1),
    "top_k": (0, 0, 1 << 20),
    "seed": (0, -(1 << 63), (1 << 63) - 1),
}
"""Field -> its value where the request has none, and the least and the most; whole where the first is."""
READ = (*NUMBERS, "model", "stop", "stream", "stream_options")
CHANGES_NOTHING = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields about the caller; no answer depends on them."""
ONLY: dict[str, tuple[Any, ...]] = {
    **{"n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,)},
    **{"top_logprobs": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},)},
    **{"tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False)},
    **{"response_format": ({"type": "text"},), "modalities": (["text"],)},
}
"""Fields of which only these values are supported."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What is to be written, and how many tokens that took so far."""

    model: str
    prompts: list[Any]
    """Each a text, or segments of a conversation."""
    sampling: Sampling
    stops: list[str]
    is_chat: bool
    stream: bool
    include_usage: bool
    """Whether a stream ends with the number of tokens."""
    usage: dict[str, int] = field(
        default_factory=lambda: {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    )

    def count(self, name: str, tokens: int) -> None:
        self.usage[name] += tokens
        self.usage["total_tokens"] += tokens

    def head(self) -> dict[str, Any]:
        """The fields of a whole answer, and of each piece of a stream."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        kind += ".chunk" if self.is_chat and self.stream else ""
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.model}

    def choice(self, index: int, text: str, reason: str | None, **role: str) -> dict[str, Any]:
        """A text; of a conversation a whole `message`, or the `delta` to one."""
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"delta" if self.stream else "message": {**role, "content": text}}
        return {"index": index, **said, "logprobs": None, "finish_reason": reason}


def parse(body: Mapping[str, Any], name: str, template: ChatTemplate | None, is_chat: bool) -> Completion:
    """A request for the text behind one prompt or several, or for the answer in a conversation. A null is as
    no field. Raises HTTPException; UserError for messages that are none, or that the chat template refuses.
    """
    body = {field: value for field, value in body.items() if value is not None}
    asked = ("messages", "max_completion_tokens") if is_chat else ("prompt",)
    refuse_unknown(body, (*READ, *asked, *CHANGES_NOTHING, *ONLY))
    for one in body.keys() & ONLY.keys():
        if body[one] not in ONLY[one]:
            raise HTTPException(400, f"{one}: only {ONLY[one][0]!r} is supported")
    if (model := body.get("model", name)) != name:
        raise HTTPException(404, f"model: there is no {model!r} here: this server has {name!r}")
    if is_chat:
        body = {"max_tokens": body.pop("max_completion_tokens", ANSWER_TOKENS)} | body
    drawn = {field: _number(body, field, *limits) for field, limits in NUMBERS.items()}
    stops = [stop] if isinstance(stop := body.get("stop", []), str) else stop
    if not _are_texts(stops, 0, MAX_STOPS) or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        most = f"{MAX_STOP_LENGTH} characters, or a list of at most {MAX_STOPS}"
        raise HTTPException(400, f"stop: must be a text of 1 to {most}")
    if not isinstance(options := body.get("stream_options", {}), dict):
        raise HTTPException(400, "stream_options: must be an object")
    sampling = Sampling(
        max_new_tokens=drawn.pop("max_tokens"),
        stop_token_id=template.end_id if is_chat and template else None,
        **drawn,
    )
    prompts = _conversation(body, name, template) if is_chat else _prompts(body)
    usage = _switch(options, "include_usage")
    return Completion(name, prompts, sampling, stops, is_chat, _switch(body, "stream"), usage)


def _prompts(body: Mapping[str, Any]) -> list[Any]:
    prompt: Any = body.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not _are_texts(prompts, 1, MAX_PROMPTS):
        raise HTTPException(400, f"prompt: must be a text, or a list of 1 to {MAX_PROMPTS} texts")
    return [*prompts]


def _conversation(body: Mapping[str, Any], name: str, template: ChatTemplate | None) -> list[Any]:
    if template is None:
        raise HTTPException(400, f"{name} was not trained on conversations: use /v1/completions")
    messages = parse_message_list({"messages": body.get("messages")}, "messages", "the request")
    if len(messages) * sum(max(len(message["content"]), 64) for message in messages) > MAX_RENDERED:
        raise HTTPException(413, f"messages: {len(messages)} are too long together: leave out the first")
    if not messages or messages[-1]["role"] == "assistant":
        raise HTTPException(400, "messages: must be a list of messages, and the last one not the assistant's")
    return [template.prompt_segments(messages, "messages")]


def _are_texts(value: Any, least: int, most: int) -> bool:
    return isinstance(value, list) and least <= len(value) <= most and all(isinstance(v, str) for v in value)


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> Any:
    value, whole = body.get(name, default), isinstance(default, int)
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise HTTPException(400, f"{name}: must be {kind} from {least:g} to {most:g}")
    return value


def _switch(body: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value := body.get(name, False), bool):
        raise HTTPException(400, f"{name}: must be true or false")
    return value


class StopStrings:
    """Passes text on that comes in pieces, but holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._starts = [stop[:length] for stop in stops for length in range(1, len(stop))]
        self._held = ""
        self.found = False
        """Whether a stop string came."""

    def push(self, piece: str) -> str:
        """The text that may be shown after this piece."""
        self._held += piece
        places = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.found = bool(places)
        held = max((len(start) for start in self._starts if self._held.endswith(start)), default=0)
        length = min(places) if places else len(self._held) - held
        shown, self._held = self._held[:length], self._held[length:]
        return shown

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        return "" if self.found else self._held


def language_model_app(
    name: str, write_text: Callable[[Any, Any], WrittenText], template: ChatTemplate | None
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
        asked = await loop.run_in_executor(rendering, parse, body, name, template, is_chat)
        if asked.stream:
            return StreamingResponse(events(asked), media_type="text/event-stream")
        choices = []
        for index, prompt in enumerate(asked.prompts):
            pieces = []
            async for piece in written(prompt, asked):
                pieces.append(piece)
                if await request.is_disconnected():
                    raise ClientDisconnect
            text = "".join(piece for piece, _ in pieces)
            choices.append(asked.choice(index, text, pieces[-1][1], role="assistant"))
        return JSONResponse(asked.head() | {"choices": choices, "usage": asked.usage})

    async def events(asked: Completion) -> AsyncIterator[str]:
        """Server-sent events: a JSON object for each piece of text, and [DONE]."""
        head = asked.head() | ({"usage": None} if asked.include_usage else {})
        try:
            for index, prompt in enumerate(asked.prompts):
                if asked.is_chat:
                    yield _event(head | {"choices": [asked.choice(index, "", None, role="assistant")]})
                async for piece, reason in written(prompt, asked):
                    if piece or reason:
                        yield _event(head | {"choices": [asked.choice(index, piece, reason)]})
            if asked.include_usage:
                yield _event(head | {"choices": [], "usage": asked.usage})
        except UserError as error:
            yield _event(error_body(str(error), 400))
        yield "data: [DONE]\n\n"

    async def written(prompt: Any, asked: Completion) -> AsyncIterator[tuple[str, str | None]]:
        """(text, None) for each token, the text may be empty; at last (the rest, why it ended)."""
        loop = asyncio.get_running_loop()
        text = await loop.run_in_executor(model, write_text, prompt, asked.sampling)
        asked.count("prompt_tokens", text.prompt_tokens)
        pieces, stops = iter(text), StopStrings(asked.stops)
        while (
            not stops.found and (piece := await loop.run_in_executor(model, next, pieces, None)) is not None
        ):
            yield stops.push(piece), None
        asked.count("completion_tokens", text.tokens)
        yield stops.rest(), "length" if text.is_full and not stops.found else "stop"

    paths = ("/v1/completions", "/v1/chat/completions")
    posted = [Route(path, completions, methods=["POST"]) for path in paths]
    return application([Route("/v1/models", models), *posted], name)


def _event(value: dict[str, Any]) -> str:
    return f"data: {atomic_files.json_text(value, ensure_ascii=False)}\n\n"
