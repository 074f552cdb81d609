"""Flags in words of other tools, translated into ours by the tables of other_tools.py.

A flag of the command or of the task always comes before a word of the same name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, spelling
from isobatch.launch.local.words.other_tools import FORMS, OF_FINISHED_MODELS, SYNONYMS, VALUES, WORDS

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping


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
        rule = _rule(word, value, own)
        if rule is None:
            found.set({our_name(word, own): value}, word)
        elif rule.yields:
            yielding.append((word, value, rule))
        else:
            found.set(rule.flags, word, rule.note(word, value))
    for word, value, rule in yielding:
        if not found.flags.keys() & rule.flags.keys():
            found.set(rule.flags, word, rule.note(word, value))
        elif word in SYNONYMS:
            found.set({SYNONYMS[word]: value}, word)
    return found


class _Rule(NamedTuple):
    """What a word with a value is here."""

    flags: dict[str, str]
    remark: str
    yields: bool

    def note(self, word: str, value: str) -> str:
        """What the user reads who wrote the word; empty where it is plain."""
        if word in self.flags.values() or self.flags == {word: value}:
            return ""
        if not self.flags:
            return self.remark and f"{_as_written(word, value)} has no effect: {self.remark}"
        ours = " ".join(f"{spelling(name)} {text}" for name, text in self.flags.items())
        return f"{_as_written(word, value)} is {ours}" + (f": {self.remark}" if self.remark else "")


def _rule(word: str, value: str, own: Container[str]) -> _Rule | None:
    """The rule for a word with this value; None where they mean what they mean here."""
    is_foreign = word not in own and word in WORDS
    forms = WORDS[word] if is_foreign else VALUES.get(our_name(word, own), {})
    for pattern, text in forms.items():
        if re.fullmatch(pattern, value.lower()):
            if text.startswith("!"):
                raise UserError(f"{_as_written(word, value)}: {text[2:]}")
            flags, _, remark = text.partition("#")
            pairs = flags.removeprefix("?").split()
            filled = {n: _filled(v, value) for n, v in zip(pairs[::2], pairs[1::2], strict=True)}
            return _Rule(filled, remark.strip(), text.startswith("?"))
    if not is_foreign:
        return None
    if isinstance(value, BareValue):
        raise UserError(f"{spelling(word)}: needs a value")
    names = " nor ".join(FORMS.get(pattern, pattern.replace("|", " or ")) for pattern in forms)
    raise UserError(f"{spelling(word)} {value}: is neither {names}")


def _filled(template: str, value: str) -> str:
    """The template with the value in its place; a list as Python writes it becomes a,b."""
    if template == "{%}":
        return f"{(Decimal(value) * 100).normalize():f}%"
    if items := re.fullmatch(r"[\[(](.*)[\])]", value):
        value = ",".join(part.strip(" '\"") for part in items[1].split(",") if part.strip())
    path = PurePath(value)
    return template.replace("{parent}", str(path.parent)).replace("{last}", path.name).replace("{}", value)


def our_name(word: str, own: Container[str]) -> str:
    """Our name of a flag that a word names; the word itself where it names none. `own`: as in `translate`."""
    ours = word if word in own else SYNONYMS.get(word, word)
    of_finished = OF_FINISHED_MODELS.get(ours, ours)
    return of_finished if ours not in own and of_finished in own else ours


def words_for(known: Iterable[str]) -> set[str]:
    """Words of other tools that a command with these flags takes."""
    names = set(known)
    return {word for word, ours in SYNONYMS.items() if ours in names} | {
        word for word, forms in WORDS.items() if _flags_in(forms.values()) <= names
    }


def _flags_in(rules: Iterable[str]) -> set[str]:
    """The flags that rules set."""
    return {
        name
        for rule in rules
        if not rule.startswith("!")
        for name in rule.partition("#")[0].removeprefix("?").split()[::2]
    }


def _as_written(word: str, value: str) -> str:
    return spelling(word) if isinstance(value, BareValue) else f"{spelling(word)} {value}"
