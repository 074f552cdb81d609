"""Tables in and out: rows of csv, tsv, jsonl, json, Parquet or txt, a model's samples in them, and answers to
csv, jsonl or Parquet.

Each reader of samples has `from_row(row, where)` and `from_text(value, where)`, of a text that somebody typed
or sent; `where` names the place in errors.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from isobatch.core import atomic_files
from isobatch.core.errors import UserError, nearest_file
from isobatch.core.measures import counted, printable
from isobatch.core.terminal import print_lines
from isobatch.data import chat_formats, readers
from isobatch.data.interactions.formats import usual_column
from isobatch.data.labelled import rows as reading
from isobatch.data.preferences import answers
from isobatch.data.preferences.pairs import AnsweredPrompt
from isobatch.data.sequences import INTEGERS, TEXT, USUAL_COLUMNS
from isobatch.data.text.chat_templates import ChatTemplate

LINES = ".txt"
"""The ending of a file with a text in each line."""
CHUNK_ROWS = 4096
"""Rows that are read, answered and written together."""
ROW_ENDINGS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".conll", LINES)
OUT_ENDINGS = (".csv", ".jsonl", ".parquet")
ITEMS_COLUMN = "items"
"""A list of what a user took who was not in training."""
NO_TEXT = "no text"
Rows = Sequence[Mapping[str, Any]]


def is_table(text: str) -> bool:
    """Whether the text is the name of a file of rows, by its ending."""
    return Path(text.lower().removesuffix(readers.GZIP)).suffix in ROW_ENDINGS


def check_file(name: str, flag: str = "--file") -> Path:
    """The file of rows that a flag names. Raises UserError where there is none that can be read."""
    path = Path(name).expanduser()
    if not path.is_file() or not os.access(path, os.R_OK):
        raise UserError(f"{flag} {name}: there is no such file that can be read{nearest_file(name)}")
    if not is_table(name):
        raise UserError(f"{flag} {name}: give a file of rows that ends in {', '.join(ROW_ENDINGS)}")
    return path


def read_table(name: str, flag: str = "--file", columns: Sequence[str | None] = ()) -> readers.LocatedRows:
    """(where, row) of each row of a file. `columns`: what flags name, perhaps by number.

    Raises UserError where it is none, or holds no rows.
    """
    path = check_file(name, flag)
    rows = _lines(path) if path.suffix.lower() == LINES else _rows(path, columns)
    if (first := next(rows, None)) is None:
        raise UserError(f"{flag} {name}: holds no rows")
    return itertools.chain([first], rows)


def _rows(path: Path, columns: Sequence[str | None]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    part, *others = readers.find_splits(path, None).values()
    if others:
        raise UserError(f"--file {path}: holds several splits: give a file of one")
    part = dataclasses.replace(part, numbers=readers.numbers_in(columns))
    print_lines(*readers.table_notes({"train": part}))
    return iter(readers.read_rows(part))


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A row with the column `text` for each line that is not empty."""
    for number, line in enumerate(readers.read_lines(path), 1):
        if line.strip():
            yield f"{path} line {number}", {"text": line.rstrip("\r\n")}


def beside(row: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its answer behind it; a column of the row with an answer's name becomes `input.NAME`."""
    return {(f"input.{k}" if k in answer else k): v for k, v in row.items()} | dict(answer)


def without_values(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What stands where there is no answer, in the form of one."""
    return {k: without_values(v) if isinstance(v, dict) else None for k, v in answer.items()}


def open_writer(
    path: Path, ending: str, first: Any, opened: contextlib.ExitStack, semicolons: bool = False
) -> Callable[[Rows], Any]:
    """A function that writes rows behind each other, in columns as the `first` ones have them.

    They may be tables of pyarrow. `semicolons`: csv for an Excel whose numbers have decimal commas: it takes
    1.5 for a day in May, and text without a byte-order mark for another encoding.
    """
    if ending == ".parquet":
        import pyarrow
        from pyarrow import parquet

        def table_of(rows: Any, schema: Any = None) -> Any:
            arrow = isinstance(rows, pyarrow.Table)
            return rows if arrow else pyarrow.Table.from_pylist([*map(flatten, rows)], schema=schema)

        schema = table_of(first).schema
        table = opened.enter_context(parquet.ParquetWriter(os.fspath(path), schema))
        return lambda rows: table.write_table(table_of(rows, schema))
    if hasattr(first, "to_pylist"):
        write = open_writer(path, ending, first.to_pylist(), opened)
        return lambda rows: write(cast("Any", rows).to_pylist())
    encoding = "utf-8-sig" if semicolons else "utf-8"
    stream = opened.enter_context(path.open("w", encoding=encoding, newline=""))
    if ending == ".jsonl":
        return lambda rows: stream.writelines(json_line(row) + "\n" for row in rows)
    names = list(dict.fromkeys(name for row in first for name in flatten(row)))
    writer = csv.DictWriter(stream, names, lineterminator="\n", delimiter=";" if semicolons else ",")
    writer.writeheader()

    def cell(value: Any) -> Any:
        if semicolons and isinstance(value, float):
            return str(value).replace(".", ",")
        return json_line(value) if isinstance(value, list | dict) else value

    return lambda rows: writer.writerows({n: cell(v) for n, v in flatten(row).items()} for row in rows)


def check_out(out: str, file: str | None) -> Path:
    """The path of --out. Raises UserError where nothing can be written there."""
    path = Path(out).expanduser()
    if path.suffix.lower() not in OUT_ENDINGS:
        raise UserError(f"--out {out}: must end in {', '.join(OUT_ENDINGS)}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--out {out}: {'is a folder' if path.is_dir() else 'there is no such folder'}")
    source = None if file is None else Path(file).expanduser()
    if source and path.exists() and source.exists() and path.samefile(source):
        raise UserError(f"--out {out}: is the file of the rows: take another name")
    return path


def write_rows(path: Path, chunks: Iterable[Rows], as_json: bool = False, like: str | None = None) -> int:
    """Write dictionaries of one shape by the ending of `path`, say how many, and return the exit code.

    The file appears there, complete, when all is written. `like`: the file of the rows; csv has semicolons
    where it has them. Raises UserError.
    """
    count, temporary, write = 0, path.with_name(f".{path.name}.{os.getpid()}.tmp"), None
    semicolons = path.suffix.lower() == ".csv" and readers.has_semicolons(like)
    with atomic_files.explain_write_errors(path):
        try:
            with contextlib.ExitStack() as opened:
                for rows in filter(len, chunks):
                    try:
                        write = write or open_writer(temporary, path.suffix.lower(), rows, opened, semicolons)
                        write(rows)
                    except (ValueError, TypeError) as error:  # pyarrow's and csv's are such
                        why = str(error).partition("\n")[0]
                        raise UserError(f"--out: rows have several shapes ({why}): write .jsonl") from None
                    count += len(rows)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    said = {"rows": count, "out": str(path)}
    form = ", with semicolons and decimal commas as Excel reads them" if semicolons else ""
    print(atomic_files.json_text(said) if as_json else printable(f"{counted(count, 'row')} -> {path}{form}"))
    return 0


def json_line(row: Any) -> str:
    """A row, or a field of one, as JSON; a date or another value that JSON does not have is its text."""
    return atomic_files.json_text(row, ensure_ascii=False, default=str)


def flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with an entry `NAME.KEY` for each of a dictionary's."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


class ListRequest(NamedTuple):
    """What is asked of a recommender for one user: by an id, items that somebody took, or both."""

    user: str = ""
    items: Sequence[str] = ()
    top: int | None = None
    without: tuple[str, ...] = ()
    """Items that are not offered, by id or title."""


class UnansweredRowError(UserError):
    """A row that gets no answer, and does not end the command; `what` says why."""


@dataclass(frozen=True, slots=True)
class RowReader:
    """Makes samples for a `Predictor` of texts in one column. Raises UserError."""

    column: str | None = None
    """The column that is read; by default the first of `usual` that a row has."""
    pair: str | None = None
    """The column of the second text of pairs."""
    pairs: bool | None = None
    """Whether the model reads pairs of texts; None where it reads none, or the columns decide."""
    usual: ClassVar[tuple[str, ...]] = ()

    def from_row(self, row: Mapping[str, Any], where: str) -> Any:
        """The sample in a row."""
        column = find_column(row, self.column, self.usual, where)
        return self.from_text(row[column], f"{where}: {column}")

    def from_text(self, value: Any, where: str) -> Any:
        """The sample that one value stands for: a text; a list of two for a pair."""
        return require_text(value, where)


class TextReader(RowReader):
    """Texts, or pairs of texts."""

    def from_row(self, row: Mapping[str, Any], where: str) -> str | tuple[str, str]:
        text = find_column(row, self.column, reading.TEXT_COLUMNS, where)
        first, usual = require_text(row[text], f"{where}: {text}"), reading.usual_pair(text)
        if self.pairs is False or not (self.pairs or self.pair or reading.usual_name(usual, [*row])):
            return first
        pair = find_column(row, self.pair, usual or (*reading.PAIR_COLUMNS.values(),), where, "--pair-column")
        return first, require_text(row[pair], f"{where}: {pair}")

    def from_text(self, value: Any, where: str) -> str | tuple[str, str]:
        if isinstance(value, list | tuple) and len(value) == 2 and self.pairs is not False:
            return require_text(value[0], where), require_text(value[1], where)
        if self.pairs:
            raise UserError(f'{where}: this model reads pairs of texts: give two, as in ["one", "other"]')
        return require_text(value, where)


class WordReader(RowReader):
    """Lists of words, or texts that the model parts into words, for one that tags each."""

    usual = (*reading.WORD_COLUMNS, *reading.TEXT_COLUMNS)

    def from_text(self, value: Any, where: str) -> str | list[str]:
        if not isinstance(value, list):
            return require_text(value, where)
        if not value:
            raise UnansweredRowError(f"{where}: is an empty list: leave it out", NO_TEXT)
        return [require_text(word, where) for word in value]


class WholeRows(RowReader):
    """Rows as they are, for a task of your own."""

    def from_row(self, row: Mapping[str, Any], where: str) -> Any:
        return self.from_text(row, where)

    def from_text(self, value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise UserError(f'{where}: a task of your own reads rows: give {{"rows": [{{...}}]}}')
        return value


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
    """Ids of users, items that somebody took, or both; what is empty is as what is not there."""

    lists: Any = None
    """`Recommendations`: knows users, and items of which a cell names several with commas between them."""

    def from_row(self, row: Mapping[str, Any], where: str) -> ListRequest:
        column = self.column or usual_column("user", row) or "user_id"
        if ITEMS_COLUMN not in row:
            find_column(row, self.column, [column], where)
        user, taken = (None if _is_empty(cell := row.get(name)) else cell for name in (column, ITEMS_COLUMN))
        taken = self.lists.split_items(str(taken)) if isinstance(taken, str | int | float) else taken or []
        if not isinstance(taken, list):
            raise UserError(f"{where}: {ITEMS_COLUMN}: holds {type(taken).__name__}, not a list of items")
        user = "" if user is None else self.from_text(user, f"{where}: {column}")
        return ListRequest(user, [str(item) for item in taken if not _is_empty(item)])

    def from_text(self, value: Any, where: str) -> str:
        return str(value) if isinstance(value, int | float) else require_text(value, where)


def _is_empty(cell: Any) -> bool:
    return cell is None or cell != cell or not str(cell).strip()


@dataclass(frozen=True, slots=True)
class PromptReader(RowReader):
    """Prompts for a language model: texts; or questions, for one that was trained on conversations."""

    template: ChatTemplate | None = None
    usual: ClassVar = ("prompt", "text", "question", "query", "input", "instruction", "problem")

    def from_row(self, row: Mapping[str, Any], where: str) -> Any:
        row = row if self.column else chat_formats.known_names(row)
        form = chat_formats.detect_chat_format(list(row)) if self.template and not self.column else None
        if form and self.template:
            asked = chat_formats.parse_question(row, where, form)
            return self.template.prompt_segments(asked, where, chat_formats.template_values(row, where))
        column = find_column(row, self.column, self.usual, where)
        return self.from_text(row[column], f"{where}: {column}", row, column)

    def from_text(self, value: Any, where: str, row: Any = None, column: str = "") -> Any:
        """A text; for a model of conversations, a question with what the row's other columns say of it."""
        text = require_text(value, where)
        if self.template is None:
            return text
        asked = chat_formats.with_fields(row or {}, [{"role": "user", "content": text}], (column,))
        return self.template.prompt_segments(asked, where)


@dataclass(frozen=True, slots=True)
class AnswerReader(RowReader):
    """Prompts with answers, as rows of tokens: a row of any form that is learnt from, or two texts."""

    pairs: bool | None = True
    template: Any = None
    settings: Any = None
    """TokenizationSettings."""

    def from_row(self, row: Mapping[str, Any], where: str) -> Any:
        try:
            row = chat_formats.known_names(row)
            found, values = answers.parse_answer(row, where), chat_formats.template_values(row, where)
            return answers.encode_answer(found, self.template, self.settings, where, values)
        except chat_formats.SkippedRowError as reason:
            raise UnansweredRowError(f"{where}: {reason}", str(reason)) from None

    def from_text(self, value: Any, where: str) -> Any:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise UserError(f'{where}: a prompt and an answer are scored: give two, as in ["one", "other"]')
        prompt, answer = (require_text(text, where) for text in value)
        asked, said = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
        found = AnsweredPrompt([asked], [[said]])
        return answers.encode_answer(found, self.template, self.settings, where, {})


def find_column(
    row: Mapping[str, Any], asked: str | None, usual: Sequence[str], where: str, flag: str = "--text-column"
) -> str:
    """The column asked for, else the first of the usual names. Raises UserError where the row has none."""
    names = [*row]
    found = asked or reading.usual_name(usual, names) or " or ".join(usual)
    readers.require_name(found, names, where, otherwise=f"{flag} names another")
    return found


def require_text(value: Any, where: str) -> str:
    """The value. Raises UserError where it is no text, an empty or a very long one."""
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: holds {type(value).__name__}, not text")
    if not value or not value.strip():
        raise UnansweredRowError(f"{where}: is empty: leave it out", NO_TEXT)
    if len(value) > reading.MAX_TEXT_CHARACTERS:
        most = f"{reading.MAX_TEXT_CHARACTERS:,}"
        raise UserError(f"{where}: has {len(value):,} characters: shorten it to {most}")
    return value
