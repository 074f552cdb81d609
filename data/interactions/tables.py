"""Tables of interactions as pyarrow columns, Parquet a block of rows at a time; small tables row by row."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.data import readers
from isobatch.data.readers import is_utf16, numbers_in, open_utf8, read_lines, shape_of
from isobatch.data.tables import delimited

if TYPE_CHECKING:
    import pyarrow as pa

    from isobatch.data.tables.delimited import Shape

BATCH_ROWS = 1 << 18
NUMBERS = {"rating": "", "time": ", or dates such as 2019-12-31 23:59:59"}
"""Columns that hold numbers, and what else they may hold: text would be sorted alphabetically."""
NOT_UTF8 = "its header is not UTF-8: convert it (iconv -f latin1 -t utf-8)"
WHOLE_DECIMAL = re.compile(r"(-?\d+)\.0*")


def whole_ids(names: Iterable[str]) -> list[str]:
    """The ids of a table with 3.0 as 3, which is what a column of numbers with a gap becomes on its way.

    They stay where another has digits behind its point: 1.0 beside 1.5 is a version, not a number.
    """
    known = list(names)
    whole = {name: found[1] for name in known if (found := WHOLE_DECIMAL.fullmatch(name))}
    if any("." in name and name not in whole for name in known):
        return known
    return [whole.get(name, name) for name in known]


def some_ids(names: Iterable[str]) -> str:
    """The first three, for a sentence."""
    return ", ".join(itertools.islice(names, 3))


@dataclass(frozen=True, slots=True)
class Table:
    """A table of interactions."""

    name: str
    columns: Mapping[str, str]
    """user and item, and perhaps rating and time -> what they are called in the file."""
    read: Callable[[], Iterable[Any]]
    """Gives the rows as pyarrow's batches, with the file's own columns."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its rows, a block at a time. Raises UserError that names the fault."""
        import pyarrow as pa

        done = 0
        for batch in self.read():
            arrays = [batch[column] for column in self.columns.values()]
            for name, values in zip(self.columns, arrays, strict=True):
                self._require_values(name, values, done)
            yield pa.RecordBatch.from_arrays(arrays, names=list(self.columns))
            done += len(batch)

    def _require_values(self, name: str, values: pa.Array, before: int) -> None:
        """Raise UserError unless all values are there, and numbers or dates where they should be."""
        from pyarrow import types

        kind = values.type
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind)
        if name in NUMBERS and not is_number and (cells := values.drop_null().to_pylist()):
            # Texts that look like numbers would be ordered as texts.
            odd = next((v for v in cells if not delimited.is_number(v)), cells[0])
            raise UserError(
                f"{self.name}: its {name}s hold {odd!r}: give numbers{NUMBERS[name]}, or leave the column"
                f" {self.columns[name]} out"
            )
        empty = values.is_null(nan_is_null=name != "rating").to_numpy(zero_copy_only=False)
        if empty.any():
            row = before + int(empty.argmax()) + 1
            raise UserError(f"{self.name} row {row}: has no {name}: fill it in, or leave the row out")


def delimited_table(
    file: Path,
    delimiter: str,
    names: Sequence[str],
    columns: Mapping[str, str] | None = None,
    skip: int = 0,
    ids: Sequence[str] = (),
) -> Table:
    """A delimited text file. `names` are its columns, `skip` the lines above, `ids` are read as text."""
    chosen = dict(zip(names, names, strict=True)) if columns is None else columns

    def read() -> Iterator[pa.RecordBatch]:
        import pyarrow as pa
        from pyarrow import csv as arrow

        kinds = {n: pa.int64() for n in ("user", "item", "time") if n in names and not ids}
        kinds |= dict.fromkeys({*ids} & {*chosen.values()}, pa.dictionary(pa.int32(), pa.string()))
        convert = arrow.ConvertOptions(
            include_columns=[*chosen.values()], column_types=kinds, null_values=[""], strings_can_be_null=True
        )
        options = arrow.ReadOptions(skip_rows=skip, column_names=[*names])
        parse = arrow.ParseOptions(delimiter=delimiter, quote_char='"' if delimiter in ",;|" else False)
        message = ""
        for options.use_threads in (True, False):  # pyarrow names the row of an error only on a single thread
            source = open_utf8(file) if is_utf16(file) else file
            try:
                table = arrow.read_csv(source, options, parse, convert)
            except UnicodeDecodeError:
                raise UserError(f"{file}: {NOT_UTF8}") from None
            except pa.ArrowInvalid as error:
                message = str(error).splitlines()[0]
            else:
                if not table.num_rows:
                    raise UserError(f"{file}: holds no rows")
                return iter(table.to_batches())
        row, reason = re.fullmatch(r"(?:.*Row #(\d+): )?(.*)", message).groups()  # type: ignore[union-attr]
        line = f" line {row}" if row else ""
        raise UserError(f"{file}{line}: {reason.replace('CSV conversion error to', 'cannot be read as')}")

    return Table(str(file), chosen, read)


def parquet_table(file: Path, columns: Mapping[str, str]) -> Table:
    """A Parquet file."""

    def read() -> Iterator[pa.RecordBatch]:
        with readers.open_parquet(file) as table, readers.explain_parquet_errors(file):
            yield from table.iter_batches(BATCH_ROWS, columns=[*columns.values()])

    return Table(str(file), columns, read)


def read_text(file: Path) -> str:
    """A file's text: UTF-8 or UTF-16, or else ISO-8859-1, as MovieLens' files are."""
    with open_utf8(file) as stream:
        block = stream.read()
    try:
        return block.decode("utf-8-sig")
    except UnicodeDecodeError:
        return block.decode("latin-1")


def read_fields(file: Path, delimiter: str, count: int) -> Iterator[tuple[str, list[str]]]:
    """(where, fields) of every line that is not empty; the delimiter may have several characters.

    Raises UserError for a line that does not have `count` fields.
    """
    for number, line in enumerate(read_text(file).split("\n"), 1):
        if line.strip():
            where, row = f"{file} line {number}", line.rstrip("\r").split(delimiter)
            if len(row) != count:
                raise UserError(f"{where}: has {len(row)} fields between {delimiter!r}, not {count}")
            yield where, row


def shape_to_stream(file: Path, columns: Iterable[str | None], notes: list[str]) -> Shape:
    """The shape of a table, of which flags name these columns; `notes` grow.

    Raises UserError with the line of a quote that is not closed: pyarrow would read on to the next.
    """
    shape = shape_of(file, "," if file.suffix == ".csv" else "\t", numbers_in(columns))
    with open_utf8(file) as stream:
        quoted = any(b'"' in block for block in iter(partial(stream.read, 1 << 20), b""))
        stream.seek(0)
        quoted = quoted and any(line.count(b'"') % 2 for line in stream)
    if quoted and shape.dialect["quoting"] != csv.QUOTE_NONE:
        for _ in delimited.read(read_lines(file), file, shape):
            pass
    notes += [note for note in shape.notes if note not in notes]
    return shape


def read_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, column -> value) of each row of a small csv, tsv or parquet table.

    Raises UserError for a row that does not fit the header.
    """
    form = {".parquet": "parquet", ".csv": "csv"}.get(file.suffix, "tsv")
    for where, row in readers.read_rows(readers.SplitFiles((file,), form)):
        if form != "parquet" and None in row.values():
            raise UserError(f"{where}: has another number of fields than the header")
        yield where, row
