"""What rows hold, counted: what is learnt, left out, cut, or not read; and what a row is refused for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.measures import counted
from isobatch.data import chat_formats, readers
from isobatch.data.chat_formats import HISTORY, MESSAGE_KEYS, NO_MEDIA, NOT_READ, WEIGHT_KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from isobatch.data.chat_formats import Message
    from isobatch.data.readers import LocatedRows

_BLANK: tuple[Any, ...] = (None, "", [], {}, "[]", "{}", "null")
_REFUSED = {"tools", "tool_calls", "functions", "function_call", "reasoning_content"}
_REFUSED |= {"images", "image", "videos", "video", "audios", "audio"}
"""Columns of NOT_READ without which the rest means something else; others of its words may mean anything."""
_MARK = re.compile(r"<(\|?)(image|video|audio)(_pad)?\1>(?!.*</\2>)", re.DOTALL)
"""Where a picture would be; HTML closes its elements."""
_JUDGEMENTS = ("true", "false", "good", "bad", "desirable", "undesirable", "chosen", "rejected")


LEFT_OUT, FIELD = "left out: ", "field: "
"""What keys of counts begin with."""


@dataclass(slots=True)
class ConversationCounts:
    """Counts of a split's conversations."""

    rows: int = 0
    """Conversations that are learnt from."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> rows that are not."""
    first_left_out: str = ""
    """Where the first of these stands, of texts."""
    fields: Counter[str] = field(default_factory=Counter)
    """What became of a field -> rows of which this is so."""
    leading_answers: int = 0
    """Conversations that began with an answer before any question; it is dropped."""
    prompts_cut: int = 0
    answers_cut: int = 0
    turns_left_out: int = 0
    tokens: int = 0
    response_tokens: int = 0
    learnt: int = 0
    """Tokens of the texts that are learnt."""
    predicted: int = 0
    """Those of them that are predicted: without the first of a row."""
    words: int = 0
    lines: int = 0
    """Ends of lines in the texts that are learnt; an answer's end is one."""
    bytes: int = 0

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add those of a part of the split, by the names of the fields."""
        for name, count in counts.items():
            if isinstance(count, Mapping):
                getattr(self, name).update(count)
            elif name == "first_left_out":
                self.first_left_out = self.first_left_out or count
            else:
                setattr(self, name, getattr(self, name) + count)

    def to_dict(self) -> dict[str, Any]:
        """The fields, as `add` takes them; `dataclasses.asdict` would count the items of a Counter."""
        return {name: getattr(self, name) for name in self.__slots__}

    def sizes(self) -> dict[str, int]:
        """The counts that facts keep, by the names they have there."""
        return {
            "tokens": self.learnt,
            "predicted": self.predicted,
            "words": self.words,
            "bytes": self.bytes,
            "lines": self.lines,
            "conversations": self.rows,
            "prompt_tokens": self.tokens - self.response_tokens,
            "response_tokens": self.response_tokens,
        }

    def noted(self) -> dict[str, int]:
        """The counts that become notes, each under a key that `from_noted` reads."""
        of_kind = {f"{LEFT_OUT}{reason}": count for reason, count in self.left_out.items()}
        return of_kind | {f"{FIELD}{what}": count for what, count in self.fields.items()}

    @classmethod
    def from_noted(cls, sizes: dict[str, int]) -> ConversationCounts:
        """Those among the sizes of a split, which are taken out of them."""
        found = cls()
        for kind, counts in ((LEFT_OUT, found.left_out), (FIELD, found.fields)):
            for key in [key for key in sizes if key.startswith(kind)]:
                counts[key.removeprefix(kind)] = sizes.pop(key)
        return found

    def notes(self, split: str, max_length: int) -> Iterator[str]:
        """What the user should know, one line each."""
        if self.left_out:
            reasons = ", ".join(f"{count:,} with {reason}" for reason, count in self.left_out.most_common())
            yield f"{split}: rows left out: {reasons}"
        if self.leading_answers:
            what = "conversations began with an answer to nothing: it is left out"
            yield f"{split}: {self.leading_answers:,} {what}"
        for count, what in (
            (self.prompts_cut, "the prompt loses its beginning"),
            (self.answers_cut, "answers are cut"),
            (self.turns_left_out, "later turns are left out"),
        ):
            if count:
                yield f"{split}: in {count:,} of {self.rows:,} rows {what} to fit --max-length {max_length}"

    def field_notes(self) -> Iterator[str]:
        """What became of the rows' fields, one line each; of all splits together."""
        yield from (f"{counted(count, 'row')}: {what}" for what, count in self.fields.most_common())


def notes_of_unread(row: Mapping[str, Any], main: Sequence[str], has_fields: bool = True) -> list[str]:
    """A note of each field of a row or its messages that says something and that none of the messages holds.

    `has_fields`: whether the messages have passed `chat_formats.with_fields`.
    """
    read = {*main}
    if has_fields:
        read |= {*chat_formats.texts_beside(row, main)}
        read |= {HISTORY} if chat_formats.history_beside(row, main) else {*()}
    turns = ((name, turn) for name in row if name in read for turn in _messages_in(row[name]))
    fields = [(f"{name}.{key}", v) for name, t in turns for key, v in t.items() if not _is_read(key, t)]
    fields += [(str(name), value) for name, value in row.items() if name not in read]
    return [f"the field `{name}` is not read" for name in dict.fromkeys(n for n, v in fields if _says(v))]


def _is_read(key: str, turn: Mapping[str, Any]) -> bool:
    """Whether a field of a message is read: a weight is only of an answer, or where it is none."""
    if key not in WEIGHT_KEYS:
        return key in MESSAGE_KEYS
    role = str(turn.get("role") or turn.get("from")).lower()
    return not turn[key] or chat_formats.ROLE_ALIASES.get(role, role) == "assistant"


def _says(value: Any) -> bool:
    return (value.strip() if isinstance(value, str) else value) not in _BLANK


def _messages_in(value: Any) -> list[Mapping[str, Any]]:
    turns = chat_formats.turns_in(value) if isinstance(value, list | dict) else ()
    return [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []


def check_fields(row: Mapping[str, Any], where: str) -> None:
    """Raise UserError where a row or a message has tools, reasoning or media, or judges its answer."""
    for key, value in row.items():
        if key in _REFUSED and _says(value):
            raise UserError(f"{where}: has `{key}`: {NOT_READ[key]}")
        turns = [t for t in _messages_in(value) if {"role", "from"} & t.keys()]
        for number, turn in enumerate(turns, 1):
            for name in sorted(name for name in NOT_READ.keys() & turn.keys() if _says(turn[name])):
                raise UserError(f"{where}: message {number} has `{name}`: {NOT_READ[name]}")
    judged = [n for n in ("label", "kto_tag") if str(row.get(n)).strip().lower() in _JUDGEMENTS]
    if judged and "chosen" not in row:
        raise UserError(
            f"{where}: has `{judged[0]}`, which says whether the answer is good: no task learns from bad ones"
            " alone: keep the good rows, without the column, or make pairs of them for --task dpo"
        )


def require_text_only(messages: Sequence[Message], where: str) -> None:
    """Raise UserError where a question has the mark of a picture, a film or a sound."""
    for found in (_MARK.search(m["content"]) for m in messages if m["role"] == "user"):
        if found:
            raise UserError(f"{where}: a question has {found[0]}: {NO_MEDIA}")


def has_weights(row: Mapping[str, Any]) -> bool:
    """Whether a message says itself if it is learnt."""
    return any(turn.get(k) is not None for v in row.values() for turn in _messages_in(v) for k in WEIGHT_KEYS)


def texts_in(rows: LocatedRows, column: str, counts: ConversationCounts) -> Iterator[str]:
    """The texts in a column. Rows without one are counted, and so is what else they hold."""
    for where, row in rows:
        text = readers.text_cell(row, column, where)
        if text.strip():
            counts.rows += 1
            counts.fields.update(notes_of_unread(row, (column,), has_fields=False))
            yield text
        else:
            counts.first_left_out = counts.first_left_out or where
            counts.left_out["an empty text" if column in row else f"no column `{column}`"] += 1
