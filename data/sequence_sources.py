"""Where sequences come from: lines of text, or the column of a table that holds texts or lists of ids."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import corpora, readers
from isobatch.data.corpora import Corpus, RowCorpus
from isobatch.data.tables.delimited import is_number

if TYPE_CHECKING:
    from isobatch.data.readers import LocatedRows, SplitFiles

TEXT, INTEGERS = "text", "lists of integers"
"""What a column may hold that can be learnt."""
FLAGS = {TEXT: "--text-column", INTEGERS: "--sequence-column"}
USUAL_COLUMNS = {TEXT: ("text", "sentence"), INTEGERS: ("tokens", "input_ids", "ids", "sequence")}
SAMPLED_ROWS = 100
"""Rows that are read to see what the columns of csv, tsv, jsonl and json hold."""
DEMO_LINES = {"train": 6000, "valid": 600}
"""Most lines of each split of the demo."""
DEMO_LINE_WORDS = 3
"""Fewest words of a line of the demo."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IdCorpus:
    """The sequences of ids of each split."""

    splits: Mapping[str, Callable[[], Iterable[tuple[str, np.ndarray]]]]
    """Split -> a function that reads (place, (ids,) int64) of each sequence, from the first on;
    `place` names its file, row and column, for error messages."""
    notes: tuple[str, ...] = ()


class SequenceColumn(NamedTuple):
    """The column that holds the sequences."""

    name: str
    kind: str
    """TEXT or INTEGERS."""
    note: str = ""
    """What the user should know of the choice."""


def find_column(
    data: str, kinds: Mapping[str, str], asked: Mapping[str, str | None], prefers_text: bool
) -> SequenceColumn:
    """The column of the sequences among columns that hold `kinds`.

    The one `asked` for, by kind; else one of lists of integers; else, or if that is preferred, one of text.
    Raises UserError where there is none, or where several could be meant.
    """
    for kind, name in asked.items():
        if name is not None:
            readers.require_name(name, list(kinds), data, FLAGS[kind])
            return SequenceColumn(name, kind)
    found = {kind: [name for name, held in kinds.items() if held == kind] for kind in FLAGS}
    kind = TEXT if found[TEXT] and (prefers_text or not found[INTEGERS]) else INTEGERS
    usual = [name for name in USUAL_COLUMNS[kind] if name in found[kind]]
    names = usual[:1] or found[kind]
    if len(names) != 1:
        problem = f"which column? {FLAGS[kind]} says" if names else f"no column holds {TEXT} or {INTEGERS}"
        has = readers.name_columns([f"{name} ({held})" for name, held in kinds.items()] or ["no rows"])
        raise UserError(f"--data {data}: {problem}; it has: {has}")
    others = [f"{FLAGS[k]} {name}" for k in FLAGS for name in found[k] if name != names[0]]
    like_row = " (is that a row? --text-column 1 reads it, too)" * (" " in names[0])
    note = f"the column {names[0]} holds the sequences{like_row}" if others or like_row else ""
    note += f" ({others[0]} takes another)" if others else ""
    return SequenceColumn(names[0], kind, note)


def column_kinds(rows: LocatedRows) -> dict[str, str]:
    """Column -> what it holds by the first rows: TEXT, INTEGERS, or a word for users."""
    first: dict[str, str] = {}
    useful: dict[str, str] = {}
    for _, row in itertools.islice(rows, SAMPLED_ROWS):
        for name, cell in row.items():
            kind = _cell_kind(cell)
            (useful if kind in FLAGS else first).setdefault(str(name), kind)
    return first | useful


def _cell_kind(cell: Any) -> str:
    if isinstance(cell, str):  # as is every cell of csv and tsv
        return TEXT if cell.strip() and not is_number(cell) else "numbers"
    if isinstance(cell, list) and cell:
        strange = next((v for v in cell if type(v) is not int), 0)
        return INTEGERS if type(strange) is int else f"lists of {_type_name(strange)}"
    return _type_name(cell)


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def open_demo() -> Corpus:
    """Lines of source code of Python's standard library, a part of them at even distances."""
    splits = corpora.demo_corpus().splits
    return Corpus({split: partial(_demo_lines, texts, DEMO_LINES[split]) for split, texts in splits.items()})


def _demo_lines(texts: Callable[[], Iterable[str]], most: int) -> list[str]:
    lines = [line for text in texts() for line in text.split("\n") if len(line.split()) >= DEMO_LINE_WORDS]
    return lines[:: math.ceil(len(lines) / most)]


def open_lines(parts: Mapping[str, SplitFiles]) -> Corpus:
    """The lines of text files, with a validation split."""
    parts, notes = corpora.with_validation(dict(parts))
    return Corpus({split: partial(_lines, part) for split, part in parts.items()}, notes=notes)


def open_column(corpus: RowCorpus, column: SequenceColumn) -> Corpus | IdCorpus:
    """The sequences in a column of rows."""
    notes = corpus.notes + ((column.note,) if column.note else ())
    read = _texts if column.kind == TEXT else _ids
    splits = {split: partial(read, rows, column.name) for split, rows in corpus.splits.items()}
    return Corpus(splits, notes=notes) if column.kind == TEXT else IdCorpus(splits, notes)


def _lines(part: SplitFiles) -> Iterator[str]:
    """The lines of .txt files; a very long one comes in several chunks."""
    for file in part.files:
        rest = ""
        for chunk in readers.read_stream(dataclasses.replace(part, files=(file,))):
            *lines, rest = (rest + chunk).split("\n")
            yield from lines
        if rest:
            yield rest


def _texts(rows: Callable[[], LocatedRows], column: str) -> Iterator[str]:
    return (readers.text_cell(row, column, where) for where, row in rows())


def _ids(rows: Callable[[], LocatedRows], column: str) -> Iterator[tuple[str, np.ndarray]]:
    """Raises UserError for what is no list of integers; null is one without."""
    for where, row in rows():
        cell, place = row.get(column) or [], f"{where}: {column}"
        if cell and (kind := _cell_kind(cell)) != INTEGERS:
            raise UserError(f"{place} holds {kind}, not {INTEGERS}")
        try:
            yield place, np.array(cell, np.int64)
        except OverflowError:
            raise UserError(f"{place} holds an id of more than 64 bits: number the ids from 0") from None


def require_ids_below(size: int, batch: Iterable[tuple[str, np.ndarray]], why: str) -> None:
    """Raise UserError with the first id of a batch that is negative, or that is not below `size`: `why`."""
    for place, ids in batch:
        if wrong := [i for i in ids.tolist() if not 0 <= i < size]:
            problem = "ids begin at 0" if wrong[0] < 0 else why
            raise UserError(f"{place} holds the id {wrong[0]}: {problem}")


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`; the last may be shorter."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
