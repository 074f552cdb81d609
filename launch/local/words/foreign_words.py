"""Flags in words of other tools, translated into ours by the tables of other_tools.py.

A flag of the command or of the task always comes before a word of the same name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue
from isobatch.launch.local.words.meanings import Meaning, as_written, spelling
from isobatch.launch.local.words.other_tools import OF_FINISHED_MODELS, PRECISER, SYNONYMS, VALUES, WORDS

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping


class Translation(NamedTuple):
    """Flags in our words."""

    flags: dict[str, str]
    """Our name -> value; names that nobody knows are among them."""
    written: dict[str, str]
    """Our name -> the name that the user wrote."""
    notes: list[str]
    """A line for each word whose meaning is not plain."""


def translate(flags: Mapping[str, str], own: Container[str]) -> Translation:
    """Flags as they were written in our words. `own`: names of the command's and the task's flags.

    Raises UserError for a word whose meaning cannot be had, and where two words set one flag.
    """
    found = Translation({}, {}, [])
    for name, value in flags.items():
        meaning = _meaning(name, value, own)
        if meaning is not None and meaning.yields and _sets_any(flags.keys() - {name}, meaning, own):
            if name not in SYNONYMS:
                continue
            meaning = None
        if meaning is None:
            ours = {our_name(name, own): value}
        else:
            ours = meaning.flags_for(value)
            found.notes.extend(filter(None, [meaning.line(name, value)]))
        for key, text in ours.items():
            if key in found.written:
                first = found.flags[key].lower()
                if not {(first, text.lower()), (text.lower(), first)} & PRECISER:
                    raise UserError(
                        f"{spelling(name)} and {spelling(found.written[key])} say the same thing: give one of"
                        " them"
                    )
                if (first, text.lower()) not in PRECISER:
                    continue
            found.flags[key], found.written[key] = text, name
    return found


def _sets_any(flags: Iterable[str], meaning: Meaning, own: Container[str]) -> bool:
    """Whether the user sets one of these flags, in our words or in those of another tool."""
    mine = {*(meaning.flags or ())}
    return any(our_name(name, own) in mine or mine & _flags_set_by(WORDS.get(name, ())) for name in flags)


def _meaning(name: str, value: str, own: Container[str]) -> Meaning | None:
    """The meaning of a word with this value; None where name and value mean what they mean here."""
    is_foreign = name not in own and name in WORDS
    meanings = WORDS[name] if is_foreign else VALUES.get(our_name(name, own), ())
    for meaning in meanings:
        if re.fullmatch(meaning.form.pattern, value.lower()):
            if meaning.flags is None:
                raise UserError(f"{as_written(name, value)}: {meaning.remark}")
            return meaning
    if not is_foreign:
        return None
    if isinstance(value, BareValue):
        raise UserError(f"{spelling(name)}: needs a value")
    forms = " nor ".join(m.form.name for m in meanings)
    raise UserError(f"{spelling(name)} {value}: is neither {forms}")


def our_name(name: str, own: Container[str]) -> str:
    """Our name of a flag that a word names; the word itself where it names none. `own`: as in `translate`."""
    if name in own:
        return name
    ours = SYNONYMS.get(name) or SYNONYMS.get(name.lower(), name)  # RecBole writes some in capitals
    of_finished = OF_FINISHED_MODELS.get(ours, ours)
    return of_finished if ours not in own and of_finished in own else ours


def words_for(known: Iterable[str]) -> set[str]:
    """Words of other tools that a command with these flags takes or answers."""
    names = set(known)
    words = {name for name, meanings in WORDS.items() if _flags_set_by(meanings) <= names}
    return words | {name for name, ours in SYNONYMS.items() if ours in names}


def _flags_set_by(meanings: Iterable[Meaning]) -> set[str]:
    return {name for meaning in meanings for name in meaning.flags or ()}
