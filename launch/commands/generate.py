"""`generate` and `chat`: a trained language model writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.data.text.chat_templates import ChatSegment, ChatTemplate
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.commands.evaluate import open_single_run, require_capability
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.models.causal_lm.generation import Sampling
from isobatch.models.protocols import Generates

RESET, QUIT = "/reset", "/quit"


@dataclass(frozen=True, kw_only=True, slots=True)
class WritingOptions:
    """Flags of `generate` and `chat`."""

    tokens: number_ranges.Positive = 60
    """Most tokens to add."""
    temperature: number_ranges.Rate = 0.8
    """0 takes the likeliest token every time."""
    top_k: number_ranges.Count = 0
    """Draw among so many of the likeliest tokens; 0 for all."""
    top_p: number_ranges.Fraction = 1.0
    """Draw among the likeliest tokens that have this probability together."""
    seed: number_ranges.Count = 0
    """Another seed, another continuation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(WritingOptions):
    """Flags of `generate`."""

    prompt: str | None = None
    """The text to continue; what is asked, of a model that was trained on conversations."""
    system: str | None = None
    """What such a model is told before."""
    json: bool = False
    """One JSON object on standard output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions(WritingOptions):
    """Flags of `chat`."""

    tokens: number_ranges.Positive = 256
    """Most tokens of an answer."""
    system: str | None = None
    """What the model is told before the first question."""


def generate(words: Sequence[str]) -> int:
    """Usage: generate RUN --prompt "..." [--system "..."] [--tokens 60] [--temperature 0.8] [--top-k 50]
    [--top-p 0.9] [--seed 0] [--json]
    """
    positional, flags = split_words(words)
    run, own = open_single_run(positional, "generate"), command_options(flags, GenerateOptions, "generate")
    if own.prompt is None:
        raise UserError('generate: needs --prompt "..."')
    template = _template(run)
    if template is None and own.system is not None:
        raise UserError(f"--system: {run.folder} was not trained on conversations: leave it out")
    write = require_capability(run, Generates, "writer", "continues no text").writer(run.final)
    asked = (
        own.prompt if template is None else template.prompt_segments(_told(own.system) + [_user(own.prompt)])
    )
    pieces = write(asked, _sampling(own, template))
    shown = own.prompt if template is None else ""
    if own.json:
        text = shown + "".join(pieces)
        print(json.dumps({"prompt": own.prompt, "text": text}, ensure_ascii=False))
    else:
        _show(pieces, shown)
    return 0


def chat(words: Sequence[str]) -> int:
    """Usage: chat RUN [--system "..."] [--tokens 256] [--temperature 0.8] [--top-k 50] [--top-p 0.9]
    [--seed 0]: a line is a question; /reset forgets all before, /quit or the end of input ends it.
    """
    positional, flags = split_words(words)
    run, own = open_single_run(positional, "chat"), command_options(flags, ChatOptions, "chat")
    template = _template(run)
    if template is None:
        raise UserError(
            f"chat: {run.folder} was not trained on conversations (instruction and output, or messages): use"
            " generate"
        )
    write = require_capability(run, Generates, "writer", "continues no text").writer(run.final)
    _talk(template, own, lambda asked: write(asked, _sampling(own, template)))
    return 0


def _talk(
    template: ChatTemplate, own: ChatOptions, write: Callable[[list[ChatSegment]], Iterable[str]]
) -> None:
    messages = _told(own.system)
    for line in _lines():
        if line == QUIT:
            return
        if line == RESET:
            messages = _told(own.system)
            continue
        messages.append(_user(line))
        answer = _show(write(template.prompt_segments(messages)))
        messages.append({"role": "assistant", "content": answer})


def _lines() -> Iterator[str]:
    """What a person types, or a file holds, without empty lines."""
    typed = sys.stdin.isatty()
    while True:
        if typed:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _show(pieces: Iterable[str], before: str = "") -> str:
    """Each piece as it comes; returns them all."""
    text = ""
    print(before, end="", flush=True)
    for piece in pieces:
        text += piece
        print(piece, end="", flush=True)
    print(flush=True)
    return text


def _template(run: RunFolder) -> ChatTemplate | None:
    found = run.facts.extra.get("template")
    return ChatTemplate.from_dict(found) if found else None


def _told(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _sampling(own: Any, template: ChatTemplate | None) -> Sampling:
    return Sampling(
        max_new_tokens=own.tokens,
        temperature=own.temperature,
        top_k=own.top_k,
        top_p=own.top_p,
        seed=own.seed,
        stop_token_id=None if template is None else template.end_id,
    )
