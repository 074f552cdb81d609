"""Requests to /v1/completions and /v1/chat/completions, read as OpenAI's API describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.data.chat_formats import ROLE_ALIASES, ROLES
from isobatch.launch.serving.requests import RequestError, number_in, refuse_unknown, switch_in
from isobatch.models.causal_lm.generation import Sampling

if TYPE_CHECKING:
    from isobatch.data.chat_formats import Message
    from isobatch.data.text.chat_templates import ChatTemplate

MAX_TOKENS = 1 << 20
COMPLETION_TOKENS, ANSWER_TOKENS = 16, 256
"""--max_tokens where the request has none: OpenAI's, and enough for an answer."""
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_PROMPTS = 128
MAX_RENDERED = 1 << 25
"""Messages times characters, at least 64 of each: what stands before each answer is rendered anew."""
READ = ("model", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options")
READ_FOR_CHAT = (*READ, "messages", "max_completion_tokens")
READ_FOR_COMPLETIONS = (*READ, "prompt")
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
class CompletionRequest:
    """What is to be written."""

    prompts: list[Any]
    """Each a text, or segments of a conversation."""
    sampling: Sampling
    stops: list[str]
    is_chat: bool
    stream: bool
    include_usage: bool
    """Whether a stream ends with the number of tokens."""


def parse_completion(body: Mapping[str, Any], name: str) -> CompletionRequest:
    """A request for the text behind one prompt or several. Raises RequestError."""
    _check_fields(body, READ_FOR_COMPLETIONS, name)
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not 1 <= len(prompts) <= MAX_PROMPTS or not all(isinstance(p, str) for p in prompts):
        raise RequestError(f"prompt: must be a text, or a list of 1 to {MAX_PROMPTS} texts", field="prompt")
    return _request(body, prompts, _sampling(body, "max_tokens", COMPLETION_TOKENS, None), is_chat=False)


def parse_chat(body: Mapping[str, Any], name: str, template: ChatTemplate | None) -> CompletionRequest:
    """A request for the answer in a conversation. Raises RequestError; UserError where the model's own chat
    template refuses it.
    """
    _check_fields(body, READ_FOR_CHAT, name)
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
    most = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    drawn = _sampling(body, most, ANSWER_TOKENS, template.end_id)
    return _request(body, [template.prompt_segments(parsed, "messages")], drawn, is_chat=True)


def _check_fields(body: Mapping[str, Any], read: tuple[str, ...], name: str) -> None:
    refuse_unknown(body, (*read, *CHANGES_NOTHING, *ONLY))
    for field, supported in ONLY.items():
        if body.get(field) is not None and body[field] not in supported:
            raise RequestError(f"{field}: only {supported[0]!r} is supported", field=field)
    model = body.get("model", name)
    if model != name:
        raise RequestError(f"model: there is no {model!r} here: this server has {name!r}", 404, "model")


def _request(
    body: Mapping[str, Any], prompts: list[Any], drawn: Sampling, is_chat: bool
) -> CompletionRequest:
    options = body.get("stream_options") or {}
    if not isinstance(options, Mapping):
        raise RequestError("stream_options: must be an object", field="stream_options")
    usage = switch_in(options, "include_usage")
    return CompletionRequest(prompts, drawn, _stops(body), is_chat, switch_in(body, "stream"), usage)


def _sampling(body: Mapping[str, Any], most: str, default: int, end: int | None) -> Sampling:
    return Sampling(
        max_new_tokens=number_in(body, most, default, 1, MAX_TOKENS, whole=True),
        temperature=number_in(body, "temperature", 1.0, 0, 2),
        top_k=number_in(body, "top_k", 0, 0, MAX_TOKENS, whole=True),
        top_p=number_in(body, "top_p", 1.0, 1e-6, 1),
        seed=number_in(body, "seed", 0, -(1 << 63), (1 << 63) - 1, whole=True),
        stop_token_id=end,
    )


def _stops(body: Mapping[str, Any]) -> list[str]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    stops = stops if isinstance(stops, list) and len(stops) <= MAX_STOPS else [None]
    if not all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_LENGTH for s in stops):
        said = f"stop: must be a text of 1 to {MAX_STOP_LENGTH} characters, or a list of at most {MAX_STOPS}"
        raise RequestError(said, field="stop")
    return stops


def _parse_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f'{where}: must be an object with "role" and "content"', field="messages")
    role = ROLE_ALIASES.get(message["role"], message["role"])
    if role not in ROLES:
        raise RequestError(f"{where}: a role is one of {', '.join(ROLES)}", field="messages")
    return {"role": role, "content": _parse_content(message.get("content"), where)}


def _parse_content(content: Any, where: str) -> str:
    """A text, or the texts of a list of parts."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str)]
    if not texts or len(texts) < len(parts):
        raise RequestError(f"{where}: content must be a text", field="messages")
    return "".join(texts)
