"""The words of a chain of tasks: which flags each of its stages takes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, nearest_hint
from isobatch.engine.registry import CHAINS
from isobatch.launch.local.arguments import known_flags, parse_request, split_words
from isobatch.launch.local.words.config_files import flags_of_files, join
from isobatch.launch.local.words.foreign_words import translate, words_for
from isobatch.launch.local.words.meanings import spelling

if TYPE_CHECKING:
    from collections.abc import Collection

ONLY_FIRST = ("model", "tokenizer", "revision", "preset")
"""Flags of the first stage's initial model; each later stage starts from the model of the one before."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of tasks as a user asked for it."""

    stages: Sequence[str]
    flags: Mapping[str, Mapping[str, str]]
    """Stage -> its flags."""
    own: dict[str, str]
    """Flags of the command."""
    given: Mapping[str, str]
    """All flags of the stages as the user gave them, in our words."""

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
    stages = CHAINS[name]
    _, flags = split_words(words)
    file, base = flags_of_files(flags)
    known = set().union(*map(known_flags, stages), own)
    flags = join(file, base, flags, known) if base else flags
    for given in ("task", "config", "like", "from"):
        flags.pop(given, None)
    mine = {k: flags.pop(k) for k in own if k in flags}
    translated = translate(flags, set().union(*map(flags_of_stage, stages)))
    for note in translated.notes:
        print(note, file=sys.stderr)
    chain = Chain(
        stages, _flags_per_stage(name, translated.flags, translated.written), mine, translated.flags
    )
    for stage in stages:
        parse_request(chain.words(stage, chain.start), "auto")
    return chain


def _flags_per_stage(
    chain: str, flags: Mapping[str, str], written: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Stage -> its flags. `written`: flag -> as the user wrote it. Raises UserError for unknown ones."""
    stages = CHAINS[chain]
    known = {stage: flags_of_stage(stage) for stage in stages}
    all_names = set().union(*known.values())
    for name in flags:
        if name not in all_names:
            flag = spelling(written[name])
            hint = nearest_hint(flag, map(spelling, sorted(all_names | words_for(all_names))))
            raise UserError(f"{flag}: no stage of {chain} has such a flag{hint}")
    found = {
        stage: {
            k: v for k, v in flags.items() if k in known[stage] and (position == 0 or k not in ONLY_FIRST)
        }
        for position, stage in enumerate(stages)
    }
    for position, stage in enumerate(stages):
        if "name" in flags:
            found[stage]["name"] = f"{flags['name']}-{stage}"
        for length in ("epochs", "steps"):
            if length in flags:
                found[stage][length] = _value_of_stage(flags[length], position, f"--{length}", stages)
    return found


def _value_of_stage(word: str, position: int, flag: str, stages: Sequence[str]) -> str:
    """The value for one stage of a flag with one number or one per stage. Raises UserError."""
    parts = word.split(",")
    if len(parts) not in (1, len(stages)):
        raise UserError(f"{flag} {word}: give one number, or one for each of {', '.join(stages)}")
    return parts[0] if len(parts) == 1 else parts[position]


def flags_of_stage(stage: str) -> set[str]:
    """Names of the flags that `auto` takes for a stage, but for those that the chain gives itself."""
    return known_flags(stage) - {"teacher", "pruned", "seeds", "config", "like", "from"}
