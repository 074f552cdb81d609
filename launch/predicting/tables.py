"""Tables in and out: rows of csv, tsv, jsonl, json or Parquet; answers to csv, jsonl or Parquet."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.data import readers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.data.readers import LocatedRows

LINES = ".txt"
"""The ending of a file with a text in each line."""
CHUNK_ROWS = 4096
"""Rows that are read, answered and written together."""
ROW_ENDINGS = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", LINES)
Rows = Sequence[Mapping[str, Any]]


def check_file(name: str, flag: str = "--file") -> Path:
    """The file of rows that a flag names. Raises UserError where none is, or its ending holds none."""
    path = Path(name).expanduser()
    if path.is_dir():
        raise UserError(f"{flag} {name}: is a folder")
    if not path.exists():
        raise UserError(f"{flag} {name}: there is no such file")
    if path.suffix.lower() not in ROW_ENDINGS:
        raise UserError(f"{flag} {name}: give a file of rows that ends in {', '.join(ROW_ENDINGS)}")
    return path


def read_table(name: str, flag: str = "--file", columns: Sequence[str | None] = ()) -> LocatedRows:
    """(where, row) of each row of a file. `columns`: what flags name, perhaps by number.

    Raises UserError where it is none, or holds no rows.
    """
    path = check_file(name, flag)
    try:
        rows = _lines(path) if path.suffix.lower() == LINES else _rows(path, columns)
        first = next(rows, None)
    except PermissionError:
        raise UserError(f"{flag} {name}: cannot be read: no permission") from None
    if first is None:
        raise UserError(f"{flag} {name}: holds no rows")
    return itertools.chain([first], rows)


def _rows(path: Path, columns: Sequence[str | None]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    part, *others = readers.find_splits(path, None).values()
    if others:
        raise UserError(f"--file {path}: holds several splits: give a file of one")
    part = dataclasses.replace(part, numbers=readers.numbers_in(columns))
    for note in readers.table_notes({"train": part}):
        print(note, file=sys.stderr)
    return iter(readers.read_rows(part))


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A row with the column `text` for each line that is not empty."""
    for number, line in enumerate(readers.read_lines(path), 1):
        if line.strip():
            yield f"{path} line {number}", {"text": line.rstrip("\r\n")}


def in_chunks(rows: LocatedRows) -> Iterator[list[tuple[str, Mapping[str, Any]]]]:
    """The rows, CHUNK_ROWS at a time."""
    waiting = iter(rows)
    while chunk := list(itertools.islice(waiting, CHUNK_ROWS)):
        yield chunk


def beside(row: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its answer behind it; a column of the row with an answer's name becomes `input.NAME`."""
    return {(f"input.{k}" if k in answer else k): v for k, v in row.items()} | dict(answer)


def _write_json_lines(path: Path, chunks: Iterable[Rows]) -> None:
    """An object a line."""
    with path.open("w", encoding="utf-8") as stream:
        for rows in chunks:
            stream.writelines(json_line(row) + "\n" for row in rows)


def _write_csv(path: Path, chunks: Iterable[Rows]) -> None:
    """A header and rows; lists are JSON in their field."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        names: list[str] = []
        for rows in chunks:
            flat = [{k: _as_field(v) for k, v in flatten(row).items()} for row in rows]
            if not names:
                names = list(dict.fromkeys(name for row in flat for name in row))
                csv.DictWriter(stream, names, lineterminator="\n").writeheader()
            if extra := next((name for row in flat for name in row if name not in names), None):
                raise UserError(f"some rows have a column {extra} that the first ones lack: write .jsonl")
            csv.DictWriter(stream, names, lineterminator="\n").writerows(flat)


def _write_parquet(path: Path, chunks: Iterable[Rows]) -> None:
    """Columns with the types of the first rows."""
    import pyarrow
    from pyarrow import parquet

    with contextlib.ExitStack() as opened:
        writer: Any = None
        for rows in chunks:
            schema = None if writer is None else writer.schema
            try:
                table = pyarrow.Table.from_pylist([flatten(row) for row in rows], schema=schema)
            except (pyarrow.ArrowException, TypeError) as error:
                reason = str(error).partition("\n")[0]
                raise UserError(
                    f"--out: the values of a column have several types ({reason}): write .jsonl"
                ) from None
            writer = writer or opened.enter_context(parquet.ParquetWriter(os.fspath(path), table.schema))
            writer.write_table(table)


WRITERS: dict[str, Callable[[Path, Iterable[Rows]], None]] = {
    ".csv": _write_csv,
    ".jsonl": _write_json_lines,
    ".parquet": _write_parquet,
}
"""Ending of --out -> what writes it."""


def check_out(out: str, file: str | None) -> Path:
    """The path of --out. Raises UserError where nothing can be written there."""
    path = Path(out).expanduser()
    if path.suffix.lower() not in WRITERS:
        raise UserError(f"--out {out}: must end in {', '.join(WRITERS)}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--out {out}: {'is a folder' if path.is_dir() else 'there is no such folder'}")
    if file is not None and path.exists() and path.samefile(Path(file).expanduser()):
        raise UserError(f"--out {out}: is the file of the rows: take another name")
    return path


def write_rows(path: Path, chunks: Iterable[Rows]) -> int:
    """Write dictionaries of one shape by the ending of `path`, and return how many there were.

    The file appears there, complete, when all is written. Raises UserError.
    """
    count = 0

    def counting() -> Iterator[Rows]:
        nonlocal count
        for rows in chunks:
            count += len(rows)
            yield rows

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with atomic_files.explain_write_errors(path):
        try:
            WRITERS[path.suffix.lower()](temporary, counting())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return count


def json_line(row: Mapping[str, Any]) -> str:
    """The row as JSON; a date or another value of Parquet that JSON does not have is its text."""
    return atomic_files.json_text(row, ensure_ascii=False, default=str)


def flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with an entry `NAME.KEY` for each of a dictionary's."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _as_field(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value
