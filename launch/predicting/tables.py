"""Tables in and out: rows of csv, tsv, jsonl, json, Parquet or txt; answers to csv, jsonl or Parquet."""

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
from isobatch.core.measures import counted, printable
from isobatch.data import readers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.data.readers import LocatedRows

LINES = ".txt"
"""The ending of a file with a text in each line."""
CHUNK_ROWS = 4096
"""Rows that are read, answered and written together."""
ROW_ENDINGS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", LINES)
OUT_ENDINGS = (".csv", ".jsonl", ".parquet")
Rows = Sequence[Mapping[str, Any]]


def is_table(text: str) -> bool:
    """Whether the text is the name of a file of rows, by its ending."""
    return Path(text).suffix.lower() in ROW_ENDINGS


def check_file(name: str, flag: str = "--file") -> Path:
    """The file of rows that a flag names. Raises UserError where there is none that can be read."""
    path = Path(name).expanduser()
    if not path.is_file() or not os.access(path, os.R_OK):
        raise UserError(f"{flag} {name}: there is no such file that can be read")
    if not is_table(name):
        raise UserError(f"{flag} {name}: give a file of rows that ends in {', '.join(ROW_ENDINGS)}")
    return path


def read_table(name: str, flag: str = "--file", columns: Sequence[str | None] = ()) -> LocatedRows:
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
    for note in readers.table_notes({"train": part}):
        print(note, file=sys.stderr)
    return iter(readers.read_rows(part))


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A row with the column `text` for each line that is not empty."""
    for number, line in enumerate(readers.read_lines(path), 1):
        if line.strip():
            yield f"{path} line {number}", {"text": line.rstrip("\r\n")}


def beside(row: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """A row with its answer behind it; a column of the row with an answer's name becomes `input.NAME`."""
    return {(f"input.{k}" if k in answer else k): v for k, v in row.items()} | dict(answer)


def _open_writer(path: Path, ending: str, first: Rows, opened: contextlib.ExitStack) -> Callable[[Rows], Any]:
    """A function that writes rows behind each other, in columns as the `first` ones have them."""
    if ending == ".parquet":
        import pyarrow
        from pyarrow import parquet

        schema = pyarrow.Table.from_pylist(list(map(flatten, first))).schema
        table = opened.enter_context(parquet.ParquetWriter(os.fspath(path), schema))
        return lambda rows: table.write_table(
            pyarrow.Table.from_pylist(list(map(flatten, rows)), schema=schema)
        )
    stream = opened.enter_context(path.open("w", encoding="utf-8", newline=""))
    if ending == ".jsonl":
        return lambda rows: stream.writelines(json_line(row) + "\n" for row in rows)
    names = list(dict.fromkeys(name for row in first for name in flatten(row)))
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    return lambda rows: writer.writerows(
        {name: _as_field(value) for name, value in flatten(row).items()} for row in rows
    )


def check_out(out: str, file: str | None) -> Path:
    """The path of --out. Raises UserError where nothing can be written there."""
    path = Path(out).expanduser()
    if path.suffix.lower() not in OUT_ENDINGS:
        raise UserError(f"--out {out}: must end in {', '.join(OUT_ENDINGS)}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--out {out}: {'is a folder' if path.is_dir() else 'there is no such folder'}")
    if file is not None and path.exists() and path.samefile(Path(file).expanduser()):
        raise UserError(f"--out {out}: is the file of the rows: take another name")
    return path


def write_rows(path: Path, chunks: Iterable[Rows], as_json: bool = False) -> int:
    """Write dictionaries of one shape by the ending of `path`, say how many, and return the exit code.

    The file appears there, complete, when all is written. Raises UserError.
    """
    count, temporary, write = 0, path.with_name(f".{path.name}.{os.getpid()}.tmp"), None
    with atomic_files.explain_write_errors(path):
        try:
            with contextlib.ExitStack() as opened:
                for rows in filter(None, chunks):
                    try:
                        write = write or _open_writer(temporary, path.suffix.lower(), rows, opened)
                        write(rows)
                    except (ValueError, TypeError) as error:  # pyarrow's and csv's are such
                        why = str(error).partition("\n")[0]
                        raise UserError(f"--out: rows have several shapes ({why}): write .jsonl") from None
                    count += len(rows)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    said = {"rows": count, "out": str(path)}
    print(atomic_files.json_text(said) if as_json else printable(f"{counted(count, 'row')} -> {path}"))
    return 0


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
