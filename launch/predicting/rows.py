"""How a model's samples are read: from a row of a file, or from a text that somebody typed or sent.

Each reader has `from_row(row, where)` and `from_text(value, where)`; `where` names the place in errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.data import chat_formats
from isobatch.data.interactions.formats import USER_COLUMNS
from isobatch.data.labelled.columns import PAIR_COLUMNS, TEXT_COLUMNS
from isobatch.data.labelled.rows import MAX_TEXT_CHARACTERS
from isobatch.data.sequence_sources import INTEGERS, TEXT, USUAL_COLUMNS
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.models.protocols import ItemLists

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


PROMPT_COLUMNS = ("prompt", "text", "question", "query", "input", "instruction", "problem")
ITEMS_COLUMN = "items"
"""A list of what a user took who was not in training."""


class UnansweredRowError(UserError):
    """A row that gets no answer, and does not end the command."""

    why: ClassVar[tuple[str, str]]
    """Of one row, and of several: what is the matter with them."""


class EmptyTextError(UnansweredRowError):
    """A row without a text, which a file may have."""

    why = ("has no text and no answer", "have no text and no answer")


class UnknownRowError(UnansweredRowError):
    """A row of a user of whom the model knows nothing, with --skip-unknown."""

    why = (
        "is of a user of whom training knew nothing, and has no answer",
        "are of users of whom training knew nothing, and have no answer",
    )


class RowReader(Protocol):
    """Makes samples for a `Predictor`. Both raise UserError."""

    @property
    def texts_per_sample(self) -> int:
        """2 for pairs of texts."""

    def from_row(self, row: Mapping[str, Any], where: str) -> Any:
        """The sample in a row."""

    def from_text(self, value: Any, where: str) -> Any:
        """The sample that one value stands for: a text; a list of two for a pair."""


@dataclass(frozen=True, slots=True)
class TextReader:
    """Texts, or pairs of texts."""

    text: str | None = None
    """The column of the text; by default the first of the usual names."""
    pair: str | None = None
    """The column of the second text."""
    pairs: bool | None = None
    """Whether the model was trained on pairs; None where the columns decide."""

    @property
    def texts_per_sample(self) -> int:
        return 2 if self.pairs else 1

    def from_row(self, row: Mapping[str, Any], where: str) -> str | tuple[str, str]:
        text = find_column(row, self.text, TEXT_COLUMNS, where, "--text-column")
        if self.pairs is False:
            return text_in(row, text, where)
        pair = self.pair or PAIR_COLUMNS.get(text)
        if self.pairs or self.pair or pair in row:
            usual = (pair,) if pair else ()
            pair = find_column(row, self.pair, usual, where, "--pair-column")
            return text_in(row, text, where), text_in(row, pair, where)
        return text_in(row, text, where)

    def from_text(self, value: Any, where: str) -> str | tuple[str, str]:
        if isinstance(value, list | tuple) and len(value) == 2 and self.pairs is not False:
            return require_text(value[0], where), require_text(value[1], where)
        if self.pairs:
            raise UserError(f'{where}: this model reads pairs of texts: give two, as in ["one", "other"]')
        return require_text(value, where)


class SampleError(UserError):
    """One of the samples that a model was asked cannot be answered. `number`: its place among them."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


@dataclass(frozen=True, slots=True)
class SequenceReader:
    """Texts, or lists of integers."""

    column: str | None = None
    texts_per_sample: int = 1

    def from_row(self, row: Mapping[str, Any], where: str) -> str | list[int]:
        usual = (*USUAL_COLUMNS[INTEGERS], *USUAL_COLUMNS[TEXT])
        return self.from_text(row[find_column(row, self.column, usual, where, "--text-column")], where)

    def from_text(self, value: Any, where: str) -> str | list[int]:
        if isinstance(value, list):
            if not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
                raise UserError(f"{where}: a sequence is a text, or a list of whole numbers")
            return value
        return require_text(value, where)


@dataclass(frozen=True, slots=True)
class UserReader:
    """Ids of users; or, of users who were not in training, the items that each took."""

    column: str | None = None
    known: ItemLists | None = None
    """With --skip-unknown: items that it does not know are left out, and rows of which nothing is left."""
    left_out: list[str] = field(default_factory=list)
    """The items left out so far, each with its place."""
    split: Callable[[str], list[str]] = lambda text: text.split(",")
    """Makes a list of the items in a cell, as of a csv file, that commas part."""
    texts_per_sample: int = 1

    def from_row(self, row: Mapping[str, Any], where: str) -> str | list[str]:
        taken = None if self.column else row.get(ITEMS_COLUMN)
        if isinstance(taken, str) and taken.strip():
            taken = self.split(taken)
        if isinstance(taken, list):
            if not taken:
                raise EmptyTextError(f"{where}: {ITEMS_COLUMN}: is empty: leave it out")
            return self._known_items([str(item) for item in taken], where)
        named = [name for name in USER_COLUMNS if name in row][:1] or ["user_id"]
        user = self.from_text(row[find_column(row, self.column, named, where, "--text-column")], where)
        if self.known is not None and not self.known.knows_user(user):
            raise UnknownRowError(f"{where}: user {user}: is not in the training data")
        return user

    def _known_items(self, items: list[str], where: str) -> list[str]:
        if self.known is None:
            return items
        found = [item for item in items if self.known.knows_item(item)]
        self.left_out.extend(f"{where}: item {item}" for item in items if not self.known.knows_item(item))
        if not found:
            raise UnknownRowError(f"{where}: item {items[0]}: is not known from training, nor another")
        return found

    def user_in(self, row: Mapping[str, Any]) -> str | None:
        """The user that a row names; None where it names none."""
        column = next((name for name in (self.column, *USER_COLUMNS, "text") if name and name in row), None)
        return None if column is None else str(row[column])

    def from_text(self, value: Any, where: str) -> str:
        return str(value) if isinstance(value, int | float) else require_text(value, where)


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Prompts for a language model: texts; or questions, for one that was trained on conversations."""

    column: str | None = None
    template: ChatTemplate | None = None
    texts_per_sample: int = 1

    def from_row(self, row: Mapping[str, Any], where: str) -> Any:
        chat_format = (
            chat_formats.detect_chat_format(list(row)) if self.template and not self.column else None
        )
        if chat_format is not None and self.template is not None:
            return self.template.prompt_segments(chat_formats.parse_question(row, where, chat_format), where)
        column = find_column(row, self.column, PROMPT_COLUMNS, where, "--text-column")
        return self._prompt(text_in(row, column, where), where, row, column)

    def from_text(self, value: Any, where: str) -> Any:
        return self._prompt(require_text(value, where), where, {}, "")

    def _prompt(self, text: str, where: str, row: Mapping[str, Any], column: str) -> Any:
        """A text; for a model of conversations, a question with what the row's other columns say of it."""
        if self.template is None:
            return text
        asked = chat_formats.with_fields(row, [{"role": "user", "content": text}], (column,))
        return self.template.prompt_segments(asked, where)


def find_column(
    row: Mapping[str, Any], asked: str | None, usual: Sequence[str], where: str, flag: str
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


def text_in(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text in a column. Raises UserError as `require_text` does."""
    return require_text(row[column], f"{where}: {column}")


def require_text(value: Any, where: str) -> str:
    """The value. Raises UserError where it is no text, an empty or a very long one."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: holds {type(value).__name__}, not text")
    if not value or not value.strip():
        raise EmptyTextError(f"{where}: is empty: leave it out")
    if len(value) > MAX_TEXT_CHARACTERS:
        raise UserError(
            f"{where}: has {len(value):,} characters, at most {MAX_TEXT_CHARACTERS:,}: shorten it"
        )
    return value
