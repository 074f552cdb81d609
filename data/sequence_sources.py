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
from isobatch.core.flags import nearest_hint
from isobatch.data import corpora, readers
from isobatch.data.corpora import Corpus
from isobatch.data.tables.delimited import is_number

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow

    from isobatch.data.readers import LocatedRows, SplitFiles

    LocatedArrays = Iterable[tuple[Path | str, int, pyarrow.Array]]

TEXT, INTEGERS = "text", "lists of integers"
"""What a column may hold that can be learnt."""
FLAGS = {TEXT: "--text-column", INTEGERS: "--sequence-column"}
USUAL_COLUMNS = {TEXT: ("text", "sentence"), INTEGERS: ("tokens", "input_ids", "ids", "sequence")}
SAMPLED_ROWS = 100
"""Rows that are read to see what the columns of csv, tsv, jsonl and json hold."""
BATCH_ROWS = 1000
DEMO_LINES = {"train": 6000, "valid": 600}
"""Most lines of each split of the demo."""
DEMO_LINE_WORDS = 3
"""Fewest words of a line of the demo."""
T = TypeVar("T")


class IdBatch(NamedTuple):
    """Some sequences of ids, end to end."""

    values: np.ndarray
    """(ids,) of any integer type."""
    lengths: np.ndarray
    """(sequences,) int64."""
    where: Callable[[int], str]
    """Number of a sequence in the batch -> its file, row and column, for error messages."""

    def locate(self, position: int) -> str:
        """`where` of the sequence that has this position of `values`."""
        return self.where(int(np.searchsorted(np.cumsum(self.lengths), position, side="right")))


@dataclass(frozen=True, slots=True)
class IdCorpus:
    """The sequences of ids of each split."""

    splits: Mapping[str, Callable[[], Iterable[IdBatch]]]
    """Split -> a function that reads its sequences from the beginning, at every call."""
    notes: tuple[str, ...] = ()


class SequenceColumn(NamedTuple):
    """The column that holds the sequences."""

    name: str
    kind: str
    """TEXT or INTEGERS."""
    note: str = ""
    """What the user should know of the choice."""

    def require_in(self, kinds: Mapping[str, str], data: object, same_kind: bool = True) -> None:
        """Raise UserError unless `data`, whose columns hold `kinds`, has this column, and of this kind."""
        if self.name not in kinds:
            raise UserError(
                f"{FLAGS[self.kind]} {self.name}: {data} has no such column"
                f"{nearest_hint(self.name, list(kinds))}; it has: {', '.join(kinds)}"
            )
        if same_kind and kinds[self.name] != self.kind:
            raise UserError(f"{data}: {self.name} holds {kinds[self.name]}, not {self.kind}")


def find_column(
    data: str, kinds: Mapping[str, str], asked: Mapping[str, str | None], prefers_text: bool
) -> SequenceColumn:
    """The column of the sequences among columns that hold `kinds`.

    The one `asked` for, by kind; else one of lists of integers; else, or if that is preferred, one of text.
    Raises UserError where there is none, or where several could be meant.
    """
    for kind, name in asked.items():
        if name is not None:
            column = SequenceColumn(name, kind)
            column.require_in(kinds, data, same_kind=False)
            return column
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


def column_kinds(part: SplitFiles) -> dict[str, str]:
    """Column -> what it holds: TEXT, INTEGERS, or a word for users; by the first file, or the first rows."""
    if part.format == "parquet":
        with readers.open_parquet(part.files[0]) as table:
            return arrow_kinds(table.schema_arrow)
    first: dict[str, str] = {}
    useful: dict[str, str] = {}
    for _, row in itertools.islice(readers.read_rows(part), SAMPLED_ROWS):
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


def arrow_kinds(schema: pyarrow.Schema) -> dict[str, str]:
    """Column -> what it holds: TEXT, INTEGERS, or its Arrow type."""
    return {field.name: _arrow_kind(field.type) for field in schema}


def _arrow_kind(kind: pyarrow.DataType) -> str:
    from pyarrow import types

    if types.is_dictionary(kind):
        return _arrow_kind(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return TEXT
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return INTEGERS if is_list and types.is_integer(kind.value_type) else str(kind)


def open_demo() -> Corpus:
    """Lines of source code of Python's standard library, a part of them at even distances."""
    splits = corpora.demo_corpus().splits
    return Corpus({split: partial(_demo_lines, texts, DEMO_LINES[split]) for split, texts in splits.items()})


def _demo_lines(texts: Callable[[], Iterable[str]], most: int) -> list[str]:
    lines = [line for text in texts() for line in text.split("\n") if len(line.split()) >= DEMO_LINE_WORDS]
    return lines[:: math.ceil(len(lines) / most)]


def open_files(parts: Mapping[str, SplitFiles], column: SequenceColumn | None) -> Corpus | IdCorpus:
    """The sequences in files, with a validation split; `column` is None for lines of text."""
    parts, notes = corpora.with_validation(dict(parts))
    if column is None:
        return Corpus({split: partial(_lines, part) for split, part in parts.items()}, notes=notes)
    if parts["train"].format == "parquet":
        arrays = {s: partial(readers.read_parquet_column, part, column.name) for s, part in parts.items()}
        return _open_column(arrays, column, _READ_ARRAYS, notes)
    rows = {split: partial(readers.read_rows, part) for split, part in parts.items()}
    return _open_column(rows, column, _READ_ROWS, notes)


def open_hub(
    name: str, config: str | None, choose: Callable[[Mapping[str, str]], SequenceColumn]
) -> Corpus | IdCorpus:
    """The sequences of a hub data set, in the column that `choose` takes by what each column holds."""
    splits, notes = corpora.load_hub_splits(name, config)
    column = choose(arrow_kinds(splits["train"].features.arrow_schema))
    for rows in splits.values():
        column.require_in(arrow_kinds(rows.features.arrow_schema), name)
    arrays = {s: partial(corpora.read_hub_column, name, rows, column.name) for s, rows in splits.items()}
    return _open_column(arrays, column, _READ_ARRAYS, notes)


def _open_column(
    sources: Mapping[str, Callable[[], Any]],
    column: SequenceColumn,
    read: Mapping[str, Callable[..., Any]],
    notes: tuple[str, ...],
) -> Corpus | IdCorpus:
    splits = {s: partial(read[column.kind], source, column.name) for s, source in sources.items()}
    notes += (column.note,) if column.note else ()
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


def _texts_in_rows(rows: Callable[[], LocatedRows], column: str) -> Iterator[str]:
    return (readers.text_cell(row, column, where) for where, row in rows())


def _texts_in_arrays(arrays: Callable[[], LocatedArrays], column: str) -> Iterator[str]:
    for source, before, values in arrays():
        try:
            texts = values.to_pylist()
        except UnicodeDecodeError:
            rows = f"rows {before + 1} to {before + len(values)}"
            raise UserError(f"{source} {rows}: {column} holds text that is not UTF-8") from None
        yield from (text or "" for text in texts)


def _ids_in_rows(rows: Callable[[], LocatedRows], column: str) -> Iterator[IdBatch]:
    for batch in batched(rows(), BATCH_ROWS):
        places = [f"{where}: {column}" for where, _ in batch]
        ids = [_parse_ids(row.get(column), place) for place, (_, row) in zip(places, batch, strict=True)]
        yield IdBatch(np.concatenate(ids), np.array([len(i) for i in ids]), places.__getitem__)


def _parse_ids(cell: Any, place: str) -> np.ndarray:
    """(ids,) int64, none for null. Raises UserError for what is no list of integers."""
    if cell is None or cell == []:
        return np.empty(0, np.int64)
    if (kind := _cell_kind(cell)) != INTEGERS:
        raise UserError(f"{place} holds {kind}, not {INTEGERS}")
    try:
        return np.array(cell, np.int64)
    except OverflowError:
        raise UserError(f"{place} holds an id of more than 64 bits: number the ids from 0") from None


def _ids_in_arrays(arrays: Callable[[], LocatedArrays], column: str) -> Iterator[IdBatch]:
    from pyarrow import compute

    for source, before, lists in arrays():
        values, where = lists.flatten(), partial(_row_name, source, before, column)
        lengths = _to_numpy(compute.list_value_length(lists)).astype(np.int64)
        batch = IdBatch(_to_numpy(values), lengths, where)
        if values.null_count:
            null = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
            raise UserError(f"{batch.locate(null)} holds a null among its ids")
        yield batch


def _to_numpy(integers: pyarrow.Array) -> np.ndarray:
    """(n,), 0 for null. Arrow's own to_numpy imports pandas, which may take longer than all the data."""
    return np.from_dlpack(integers.fill_null(0) if integers.null_count else integers)


def _row_name(source: Path | str, before: int, column: str, number: int) -> str:
    return f"{source} row {before + number + 1}: {column}"


_READ_ROWS = {TEXT: _texts_in_rows, INTEGERS: _ids_in_rows}
_READ_ARRAYS = {TEXT: _texts_in_arrays, INTEGERS: _ids_in_arrays}


def require_ids_below(size: int, batch: IdBatch, why: str) -> None:
    """Raise UserError with the first id of a batch that is negative, or that is not below `size`: `why`."""
    ids = batch.values
    if len(ids) and (ids.min() < 0 or ids.max() >= size):
        position = int(((ids < 0) | (ids >= size)).argmax())
        problem = "ids begin at 0" if ids[position] < 0 else why
        raise UserError(f"{batch.locate(position)} holds the id {ids[position]}: {problem}")


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """The items in lists of `size`; the last may be shorter."""
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
