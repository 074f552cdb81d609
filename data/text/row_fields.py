"""What rows hold, counted: what is learnt, left out, cut, or not read; and what a row is refused for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.measures import counted
from isobatch.core.package import table_beside
from isobatch.data import chat_formats, readers
from isobatch.data.chat_formats import HISTORY, MESSAGE_KEYS, NOT_READ, RESULT_KEYS, WEIGHT_KEYS

_BLANK: tuple[Any, ...] = (None, "", [], {}, "[]", "{}", "null")
_REFUSED = {"images", "image", "videos", "video", "audios", "audio"}
"""Columns without which the rest means something else."""
JUDGED = ("label", "kto_tag")
"""Columns that say whether an answer is good."""
_TABLES = table_beside(__file__)
JUDGEMENTS: dict[str, bool] = _TABLES["judgements"]
"""What stands there -> whether the answer is good."""


LEFT_OUT, FIELD = "left out: ", "field: "
"""What names of counts begin with."""
SIZES = [*("tokens", "predicted", "words", "bytes", "lines"), "conversations", "prompt_tokens"]
SIZES += ["response_tokens"]
CUTS: dict[str, str] = _TABLES["cuts"]
"""Counts of rows that were cut, and what is said of them."""


class RowCounts(Counter[str]):
    """Counts of a split's rows, by name.

    `rows` that are learnt from, `left out: REASON`, `field: WHAT` became of one; of conversations also those
    of CUTS, tokens of `prompt_tokens`, `response_tokens`, those learnt (`tokens`) and of these `predicted`,
    without the first of a row; and of the learnt texts `words`, `bytes` and `lines` (an answer's end is one).
    """

    first_left_out: str = ""
    """Where the first row of no text stands."""

    def leave_out(self, reason: object) -> None:
        """Count a row that is not learnt from."""
        self[f"{LEFT_OUT}{reason}"] += 1

    def add_fields(self, notes: Iterable[str]) -> None:
        """Count what became of a row's fields."""
        self.update(f"{FIELD}{note}" for note in notes)

    def sizes(self) -> dict[str, int]:
        """The counts that facts keep, by the names they have there."""
        return {name: self["rows" if name == "conversations" else name] for name in SIZES}

    def of(self, kind: str) -> Counter[str]:
        """The counts of which the names begin with LEFT_OUT or FIELD, by the rest of their names."""
        return Counter({n.removeprefix(kind): count for n, count in self.items() if n.startswith(kind)})

    def notes(self, split: str, max_length: int) -> Iterator[str]:
        """What the user should know, one line each."""
        if left_out := self.of(LEFT_OUT):
            reasons = ", ".join(f"{count:,} with {reason}" for reason, count in left_out.most_common())
            yield f"{split}: rows left out: {reasons}"
        for name, what in CUTS.items():
            if count := self[name]:
                rows = f"{count:,} of {self['rows']:,} rows"
                yield f"{split}: in {rows} {what} to fit --max-length {max_length}"

    def field_notes(self) -> Iterator[str]:
        """What became of the rows' fields, one line each; of all splits together."""
        yield from (f"{counted(count, 'row')}: {what}" for what, count in self.of(FIELD).most_common())


def notes_of_unread(row: Mapping[str, Any], main: Sequence[str], has_fields: bool = True) -> list[str]:
    """A note of each field of a row or its messages that says something and that none of the messages holds.

    `has_fields`: whether the messages have passed `chat_formats.with_fields`.
    """
    read = {*main}
    if has_fields:
        read |= {*chat_formats.texts_beside(row, main), *chat_formats.TOOL_COLUMNS}
        read.add(chat_formats.VALUES_COLUMN)
        read |= {HISTORY} if chat_formats.history_beside(row, main) else {*()}
    said = read & {*main, HISTORY}
    turns = ((name, turn) for name in row if name in said for turn in _messages_in(row[name]))
    fields = [(f"{name}.{key}", v) for name, t in turns for key, v in t.items() if not _is_read(key, t)]
    fields += [(str(name), value) for name, value in row.items() if name not in read]
    return [f"the field `{name}` is not read" for name in dict.fromkeys(n for n, v in fields if _says(v))]


def _is_read(key: str, turn: Mapping[str, Any]) -> bool:
    """Whether a field of a message is read: a weight is only of an answer, or where it is none."""
    role = str(turn.get("role") or turn.get("from")).lower()
    role = chat_formats.ROLE_ALIASES.get(role, role)
    if key in RESULT_KEYS:
        return role == "tool"
    if key not in WEIGHT_KEYS:
        return key in MESSAGE_KEYS
    return not turn[key] or role == "assistant"


def _says(value: Any) -> bool:
    return (value.strip() if isinstance(value, str) else value) not in _BLANK


def _messages_in(value: Any) -> list[Mapping[str, Any]]:
    turns = chat_formats.turns_in(value) if isinstance(value, list | dict) else ()
    return [turn for turn in turns if isinstance(turn, Mapping)] if isinstance(turns, list) else []


def check_fields(row: Mapping[str, Any], where: str) -> None:
    """Raise UserError where a row or a message has media, or judges its answer."""
    for key, value in row.items():
        if key in _REFUSED and _says(value):
            raise UserError(f"{where}: has `{key}`: {NOT_READ[key]}")
        turns = [t for t in _messages_in(value) if {"role", "from"} & t.keys()]
        for number, turn in enumerate(turns, 1):
            for name in sorted(name for name in NOT_READ.keys() & turn.keys() if _says(turn[name])):
                raise UserError(f"{where}: message {number} has `{name}`: {NOT_READ[name]}")
    judged = [n for n in JUDGED if str(row.get(n)).strip().lower() in JUDGEMENTS]
    if judged and "chosen" not in row:
        raise UserError(
            f"{where}: has `{judged[0]}`, which says whether the answer is good: --task kto learns from"
            " both; for this one keep the good rows, without the column"
        )


def has_weights(row: Mapping[str, Any]) -> bool:
    """Whether a message says itself if it is learnt."""
    return any(turn.get(k) is not None for v in row.values() for turn in _messages_in(v) for k in WEIGHT_KEYS)


def texts_in(rows: readers.LocatedRows, column: str, counts: RowCounts) -> Iterator[str]:
    """The texts in a column. Rows without one are counted, and so is what else they hold."""
    for where, row in rows:
        text = readers.text_cell(row, column, where)
        if text.strip():
            counts["rows"] += 1
            counts.add_fields(notes_of_unread(row, (column,), has_fields=False))
            yield text
        else:
            counts.first_left_out = counts.first_left_out or where
            counts.leave_out("an empty text" if column in row else f"no column `{column}`")
