"""Tables of numbers and words from files: columns that stay arrays, and rows where there are few."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa


def text(file: Path) -> str:
    """A file's text; MovieLens' are ISO-8859-1."""
    block = readable(file).read_bytes()
    try:
        return block.decode("utf-8-sig")
    except UnicodeDecodeError:
        return block.decode("latin-1")


def readable(file: Path) -> Path:
    if not file.is_file():
        raise UserError(f"--data {file.parent}: there is no {file.name}")
    return file


def fields(file: Path, between: str, count: int) -> Iterator[tuple[str, list[str]]]:
    """(where, fields) of every line that is not empty."""
    for number, line in enumerate(text(file).split("\n"), 1):
        if line.strip():
            row = line.rstrip("\r").split(between)
            if len(row) != count:
                raise UserError(
                    f"{file} line {number}: has {len(row)} fields between {between!r}, not {count}"
                )
            yield f"{file} line {number}", row


def rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row by column) of a small csv, tsv or parquet table."""
    if file.suffix == ".parquet":
        yield from ((str(file), row) for row in parquet(file).to_pylist())
        return
    quoting: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix == ".tsv" else {}
    reader = csv.DictReader(io.StringIO(text(file), newline=""), **quoting)
    for row in reader:
        where = f"{file} line {reader.line_num}"
        if None in row or None in row.values():
            raise UserError(f"{where}: has another number of fields than the header")
        yield where, row


def parsed(
    file: Path,
    between: str,
    names: list[str] | None = None,
    wanted: list[str] | None = None,
    skip: int = 0,
    ids: Sequence[str] = (),
) -> pa.Table:
    """A table of numbers or words from a text file, in arrays from end to end; `ids` stay as written."""
    import pyarrow as pa
    from pyarrow import csv as arrow

    readable(file)
    parse = arrow.ParseOptions(delimiter=between, quote_char='"' if between == "," else False)
    numbers = {n: pa.int64() for n in ("user", "item", "time") if names and n in names}
    words = dict.fromkeys(ids, pa.dictionary(pa.int32(), pa.string()))
    convert = arrow.ConvertOptions(
        include_columns=wanted, column_types={**words, **numbers}, null_values=[""], strings_can_be_null=True
    )

    def attempt(threads: bool) -> pa.Table:
        given = {"column_names": names} if names else {}
        options = arrow.ReadOptions(use_threads=threads, skip_rows=skip, **given)
        return arrow.read_csv(file, options, parse, convert)

    try:
        return attempt(True)
    except pa.ArrowInvalid:
        pass
    try:  # on one thread it counts rows
        return attempt(False)
    except pa.ArrowInvalid as error:
        told = str(error).splitlines()[0]
        row = re.search(r"Row #(\d+): ", told)
        if row is None:
            raise UserError(f"{file}: {told}") from None
        reason = told[row.end() :].replace("CSV conversion error to", "cannot be read as")
        raise UserError(f"{file} line {row.group(1)}: {reason}") from None


def parquet(file: Path) -> pa.Table:
    """All of a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as reader

    try:
        return reader.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: is no whole parquet file: {error}") from None


def numbered(columns: Sequence[Any], named: Iterable[str] = ()) -> tuple[list[np.ndarray], list[str]]:
    """Each column as numbers (int32) into one sorted list of all ids, which holds `named` too."""
    coded = []
    for column in columns:
        whole = column.unify_dictionaries().combine_chunks()
        if whole.null_count:
            empty = int(np.argmax(whole.is_null().to_numpy(zero_copy_only=False)))
            raise UserError(f"interaction {empty + 1} has no user or no item")
        coded.append(whole.dictionary_encode())
    spelt = [[str(v) for v in c.dictionary.to_pylist()] for c in coded]
    names = list({name: None for part in (*spelt, list(named)) for name in part})
    names.sort(key=(lambda n: (int(n), n)) if all(n.isdecimal() for n in names) else str)
    place = {name: number for number, name in enumerate(names)}
    found = []
    for part, c in zip(spelt, coded, strict=True):
        of = np.array([place[name] for name in part], np.int32)
        found.append(of[c.indices.to_numpy()])
    return found, names
