"""Flags in words of other tools, translated into ours by the tables of other_tools.py.

A flag of the command or of the task always comes before a word of the same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, NamedTuple

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, spelling
from isobatch.launch.local.words.other_tools import OF_FINISHED_MODELS, SYNONYMS, VALUES, WORDS

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping


@dataclass(frozen=True, slots=True)
class Translation:
    """Flags in our words."""

    flags: dict[str, str] = field(default_factory=dict)
    """Our name -> value; names that nobody knows are among them."""
    written: dict[str, str] = field(default_factory=dict)
    """Our name -> the name that the user wrote."""
    notes: dict[str, str] = field(default_factory=dict)
    """A word whose meaning is not plain -> a line that says it."""

    def set(self, values: Mapping[str, str], word: str, note: str = "") -> None:
        """Raises UserError where another word has set one of these flags."""
        for name, value in values.items():
            if name in self.flags:
                two = f"{spelling(word)} and {spelling(self.written[name])}"
                raise UserError(f"{two} say the same thing: give one of them")
            self.flags[name], self.written[name] = value, word
        if note:
            self.notes[word] = note


def translate(flags: Mapping[str, str], own: Container[str]) -> Translation:
    """Flags as they were written in our words. `own`: names of the command's and the task's flags.

    Raises UserError for a word whose meaning cannot be had, and where two words set one flag.
    """
    found, yielding = Translation(), []
    for word, value in flags.items():
        meaning = _meaning(word, value, own)
        if meaning.yields:
            yielding.append(meaning)
        else:
            found.set(meaning.flags, word, meaning.note)
    for meaning in yielding:
        if not meaning.flags.keys() & found.flags.keys():
            found.set(meaning.flags, meaning.word, meaning.note)
    return found


class Meaning(NamedTuple):
    """What a word with its value sets, and what the user reads of it."""

    flags: dict[str, str]
    word: str
    note: str = ""
    yields: bool = False
    """Any other word that sets one of these flags comes before it."""


def _meaning(word: str, value: str, own: Container[str]) -> Meaning:
    """Raises UserError."""
    is_foreign = word not in own and word in WORDS
    forms = WORDS[word] if is_foreign else VALUES.get(our_name(word, own), {})
    written = spelling(word) if isinstance(value, BareValue) else f"{spelling(word)} {value}"
    rule = next((rule for form, rule in forms.items() if re.fullmatch(form, value.lower())), None)
    if rule is None and not is_foreign:
        return Meaning({our_name(word, own): value}, word)
    if rule is None:
        wrong = (
            "needs a value" if isinstance(value, BareValue) else "has no meaning here: `describe` lists flags"
        )
        raise UserError(f"{written}: {wrong}")
    if rule.startswith("!"):
        raise UserError(f"{written}: {rule[2:]}")
    yields, rule = rule.startswith("?"), rule.removeprefix("?")
    flags, _, remark = rule.partition(" # ") if not rule.startswith("#") else ("", "", rule[2:])
    pairs = flags.split()
    found = {name: _filled(form, value) for name, form in zip(pairs[::2], pairs[1::2], strict=True)}
    if not found:
        return Meaning(found, word, remark and f"{written} has no effect: {remark}")
    if word in found.values() or found == {word: value}:
        return Meaning(found, word)
    ours = " ".join(f"{spelling(name)} {text}" for name, text in found.items())
    return Meaning(found, word, f"{written} is {ours}" + (f": {remark}" if remark else ""), yields)


def _filled(template: str, value: str) -> str:
    """The template with the value in its place; a list as Python writes it becomes a,b."""
    if template == "{%}":
        return f"{(Decimal(value) * 100).normalize():f}%"
    if items := re.fullmatch(r"[\[(](.*)[\])]", value):
        value = ",".join(part.strip(" '\"") for part in items[1].split(",") if part.strip())
    return template.replace("{}", value)


def our_name(word: str, own: Container[str]) -> str:
    """Our name of a flag that a word names; the word itself where it names none. `own`: as in `translate`."""
    ours = word if word in own else SYNONYMS.get(word, word)
    of_finished = OF_FINISHED_MODELS.get(ours, ours)
    return of_finished if ours not in own and of_finished in own else ours


def words_for(known: Collection[str]) -> list[str]:
    """These flags, and their names in other tools."""
    return [*known, *(word for word, ours in SYNONYMS.items() if ours in known)]
