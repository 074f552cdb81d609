"""`reconstruct`, `interpolate` and `sample`: texts from the latent vectors of a trained VAE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core import number_ranges
from isobatch.core.errors import UserError
from isobatch.core.terminal.console import print_answer
from isobatch.launch.commands.evaluate import require_capability
from isobatch.launch.local.arguments import read_command
from isobatch.launch.local.run_setup import AnswerOptions, open_run
from isobatch.models.protocols import EncodesLatents


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
    codec, (text,), options = _open(words, "reconstruct", ("text",), DecodingOptions)
    found = codec.reconstruct(text, options.tokens)
    return print_answer({"text": text, "reconstruction": found}, found, options.json)


def interpolate(words: Sequence[str]) -> int:
    """Usage: vae interpolate RUN "from" "to" [--count 7] [--tokens 60] [--json]: between two texts."""
    codec, (first, last), options = _open(words, "interpolate", ("from", "to"), InterpolateOptions)
    texts = codec.interpolate(first, last, options.count, options.tokens)
    return print_answer({"from": first, "to": last, "texts": texts}, "\n".join(texts), options.json)


def sample(words: Sequence[str]) -> int:
    """Usage: vae sample RUN [--count 5] [--temperature 1] [--seed 0] [--tokens 60] [--json]."""
    codec, _, options = _open(words, "sample", (), SampleOptions)
    texts = codec.sample(options.count, options.tokens, options.temperature, options.seed)
    return print_answer({"texts": texts}, "\n".join(texts), options.json)


def _open(words: Sequence[str], command: str, names: Sequence[str], kind: type) -> tuple[Any, list[str], Any]:
    """The `SequenceCodec` of the run, the texts after it, and the options. Raises UserError."""
    positional, options = read_command(words, kind, command)
    if len(positional) != 1 + len(names):
        usage = " ".join([f"{command} RUN", *(f'"{name}"' for name in names)])
        raise UserError(f"{command}: give the folder of one run, and each text in quotes: {usage}")
    run = open_run(positional[0], options.trust)
    task = require_capability(run, EncodesLatents, command, "has no latent vectors")
    return task.open_codec(run.final), positional[1:], options
