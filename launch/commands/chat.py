"""Text from trained models: `chat`, an answer of a language model to --prompt or a conversation by lines; and
`reconstruct`, `interpolate` and `sample`, texts from the latent vectors of a VAE.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from isobatch.core import atomic_files, number_ranges
from isobatch.core.errors import DONE, UserError
from isobatch.core.measures import printable
from isobatch.core.terminal import doing, print_answer
from isobatch.data.chat_formats import Message
from isobatch.data.text.chat_templates import ChatSegment, ChatTemplate, template_in
from isobatch.engine.runs.run_folder import RunFolder, finished_run, no_run, runs_named
from isobatch.launch.commands.evaluate import require_capability
from isobatch.launch.local.arguments import command_options, read_command, split_words
from isobatch.launch.local.options import AnswerOptions, TrustOptions
from isobatch.launch.local.run_setup import one_run, open_run
from isobatch.models import lora
from isobatch.models.causal_lm.generation import Sampling, TextStream, open_for_generation
from isobatch.models.protocols import EncodesLatents, Generates

RESET, QUIT = "/reset", ("/quit", "/exit", "/bye", "quit", "exit")
ANSWER_TOKENS, TEXT_TOKENS = 256, 60


@dataclass(frozen=True, kw_only=True)  # without slots it goes together with flags of lists
class SamplingOptions(TrustOptions):
    """Flags of how a language model writes."""

    tokens: number_ranges.Positive | None = None
    """Most tokens of a text; by default 256 of an answer, 60 of a text that goes on."""
    temperature: number_ranges.Rate = 0.0
    """0 takes the likeliest token every time."""
    top_k: number_ranges.Count = 0
    """Draw among so many of the likeliest tokens; 0 for all."""
    top_p: number_ranges.Fraction = 1.0
    """Draw among the likeliest tokens that have this probability together."""
    seed: number_ranges.Count = 0
    """Of the draws; the same for every text, so that an answer does not depend on its place."""
    load_bits: Literal[16, 8, 4] | None = None
    """Bits of the model's matrices; by default those of training. 8 and 4 need bitsandbytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions(SamplingOptions):
    """Flags of `chat`."""

    prompt: str | None = None
    """A question, or of a model that knows no conversations a text to continue: it is answered, and that is
    all. It may stand behind the run, too."""
    system: str | None = None
    """What the model is told before the first question."""
    temperature: number_ranges.Rate = 0.8
    """0 takes the likeliest token every time."""
    json: bool = False
    """With --prompt, one JSON object on standard output."""


class LanguageModel(NamedTuple):
    """A model that writes text: that of a run, or one in a folder of transformers or peft."""

    template: ChatTemplate | None
    """How conversations are written; None where it knows none."""
    writer: Callable[[int | None], Callable[[Any, Any], TextStream]]
    """(bits of its matrices) -> the model, read once: (prompt, sampling) -> the text behind it, in pieces."""


def open_language_model(place: str, trust: bool = False) -> LanguageModel:
    """The model of a run, or of a folder of transformers or peft. Raises UserError."""
    if model := plain_model(place):
        return model
    run = open_run(finished_run(place), trust)
    return language_model_of(run, require_capability(run, Generates, "chat", "continues no text"))


def language_model_of(run: RunFolder, task: Generates) -> LanguageModel:
    """The model of a run that is finished."""
    found = run.facts.extra.get("template")  # of a model that was trained on conversations
    return LanguageModel(ChatTemplate(**found) if found else None, partial(task.writer, run.final))


def plain_model(where: str) -> LanguageModel | None:
    """The language model in a folder of transformers or peft that is no run; None where it is none.

    Raises UserError for a folder with another kind of model.
    """
    path = runs_named(where)[-1]
    adapter, config = path / lora.CONFIG_FILE, path / "config.json"
    if (path / "recipe.json").is_file() or not (adapter.is_file() or config.is_file()):
        return None
    found = atomic_files.read_json(adapter if adapter.is_file() else config)
    kinds = [*(found.get("architectures") or []), str(found.get("task_type"))]
    if not any(kind.endswith(("ForCausalLM", "LMHeadModel", "CAUSAL_LM")) for kind in kinds):
        raise UserError(f"{no_run(path)}; its model writes no text: {kinds[0]}")
    template = template_in(path)
    return LanguageModel(template, lambda bits: partial(TextStream, *open_for_generation(path, bits or 16)))


def chat(words: Sequence[str]) -> int:
    """Usage: chat RUN ["a text" or --prompt "..."] [--system "..."] [--tokens 256] [--temperature 0.8]
    [--top-k 50] [--top-p 0.9] [--seed 0] [--load-bits 16|8|4] [--json]

    Without a prompt, a line is a question; /reset forgets those before, /quit or /exit ends. RUN may be the
    folder of a model of transformers, or of an adapter of peft.
    """
    positional, flags = split_words(words)
    if len(positional) == 2 and "prompt" not in flags:
        flags["prompt"] = positional.pop()
    place = one_run(positional, "chat")
    options = command_options(flags, ChatOptions, "chat")
    prompt, (template, open_writer) = options.prompt, open_language_model(place, options.trust)
    if template is None and (prompt is None or options.system):
        raise UserError(f"chat: {place} was not trained on conversations: give --prompt and no --system")
    doing("loading the model")
    write, drawn = open_writer(options.load_bits), sampling(options, template)
    told = [{"role": "system", "content": options.system}] if options.system else []
    if prompt is None:
        assert template is not None, "refused above"
        converse(_input_lines(), template, lambda prompt: write(prompt, drawn), told)
        return DONE
    asked = template.prompt_segments([*told, {"role": "user", "content": prompt}]) if template else prompt
    pieces, before = write(asked, drawn), "" if template else prompt
    if options.json:
        return print_answer({"prompt": prompt, "text": before + "".join(pieces)}, "", as_json=True)
    print_pieces(pieces, before)
    return DONE


def sampling(options: SamplingOptions, template: ChatTemplate | None) -> Sampling:
    """How tokens are drawn by a command's options, and where an answer ends."""
    drawn = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "seed")}
    tokens = options.tokens or (ANSWER_TOKENS if template else TEXT_TOKENS)
    return Sampling(max_new_tokens=tokens, stop_token_id=template.end_id if template else None, **drawn)


def converse(
    lines: Iterable[str],
    template: ChatTemplate,
    write_text: Callable[[list[ChatSegment]], Iterable[str]],
    told: Sequence[Message],
) -> None:
    """Answer each line on standard output, with all that was said since `told` before it."""
    messages = [*told]
    for line in lines:
        if line in QUIT:
            return
        if line == RESET:
            messages = [*told]
            continue
        messages.append({"role": "user", "content": line})
        doing("answering")
        try:
            answer = print_pieces(write_text(template.prompt_segments(messages)))
            messages.append({"role": "assistant", "content": answer})
        except KeyboardInterrupt:  # ends this answer, not the chat
            messages.pop()
            print()


def _input_lines() -> Iterator[str]:
    """Lines of standard input without empty ones, with a prompt on a terminal."""
    mark = f"{RESET} forgets what was said, {QUIT[0]} ends\n> " if sys.stdin.isatty() else ""
    while True:
        doing()
        print(mark, end="", file=sys.stderr, flush=True)
        mark = mark[-2:]
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.strip()


def print_pieces(pieces: Iterable[str], text: str = "") -> str:
    """Print a text and each piece behind it as it comes, to a terminal without what would steer it; returns
    the whole.
    """
    shown: Callable[[str], str] = printable if sys.stdout.isatty() else str
    print(text, end="", flush=True)
    for piece in pieces:
        text += piece
        print(shown(piece), end="", flush=True)
    print(flush=True)
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingOptions(AnswerOptions):
    """Flags of `reconstruct`."""

    tokens: number_ranges.Positive = 60
    """Most tokens of a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterpolateOptions(DecodingOptions):
    """Flags of `interpolate`."""

    count: number_ranges.Positive = 7
    """Texts, both ends included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOptions(DecodingOptions):
    """Flags of `sample`."""

    count: number_ranges.Positive = 5
    """Texts."""
    temperature: number_ranges.Rate = 1.0
    """0 takes the likeliest token every time."""
    seed: number_ranges.Count = 0
    """Another seed, other latent vectors."""


def reconstruct(words: Sequence[str]) -> int:
    """Usage: vae reconstruct RUN "text" [--tokens 60] [--json]: a text through its latent vector and back."""
    codec, (text,), options = _codec_of(words, "reconstruct", DecodingOptions, "text")
    found = codec.reconstruct(text, options.tokens)
    return print_answer({"text": text, "reconstruction": found}, found, options.json)


def interpolate(words: Sequence[str]) -> int:
    """Usage: vae interpolate RUN "from" "to" [--count 7] [--tokens 60] [--json]: between two texts."""
    codec, (first, last), options = _codec_of(words, "interpolate", InterpolateOptions, "from", "to")
    texts = codec.interpolate(first, last, options.count, options.tokens)
    return print_answer({"from": first, "to": last, "texts": texts}, "\n".join(texts), options.json)


def sample(words: Sequence[str]) -> int:
    """Usage: vae sample RUN [--count 5] [--temperature 1] [--seed 0] [--tokens 60] [--json]."""
    codec, _, options = _codec_of(words, "sample", SampleOptions)
    texts = codec.sample(options.count, options.tokens, options.temperature, options.seed)
    return print_answer({"texts": texts}, "\n".join(texts), options.json)


def _codec_of(words: Sequence[str], command: str, kind: type, *names: str) -> tuple[Any, list[str], Any]:
    """The `SequenceCodec` of the run, the texts after it, and the options. Raises UserError."""
    positional, options = read_command(words, kind, command)
    if len(positional) != 1 + len(names):
        usage = " ".join([f"{command} RUN", *(f'"{name}"' for name in names)])
        raise UserError(f"{command}: give the folder of one run, and each text in quotes: {usage}")
    run = open_run(positional[0], options.trust)
    task = require_capability(run, EncodesLatents, command, "has no latent vectors")
    return task.open_codec(run.final), positional[1:], options
