"""OpenAI's endpoints for one language model: /v1/models, /v1/completions, /v1/chat/completions.

Requests take turns by the token: each piece of text is one task of the model's thread.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.launch.serving.model_thread import ModelThread
from isobatch.launch.serving.openai_requests import parse_chat, parse_completion
from isobatch.launch.serving.requests import RequestError, error_body, read_body
from isobatch.launch.serving.stop_strings import StopStrings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.responses import Response

    from isobatch.data.text.chat_templates import ChatTemplate
    from isobatch.launch.serving.openai_requests import CompletionRequest
    from isobatch.models.protocols import WrittenText

_END = None
"""What `next` gives once all is written."""
KINDS = {False: ("cmpl", "text_completion", "text_completion")}
KINDS |= {True: ("chatcmpl", "chat.completion", "chat.completion.chunk")}
"""Whether it is a chat -> the beginning of its id, and what an answer and a piece of one are called."""


@dataclass(slots=True)
class Tokens:
    """Tokens of all prompts of a request, and written so far."""

    prompt: int = 0
    written: int = 0

    def to_dict(self) -> dict[str, int]:
        """OpenAI's object `usage`."""
        total = self.prompt + self.written
        return {"prompt_tokens": self.prompt, "completion_tokens": self.written, "total_tokens": total}


class LanguageModelApi:
    """The endpoints of one model."""

    def __init__(
        self,
        name: str,
        write_text: Callable[[Any, Any], WrittenText],
        template: ChatTemplate | None,
        thread: ModelThread,
    ) -> None:
        self.name, self._write_text, self._template, self._thread = name, write_text, template, thread
        self._started, self._rendering = int(time.time()), ModelThread()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self.name:
            raise RequestError(f"there is no model {name!r} here: this server has {self.name!r}", 404)
        return JSONResponse(self._description())

    async def completions(self, request: Request) -> Response:
        return await self._respond(request, parse_completion(await read_body(request), self.name))

    async def chat(self, request: Request) -> Response:
        body = await read_body(request)
        asked = await self._rendering.run(parse_chat, body, self.name, self._template)
        return await self._respond(request, asked)

    def _description(self) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": self._started, "owned_by": "isobatch"}

    async def _respond(self, request: Request, asked: CompletionRequest) -> Response:
        if asked.stream:
            events = self._events(asked)
            return StreamingResponse(events, media_type="text/event-stream")
        tokens, choices = Tokens(), []
        for index, prompt in enumerate(asked.prompts):
            pieces = []
            async for piece in self._write(prompt, asked, tokens):
                pieces.append(piece)
                if await request.is_disconnected():
                    raise ClientDisconnect
            text = "".join(piece for piece, _ in pieces)
            part = "message" if asked.is_chat else None
            choices.append(_choice(index, text, pieces[-1][1], part, role="assistant"))
        head = self._head(asked, KINDS[asked.is_chat][1])
        return JSONResponse(head | {"choices": choices, "usage": tokens.to_dict()})

    def _head(self, asked: CompletionRequest, kind: str) -> dict[str, Any]:
        name = f"{KINDS[asked.is_chat][0]}-{uuid.uuid4().hex}"
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.name}

    async def _events(self, asked: CompletionRequest) -> AsyncIterator[str]:
        """Server-sent events: a JSON object for each piece of text, and [DONE]."""
        tokens, head = Tokens(), self._head(asked, KINDS[asked.is_chat][2])
        part = "delta" if asked.is_chat else None
        if asked.include_usage:
            head["usage"] = None
        try:
            for index, prompt in enumerate(asked.prompts):
                if asked.is_chat:
                    yield _event(head | {"choices": [_choice(index, "", None, part, role="assistant")]})
                async for piece, reason in self._write(prompt, asked, tokens):
                    if piece or reason:
                        yield _event(head | {"choices": [_choice(index, piece, reason, part)]})
            if asked.include_usage:
                yield _event(head | {"choices": [], "usage": tokens.to_dict()})
        except UserError as error:
            yield _event(error_body(str(error), 400))
        yield "data: [DONE]\n\n"

    async def _write(
        self, prompt: Any, asked: CompletionRequest, tokens: Tokens
    ) -> AsyncIterator[tuple[str, str | None]]:
        """(text, None) for each token, the text may be empty; at last (the rest, why it ended)."""
        written = await self._thread.run(self._write_text, prompt, asked.sampling)
        tokens.prompt += written.prompt_tokens
        pieces, stops = iter(written), StopStrings(asked.stops)
        while not stops.found and (piece := await self._thread.run(next, pieces, _END)) is not _END:
            yield stops.push(piece), None
        tokens.written += written.tokens
        yield stops.rest(), "length" if written.is_full and not stops.found else "stop"


def _event(value: dict[str, Any]) -> str:
    return f"data: {atomic_files.json_text(value, ensure_ascii=False)}\n\n"


def _choice(index: int, text: str, reason: str | None, part: str | None, **role: str) -> dict[str, Any]:
    """`part` of a conversation: a whole `message`, or the `delta` to one; None of other text."""
    said = {part: {**role, "content": text}} if part else {"text": text}
    return {"index": index, **said, "logprobs": None, "finish_reason": reason}
