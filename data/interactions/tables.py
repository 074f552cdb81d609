"""Readers of tables: large ones as pyarrow columns, small ones row by row."""

from __future__ import annotations

import csv
import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.readers import open_utf8, wide_encoding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa


def read_text(file: Path) -> str:
    """A file's text: UTF-8 or UTF-16, or else ISO-8859-1, as MovieLens' files are."""
    with open_utf8(require_file(file)) as stream:
        block = stream.read()
    try:
        return block.decode("utf-8-sig")
    except UnicodeDecodeError:
        return block.decode("latin-1")


def require_file(file: Path) -> Path:
    """The file itself. Raises UserError where it does not exist."""
    if not file.is_file():
        raise UserError(f"--data {file.parent}: there is no {file.name}")
    return file


def read_fields(file: Path, delimiter: str, count: int) -> Iterator[tuple[str, list[str]]]:
    """(where, fields) of every line that is not empty; the delimiter may have several characters.

    Raises UserError for a line that does not have `count` fields.
    """
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if line.strip():
            row = line.rstrip("\r").split(delimiter)
            if len(row) != count:
                raise UserError(
                    f"{file} line {number}: has {len(row)} fields between {delimiter!r}, not {count}"
                )
            yield f"{file} line {number}", row


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, column -> value) of each row of a small csv, tsv or parquet table.

    Raises UserError for a row that does not fit the header.
    """
    if file.suffix == ".parquet":
        yield from ((str(file), row) for row in read_parquet(file).to_pylist())
        return
    quoting: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file.suffix == ".tsv" else {}
    reader = csv.DictReader(io.StringIO(read_text(file), newline=""), **quoting)
    for row in reader:
        where = f"{file} line {reader.line_num}"
        if None in row or None in row.values():
            raise UserError(f"{where}: has another number of fields than the header")
        yield where, row


def read_delimited(
    file: Path,
    delimiter: str,
    names: list[str] | None = None,
    wanted: list[str] | None = None,
    skip: int = 0,
    ids: Sequence[str] = (),
) -> pa.Table:
    """Read a delimited text file as pyarrow columns.

    `names` are the columns of a file without header, `wanted` those to keep, `skip` lines to pass over, and
    `ids` columns that are read as text. Raises UserError with the line that cannot be read.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow

    require_file(file)
    parse = arrow.ParseOptions(delimiter=delimiter, quote_char='"' if delimiter == "," else False)
    numbers = {n: pa.int64() for n in ("user", "item", "time") if names and n in names}
    words = dict.fromkeys(ids, pa.dictionary(pa.int32(), pa.string()))
    convert = arrow.ConvertOptions(
        include_columns=wanted, column_types={**words, **numbers}, null_values=[""], strings_can_be_null=True
    )

    def attempt(threads: bool) -> pa.Table:
        given = {"column_names": names} if names else {}
        options = arrow.ReadOptions(use_threads=threads, skip_rows=skip, **given)
        return arrow.read_csv(open_utf8(file) if wide_encoding(file) else file, options, parse, convert)

    try:
        table = attempt(True)
        if not (table.num_rows and table.column_names):
            raise UserError(f"{file}: holds no rows")
        return table
    except UnicodeDecodeError:
        raise UserError(f"{file}: its header is not UTF-8: convert it (iconv -f latin1 -t utf-8)") from None
    except pa.ArrowInvalid:
        pass
    try:  # pyarrow names the row of an error only on a single thread
        return attempt(False)
    except pa.ArrowInvalid as error:
        message = str(error).splitlines()[0]
        row = re.search(r"Row #(\d+): ", message)
        if row is None:
            raise UserError(f"{file}: {message}") from None
        reason = message[row.end() :].replace("CSV conversion error to", "cannot be read as")
        raise UserError(f"{file} line {row.group(1)}: {reason}") from None


def read_parquet(file: Path) -> pa.Table:
    """All of a parquet file, as a table. Raises UserError where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as reader

    try:
        return reader.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: is no whole parquet file: {error}") from None


def number_ids(columns: Sequence[Any], named: Iterable[str] = ()) -> tuple[list[np.ndarray], list[str]]:
    """Number the ids of several columns. Returns each column as (n,) int32 indices, and the sorted ids.

    `named` are ids to number although no column has them. Raises UserError for an empty value.
    """
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
