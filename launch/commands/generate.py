"""`generate`: text from a trained language model, and what `chat` shares with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from isobatch.core import atomic_files, number_ranges
from isobatch.core.errors import UserError
from isobatch.core.measures import printable
from isobatch.core.terminal.status import doing
from isobatch.data.text import chat_templates
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.launch.commands.evaluate import open_single_run, require_capability
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.models import lora
from isobatch.models.causal_lm.generation import Sampling, TextStream, open_for_generation
from isobatch.models.protocols import Generates, WrittenText

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from isobatch.engine.runs.run_folder import RunFolder

Options = TypeVar("Options", bound=TrustOptions)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingOptions(TrustOptions):
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
    load_bits: Literal[16, 8, 4] | None = None
    """Bits of the model's matrices; by default those of training. 8 and 4 need bitsandbytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(SamplingOptions):
    """Flags of `generate`."""

    prompt: str | None = None
    """The text to continue; what is asked, of a model that was trained on conversations."""
    system: str | None = None
    """What such a model is told before."""
    json: bool = False
    """One JSON object on standard output."""


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """A model that writes text: that of a run, or one in a folder of transformers or peft."""

    name: str
    """As the user typed it."""
    folder: Path
    """That of the weights."""
    template: ChatTemplate | None
    """How conversations are written; None where it knows none."""
    writer: Callable[[int | None], Callable[[Any, Any], WrittenText]]
    """(bits of its matrices) -> the model, read once: (prompt, sampling) -> the text behind it, in pieces."""
    origin: str = ""
    """What it was trained from."""
    turns: int | None = None
    """Questions of the longest conversation that it was trained on, where that is known."""
    remote_code: bool = False


def open_language_model(
    words: Sequence[str], command: str, kind: type[Options]
) -> tuple[LanguageModel, Options]:
    """The model that the one positional word names, and the options. Raises UserError."""
    positional, _ = split_words(words)
    if len(positional) == 1 and (model := plain_model(positional[0])):
        return model, command_options(split_words(words)[1], kind, command)
    run, options = open_single_run(words, command, kind)
    task = require_capability(run, Generates, "writer", "continues no text")
    return LanguageModel(
        str(run.folder),
        run.final,
        template_of(run),
        partial(task.writer, run.final),
        f"from {run.recipe.model}",
        run.facts.extra.get("turns"),
        bool(run.recipe.options.get("remote_code")),
    ), options


def plain_model(where: str) -> LanguageModel | None:
    """The language model in a folder of transformers or peft that is no run; None where it is none.

    Raises UserError for a folder with another kind of model.
    """
    path = Path(where).expanduser()
    adapter, config = path / lora.CONFIG_FILE, path / "config.json"
    if (path / "recipe.json").is_file() or not (adapter.is_file() or config.is_file()):
        return None
    found = atomic_files.read_json(adapter if adapter.is_file() else config)
    kinds = [*(found.get("architectures") or []), str(found.get("task_type"))]
    if not any(kind.endswith(("ForCausalLM", "LMHeadModel", "CAUSAL_LM")) for kind in kinds):
        raise UserError(
            f"{where} is no run, and its model writes no text ({kinds[0]}): give a run, or the folder of a"
            " language model"
        )
    template = chat_templates.template_in(path)
    return LanguageModel(where, path, template, partial(_plain_writer, path), "a folder without a run")


def _plain_writer(folder: Path, bits: int | None) -> Callable[[Any, Sampling], TextStream]:
    return partial(TextStream, *open_for_generation(folder, bits or 16))


def generate(words: Sequence[str]) -> int:
    """Usage: generate RUN "a text" (or --prompt "...") [--system "..."] [--tokens 60] [--temperature 0.8]
    [--top-k 50] [--top-p 0.9] [--seed 0] [--load-bits 16|8|4] [--json]. RUN may be the
    folder of a model of transformers, or of an adapter of peft.
    """
    model, options = open_language_model(_with_prompt(words), "generate", GenerateOptions)
    if options.prompt is None:
        raise UserError('generate: needs --prompt "..."')
    template = model.template
    if template is None and options.system is not None:
        raise UserError(f"--system: {model.name} was not trained on conversations: leave it out")
    doing("loading the model")
    prompt = (
        options.prompt
        if template is None
        else template.prompt_segments([*system_messages(options.system), user_message(options.prompt)])
    )
    drawn = sampling(options, template)
    pieces = model.writer(options.load_bits)(prompt, drawn)
    shown = options.prompt if template is None else ""
    if options.json:
        text = shown + "".join(pieces)
        print(atomic_files.json_text({"prompt": options.prompt, "text": text}, ensure_ascii=False))
    else:
        print_pieces(pieces, shown)
    return 0


def _with_prompt(words: Sequence[str]) -> list[str]:
    """The words with a text behind the run as --prompt."""
    positional, flags = split_words(words)
    if len(positional) != 2 or "prompt" in flags:
        return list(words)
    return [word for word in words if word != positional[1]] + ["--prompt", positional[1]]


def print_pieces(pieces: Iterable[str], prefix: str = "") -> str:
    """Print each piece as it comes, to a terminal without what would steer it; returns the whole text."""
    shown: Callable[[str], str] = printable if sys.stdout.isatty() else str
    text = ""
    print(prefix, end="", flush=True)
    for piece in pieces:
        text += piece
        print(shown(piece), end="", flush=True)
    print(flush=True)
    return text


def template_of(run: RunFolder) -> ChatTemplate | None:
    """The template of a model that was trained on conversations; None of another."""
    found = run.facts.extra.get("template")
    return ChatTemplate.from_dict(found) if found else None


def system_messages(system: str | None) -> list[dict[str, str]]:
    """What a conversation begins with."""
    return [{"role": "system", "content": system}] if system else []


def user_message(text: str) -> dict[str, str]:
    """A question."""
    return {"role": "user", "content": text}


def sampling(options: Any, template: ChatTemplate | None) -> Sampling:
    """How tokens are drawn, and where an answer ends."""
    return Sampling(
        max_new_tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop_token_id=None if template is None else template.end_id,
    )
