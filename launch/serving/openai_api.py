"""OpenAI's endpoints for one language model: /v1/models, /v1/completions, /v1/chat/completions.

Requests take turns by the token: each piece of text is one task of the model's thread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.data.chat_formats import ROLE_ALIASES, ROLES
from isobatch.launch.serving.app import RequestError, application, error_body, read_body, refuse_unknown
from isobatch.launch.serving.model_thread import ModelThread
from isobatch.models.causal_lm.generation import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from starlette.applications import Starlette
    from starlette.responses import Response

    from isobatch.data.chat_formats import Message
    from isobatch.data.text.chat_templates import ChatTemplate
    from isobatch.models.protocols import WrittenText

MAX_TOKENS = 1 << 20
COMPLETION_TOKENS, ANSWER_TOKENS = 16, 256
"""--max_tokens where the request has none: OpenAI's, and enough for an answer."""
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_PROMPTS = 128
MAX_RENDERED = 1 << 25
"""Messages times characters, at least 64 of each: what stands before each answer is rendered anew."""
READ = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options")
CHANGES_NOTHING = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields about the caller; no answer depends on them."""
ONLY: dict[str, tuple[Any, ...]] = {
    **{"n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False,)},
    **{"top_logprobs": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},)},
    **{"tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False)},
    **{"response_format": ({"type": "text"},), "modalities": (["text"],)},
}
"""Fields of which only these values are supported; null is as if they were not there."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What is to be written, and how many tokens that took so far."""

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

    def head(self, model: str) -> dict[str, Any]:
        """The fields of a whole answer, and of each piece of a stream."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        kind += ".chunk" if self.is_chat and self.stream else ""
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def choice(self, index: int, text: str, reason: str | None, **role: str) -> dict[str, Any]:
        """A text; of a conversation a whole `message`, or the `delta` to one."""
        said: dict[str, Any] = {"text": text}
        if self.is_chat:
            said = {"delta" if self.stream else "message": {**role, "content": text}}
        return {"index": index, **said, "logprobs": None, "finish_reason": reason}


def parse_completion(body: Mapping[str, Any], name: str, template: ChatTemplate | None) -> Completion:  # noqa: ARG001  as `parse_chat`
    """A request for the text behind one prompt or several. Raises RequestError."""
    _check_fields(body, (*READ, "prompt"), name)
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not 1 <= len(prompts) <= MAX_PROMPTS or not all(isinstance(p, str) for p in prompts):
        raise RequestError(f"prompt: must be a text, or a list of 1 to {MAX_PROMPTS} texts", field="prompt")
    most = _number(body, "max_tokens", COMPLETION_TOKENS, 1, MAX_TOKENS)
    return _completion(body, prompts, most, None, is_chat=False)


def parse_chat(body: Mapping[str, Any], name: str, template: ChatTemplate | None) -> Completion:
    """A request for the answer in a conversation. Raises RequestError; UserError where the model's own chat
    template refuses it.
    """
    _check_fields(body, (*READ, "messages", "max_completion_tokens"), name)
    if template is None:
        raise RequestError(f"{name} was not trained on conversations: use /v1/completions")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: must be a list of messages", field="messages")
    parsed = [_parse_message(m, f"messages[{n}]") for n, m in enumerate(messages)]
    if len(parsed) * sum(max(len(message["content"]), 64) for message in parsed) > MAX_RENDERED:
        raise RequestError(f"messages: {len(parsed)} are too long together: leave out the first", 413)
    if parsed[-1]["role"] == "assistant":
        raise RequestError("messages: the last one must not be the assistant's", field="messages")
    newer = body.get("max_completion_tokens") is not None
    most = _number(body, "max_completion_tokens" if newer else "max_tokens", ANSWER_TOKENS, 1, MAX_TOKENS)
    segments = template.prompt_segments(parsed, "messages")
    return _completion(body, [segments], most, template.end_id, is_chat=True)


def _check_fields(body: Mapping[str, Any], read: tuple[str, ...], name: str) -> None:
    refuse_unknown(body, (*read, *CHANGES_NOTHING, *ONLY))
    for one, supported in ONLY.items():
        if body.get(one) is not None and body[one] not in supported:
            raise RequestError(f"{one}: only {supported[0]!r} is supported", field=one)
    model = body.get("model", name)
    if model != name:
        raise RequestError(f"model: there is no {model!r} here: this server has {name!r}", 404, "model")


def _completion(
    body: Mapping[str, Any], prompts: list[Any], most: int, end: int | None, is_chat: bool
) -> Completion:
    drawn = Sampling(
        max_new_tokens=most,
        temperature=_number(body, "temperature", 1.0, 0, 2),
        top_k=_number(body, "top_k", 0, 0, MAX_TOKENS),
        top_p=_number(body, "top_p", 1.0, 1e-6, 1),
        seed=_number(body, "seed", 0, -(1 << 63), (1 << 63) - 1),
        stop_token_id=end,
    )
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise RequestError("stream_options: must be an object", field="stream_options")
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    stops = stops if isinstance(stops, list) and len(stops) <= MAX_STOPS else [None]
    if not all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_LENGTH for s in stops):
        said = f"stop: must be a text of 1 to {MAX_STOP_LENGTH} characters, or a list of at most {MAX_STOPS}"
        raise RequestError(said, field="stop")
    usage = _switch(options, "include_usage")
    return Completion(prompts, drawn, stops, is_chat, _switch(body, "stream"), usage)


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> Any:
    """A number in a field, whole where the default is, which stands for none and for null."""
    value: Any = body.get(name)
    if value is None:
        return default
    whole = isinstance(default, int)
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name}: must be {kind} from {least:g} to {most:g}", field=name)
    return value


def _switch(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name}: must be true or false", field=name)
    return bool(value)


def _parse_message(message: Any, where: str) -> Message:
    """Its content is a text, or the texts of a list of parts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f'{where}: must be an object with "role" and "content"', field="messages")
    role = ROLE_ALIASES.get(message["role"], message["role"])
    if role not in ROLES:
        raise RequestError(f"{where}: a role is one of {', '.join(ROLES)}", field="messages")
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[Any] = [p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
    if not texts or len(texts) < len(parts):
        raise RequestError(f"{where}: content must be a text", field="messages")
    return {"role": role, "content": "".join(texts)}


class StopStrings:
    """Passes text on that comes in pieces, but holds back what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._starts = [stop[:length] for stop in self._stops for length in range(1, len(stop))]
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


class LanguageModelApi:
    """The endpoints of one model."""

    def __init__(
        self, name: str, write_text: Callable[[Any, Any], WrittenText], template: ChatTemplate | None
    ) -> None:
        self.name, self._write_text, self._template = name, write_text, template
        self._thread, self._rendering = ModelThread(), ModelThread()
        self._began = int(time.time())

    async def models(self, _: Request) -> Response:
        described = {"id": self.name, "object": "model", "created": self._began, "owned_by": "isobatch"}
        return JSONResponse({"object": "list", "data": [described]})

    async def completions(self, request: Request) -> Response:
        """Of both kinds, by the path."""
        parse = parse_chat if "chat" in request.url.path else parse_completion
        asked = await self._rendering.run(parse, await read_body(request), self.name, self._template)
        if asked.stream:
            return StreamingResponse(self._events(asked), media_type="text/event-stream")
        choices = []
        for index, prompt in enumerate(asked.prompts):
            pieces = []
            async for piece in self._write(prompt, asked):
                pieces.append(piece)
                if await request.is_disconnected():
                    raise ClientDisconnect
            text = "".join(piece for piece, _ in pieces)
            choices.append(asked.choice(index, text, pieces[-1][1], role="assistant"))
        return JSONResponse(asked.head(self.name) | {"choices": choices, "usage": asked.usage})

    async def _events(self, asked: Completion) -> AsyncIterator[str]:
        """Server-sent events: a JSON object for each piece of text, and [DONE]."""
        head = asked.head(self.name) | ({"usage": None} if asked.include_usage else {})
        try:
            for index, prompt in enumerate(asked.prompts):
                if asked.is_chat:
                    yield _event(head | {"choices": [asked.choice(index, "", None, role="assistant")]})
                async for piece, reason in self._write(prompt, asked):
                    if piece or reason:
                        yield _event(head | {"choices": [asked.choice(index, piece, reason)]})
            if asked.include_usage:
                yield _event(head | {"choices": [], "usage": asked.usage})
        except UserError as error:
            yield _event(error_body(str(error), 400))
        yield "data: [DONE]\n\n"

    async def _write(self, prompt: Any, asked: Completion) -> AsyncIterator[tuple[str, str | None]]:
        """(text, None) for each token, the text may be empty; at last (the rest, why it ended)."""
        written = await self._thread.run(self._write_text, prompt, asked.sampling)
        asked.count("prompt_tokens", written.prompt_tokens)
        pieces, stops = iter(written), StopStrings(asked.stops)
        while not stops.found and (piece := await self._thread.run(next, pieces, None)) is not None:
            yield stops.push(piece), None
        asked.count("completion_tokens", written.tokens)
        yield stops.rest(), "length" if written.is_full and not stops.found else "stop"


def _event(value: dict[str, Any]) -> str:
    return f"data: {atomic_files.json_text(value, ensure_ascii=False)}\n\n"


def language_model_app(
    name: str, write_text: Callable[[Any, Any], WrittenText], template: ChatTemplate | None
) -> Starlette:
    """OpenAI's endpoints. `template`: how the conversations were written that it was trained on."""
    api = LanguageModelApi(name, write_text, template)
    paths = ("/v1/completions", "/v1/chat/completions")
    posted = [Route(path, api.completions, methods=["POST"]) for path in paths]
    return application([Route("/v1/models", api.models), *posted], name)
