"""The words of a chain of tasks: which flags each of its stages takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, nearest_hint, spelling
from isobatch.engine.registry import CHAINS
from isobatch.launch.local.arguments import known_flags, parse_request, split_words
from isobatch.launch.local.words import SOURCES, flags_of_files, translate, words_for

if TYPE_CHECKING:
    from collections.abc import Collection

ONLY_FIRST = ("model", "tokenizer", "revision", "preset")
"""Flags of the first stage's initial model; each later stage starts from the model of the one before."""
GIVEN = {"teacher", "pruned", *SOURCES}
"""Flags that a chain gives its stages, or none has."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of tasks as a user asked for it."""

    stages: Sequence[str]
    flags: Mapping[str, Mapping[str, str]]
    """Stage -> its flags."""
    own: dict[str, str]
    """Flags of the command."""

    @property
    def start(self) -> dict[str, str]:
        """The flags of the first stage's initial model."""
        return {k: v for k, v in self.flags[self.stages[0]].items() if k in ONLY_FIRST}

    def words(self, stage: str, more: Mapping[str, str]) -> list[str]:
        """The words that train a stage. `more`: flags that this chain gives itself."""
        flags = {**self.flags[stage], **more}
        given = (f"--{k}" if isinstance(v, BareValue) else f"--{k}={v}" for k, v in flags.items())
        return ["--task", stage, *given]


def parse_chain(name: str, words: Sequence[str], own: Collection[str]) -> Chain:
    """Parse the words behind `auto` or `plan`, and check those of all stages before the first trains.

    `own`: names of the command's flags. Raises UserError.
    """
    stages, (_, typed) = CHAINS[name], split_words(words)
    known = {stage: known_flags(stage) - GIVEN for stage in stages}
    every = set().union(*known.values(), own, SOURCES)
    found = translate(flags_of_files(typed), every).below(translate(typed, every))
    for note in found.notes.values():
        print(note, file=sys.stderr)
    flags = {k: v for k, v in found.flags.items() if k not in ("task", *SOURCES, *own)}
    if unknown := [flag for flag in flags if flag not in every]:
        word = spelling(unknown[0])
        hint = nearest_hint(word, map(spelling, words_for(every)))
        raise UserError(f"{word}: no stage of {name} has such a flag{hint}")
    per_stage = {stage: _flags_of(stage, stages, flags, known[stage]) for stage in stages}
    chain = Chain(stages, per_stage, {k: v for k, v in found.flags.items() if k in own})
    for stage in stages:
        parse_request(chain.words(stage, chain.start), "auto")
    return chain


def _flags_of(
    stage: str, stages: Sequence[str], flags: Mapping[str, str], known: Collection[str]
) -> dict[str, str]:
    """The flags of one stage; one with a number for each stage has this one's. Raises UserError."""
    place = stages.index(stage)
    found = {k: v for k, v in flags.items() if k in known and (place == 0 or k not in ONLY_FIRST)}
    if "name" in found:
        found["name"] += f"-{stage}"
    for length in {"epochs", "steps"} & found.keys():
        parts = found[length].split(",")
        if len(parts) not in (1, len(stages)):
            word = f"--{length} {found[length]}"
            raise UserError(f"{word}: give one number, or one for each of {', '.join(stages)}")
        found[length] = parts[place % len(parts)]
    return found
