"""How a model's samples are read: from a row of a file, or from a text that somebody typed or sent.

Each reader has `from_row(row, where)` and `from_text(value, where)`; `where` names the place in errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.data import chat_formats
from isobatch.data.interactions.formats import USER_COLUMNS
from isobatch.data.labelled.rows import MAX_TEXT_CHARACTERS, PAIR_COLUMNS, TEXT_COLUMNS
from isobatch.data.sequences import INTEGERS, TEXT, USUAL_COLUMNS
from isobatch.data.text.chat_templates import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ITEMS_COLUMN = "items"
"""A list of what a user took who was not in training."""
NO_TEXT, UNKNOWN_USER = "no text", "training knew nothing of the user"


class UnansweredRowError(UserError):
    """A row that gets no answer, and does not end the command."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


@dataclass(frozen=True, slots=True)
class RowReader:
    """Makes samples for a `Predictor` of texts in one column. Raises UserError."""

    column: str | None = None
    """The column that is read; by default the first of `usual` that a row has."""
    pair: str | None = None
    """The column of the second text of pairs."""
    pairs: bool | None = False
    """Whether the model reads pairs of texts; None where the columns decide."""
    usual: ClassVar[tuple[str, ...]] = ()

    def from_row(self, row: Mapping[str, Any], where: str) -> Any:
        """The sample in a row."""
        column = find_column(row, self.column, self.usual, where)
        return self.from_text(row[column], f"{where}: {column}")

    def from_text(self, value: Any, where: str) -> Any:
        """The sample that one value stands for: a text; a list of two for a pair."""
        return require_text(value, where)


@dataclass(frozen=True, slots=True)
class TextReader(RowReader):
    """Texts, or pairs of texts."""

    pairs: bool | None = None

    def from_row(self, row: Mapping[str, Any], where: str) -> str | tuple[str, str]:
        text = find_column(row, self.column, TEXT_COLUMNS, where)
        first, pair = require_text(row[text], f"{where}: {text}"), self.pair or PAIR_COLUMNS.get(text)
        if self.pairs is False or not (self.pairs or self.pair or pair in row):
            return first
        pair = find_column(row, self.pair, (pair,) if pair else (), where, "--pair-column")
        return first, require_text(row[pair], f"{where}: {pair}")

    def from_text(self, value: Any, where: str) -> str | tuple[str, str]:
        if isinstance(value, list | tuple) and len(value) == 2 and self.pairs is not False:
            return require_text(value[0], where), require_text(value[1], where)
        if self.pairs:
            raise UserError(f'{where}: this model reads pairs of texts: give two, as in ["one", "other"]')
        return require_text(value, where)


class SequenceReader(RowReader):
    """Texts, or lists of integers."""

    usual = (*USUAL_COLUMNS[INTEGERS], *USUAL_COLUMNS[TEXT])

    def from_text(self, value: Any, where: str) -> str | list[int]:
        if not isinstance(value, list):
            return require_text(value, where)
        if not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
            raise UserError(f"{where}: a sequence is a text, or a list of whole numbers")
        return value


@dataclass(frozen=True, slots=True)
class UserReader(RowReader):
    """Ids of users; or, of users who were not in training, the items that each took."""

    lists: Any = None
    """`Recommendations`: knows users, and items of which a cell names several with commas between them."""
    left_out: list[str] | None = None
    """Where given, unknown items of a row are put here, each with its place, and their row goes on."""

    def from_row(self, row: Mapping[str, Any], where: str) -> str | list[str]:
        taken = None if self.column else row.get(ITEMS_COLUMN)
        if isinstance(taken, str) and taken.strip():
            taken = self.lists.split_items(taken)
        if isinstance(taken, list):
            return self._known_items([str(item) for item in taken], f"{where}: {ITEMS_COLUMN}")
        named = [name for name in USER_COLUMNS if name in row][:1] or ["user_id"]
        user = self.from_text(row[find_column(row, self.column, named, where)], where)
        if self.left_out is not None and not self.lists.knows_user(user):
            raise UnansweredRowError(f"{where}: user {user}: is not in the training data", UNKNOWN_USER)
        return user

    def _known_items(self, items: list[str], where: str) -> list[str]:
        known = [n for n in items if self.left_out is None or self.lists.knows_item(n)]
        if self.left_out is not None:
            self.left_out.extend(f"{where}: item {item}" for item in items if item not in known)
        if not known:
            raise UnansweredRowError(f"{where}: is empty, or unknown to training: leave it out", UNKNOWN_USER)
        return known

    def from_text(self, value: Any, where: str) -> str:
        return str(value) if isinstance(value, int | float) else require_text(value, where)


@dataclass(frozen=True, slots=True)
class PromptReader(RowReader):
    """Prompts for a language model: texts; or questions, for one that was trained on conversations."""

    template: ChatTemplate | None = None
    usual: ClassVar = ("prompt", "text", "question", "query", "input", "instruction", "problem")

    def from_row(self, row: Mapping[str, Any], where: str) -> Any:
        form = chat_formats.detect_chat_format(list(row)) if self.template and not self.column else None
        if form and self.template:
            return self.template.prompt_segments(chat_formats.parse_question(row, where, form), where)
        column = find_column(row, self.column, self.usual, where)
        return self._prompt(row[column], f"{where}: {column}", row, column)

    def from_text(self, value: Any, where: str) -> Any:
        return self._prompt(value, where, {}, "")

    def _prompt(self, value: Any, where: str, row: Mapping[str, Any], column: str) -> Any:
        """A text; for a model of conversations, a question with what the row's other columns say of it."""
        text = require_text(value, where)
        if self.template is None:
            return text
        asked = chat_formats.with_fields(row, [{"role": "user", "content": text}], (column,))
        return self.template.prompt_segments(asked, where)


def find_column(
    row: Mapping[str, Any], asked: str | None, usual: Sequence[str], where: str, flag: str = "--text-column"
) -> str:
    """The column asked for, else the first of the usual names. Raises UserError where the row has none."""
    found = next((name for name in ((asked,) if asked else usual) if name in row), None)
    if found is not None:
        return found
    wanted = asked or " or ".join(usual)
    hint = nearest_hint(asked, list(row)) if asked else ""
    raise UserError(
        f"{where}: has no column {wanted}{hint}; it has: {chat_formats.key_names(row)}; {flag} names another"
    )


def require_text(value: Any, where: str) -> str:
    """The value. Raises UserError where it is no text, an empty or a very long one."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: holds {type(value).__name__}, not text")
    if not value or not value.strip():
        raise UnansweredRowError(f"{where}: is empty: leave it out", NO_TEXT)
    if len(value) > MAX_TEXT_CHARACTERS:
        raise UserError(
            f"{where}: has {len(value):,} characters, at most {MAX_TEXT_CHARACTERS:,}: shorten it"
        )
    return value
