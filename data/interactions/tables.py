"""Tables of interactions as pyarrow columns, Parquet a block of rows at a time; small tables row by row."""

from __future__ import annotations

import csv
import io
import itertools
import re
from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.data import readers
from isobatch.data.readers import numbers_in, open_utf8, read_lines, shape_of, wide_encoding
from isobatch.data.tables import delimited
from isobatch.data.tables.delimited import find_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from isobatch.data.tables.delimited import Shape

BATCH_ROWS = 1 << 18
NUMBERS = {"rating": "", "time": ", or dates such as 2019-12-31 23:59:59"}
"""Columns that hold numbers, and what else they may hold: text would be sorted alphabetically."""


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


class Table(ABC):
    """A table with the columns user and item, and perhaps rating and time; `columns` are their own names."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = dict(columns)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Its rows, a block at a time. Raises UserError that names the fault."""
        import pyarrow as pa

        done = 0
        for batch in self._read():
            arrays = [batch[column] for column in self.columns.values()]
            for name, values in zip(self.columns, arrays, strict=True):
                self._require_values(name, values, done)
            yield pa.RecordBatch.from_arrays(arrays, names=list(self.columns))
            done += len(batch)

    @abstractmethod
    def _read(self) -> Iterator[pa.RecordBatch]:
        """The rows of the file, with its own columns."""

    def where(self, row: int) -> str:
        """The place of a row, counted from 1, for error messages."""
        return f"interaction {row}"

    def _require_values(self, name: str, values: pa.Array, before: int) -> None:
        """Raise UserError unless all values are there, and numbers or dates where they should be."""
        from pyarrow import types

        kind = values.type
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_temporal(kind)
        if name in NUMBERS and not is_number:
            cells = values.drop_null().to_pylist()
            if cells:  # texts that look like numbers would be ordered as texts
                odd = next((v for v in cells if not delimited.is_number(v)), cells[0])
                raise UserError(
                    f"{self}: its {name}s hold {odd!r}: give numbers{NUMBERS[name]}, or leave the column"
                    f" {self.columns[name]} out"
                )
        empty = values.is_null(nan_is_null=name not in NUMBERS).to_numpy(zero_copy_only=False)
        if empty.any():
            row = before + int(empty.argmax()) + 1
            raise UserError(f"{self.where(row)}: has no {name}: fill it in, or leave the row out")


class DelimitedTable(Table):
    """A delimited text file. Its `names` are its columns, `skip` the lines above, `ids` are read as text."""

    def __init__(
        self,
        file: Path,
        delimiter: str,
        names: list[str],
        columns: Mapping[str, str] | None = None,
        skip: int = 0,
        ids: Sequence[str] = (),
    ) -> None:
        super().__init__(dict(zip(names, names, strict=True)) if columns is None else columns)
        self.file, self.delimiter, self.names, self.skip, self.ids = file, delimiter, names, skip, ids

    def __str__(self) -> str:
        return str(self.file)

    def where(self, row: int) -> str:
        with open_utf8(self.file) as stream:  # pyarrow passes over empty lines
            lines = (number for number, line in enumerate(stream, 1) if line.strip(b"\r\n"))
            place = self.skip + row
            return f"{self.file} line {next(itertools.islice(lines, place - 1, None), place)}"

    def _options(self) -> tuple[Any, Any, Any]:
        """pyarrow's options to read, to parse and to convert."""
        import pyarrow as pa
        from pyarrow import csv as arrow

        quote = '"' if self.delimiter in ",;|" else False
        numbers = {n: pa.int64() for n in ("user", "item", "time") if n in self.names and not self.ids}
        words = dict.fromkeys(
            set(self.ids).intersection(self.columns.values()), pa.dictionary(pa.int32(), pa.string())
        )
        convert = arrow.ConvertOptions(
            include_columns=list(self.columns.values()),
            column_types={**words, **numbers},
            null_values=[""],
            strings_can_be_null=True,
        )
        read = arrow.ReadOptions(skip_rows=self.skip, column_names=self.names)
        return read, arrow.ParseOptions(delimiter=self.delimiter, quote_char=quote), convert

    def _read(self) -> Iterator[pa.RecordBatch]:
        """Raises UserError with the line that cannot be read."""
        import pyarrow as pa
        from pyarrow import csv as arrow

        read, parse, convert = self._options()
        error = pa.ArrowInvalid("")
        for read.use_threads in (True, False):  # pyarrow names the row of an error only on a single thread
            source = open_utf8(self.file) if wide_encoding(self.file) else require_file(self.file)
            try:
                table = arrow.read_csv(source, read, parse, convert)
            except UnicodeDecodeError:
                message = "its header is not UTF-8: convert it (iconv -f latin1 -t utf-8)"
                raise UserError(f"{self.file}: {message}") from None
            except pa.ArrowInvalid as found:
                error = found
            else:
                if not table.num_rows:
                    raise UserError(f"{self.file}: holds no rows")
                yield from table.to_batches()
                return
        message = str(error).splitlines()[0]
        row = re.search(r"Row #(\d+): ", message)
        if row is None:
            raise UserError(f"{self.file}: {message}")
        reason = message[row.end() :].replace("CSV conversion error to", "cannot be read as")
        raise UserError(f"{self.file} line {row.group(1)}: {reason}")


class ParquetTable(Table):
    """A Parquet file."""

    def __init__(self, file: Path, columns: Mapping[str, str]) -> None:
        super().__init__(columns)
        self.file = file

    def __str__(self) -> str:
        return str(self.file)

    def where(self, row: int) -> str:
        return f"{self.file} row {row}"

    def _read(self) -> Iterator[pa.RecordBatch]:
        with readers.open_parquet(self.file) as table, readers.explain_parquet_errors(self.file):
            yield from table.iter_batches(BATCH_ROWS, columns=list(self.columns.values()))


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


def _usual_delimiter(file: Path) -> str:
    """What is between the fields of a file of this name."""
    return "," if file.suffix == ".csv" else "\t"


def shape_to_stream(file: Path, columns: Iterable[str | None], notes: list[str]) -> Shape:
    """The shape of a table, of which flags name these columns; `notes` grow.

    Raises UserError with the line of a quote that is not closed: pyarrow would read on to the next.
    """
    shape = shape_of(require_file(file), _usual_delimiter(file), numbers_in(columns))
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
    if file.suffix == ".parquet":
        yield from readers.read_rows(readers.SplitFiles((file,), "parquet"))
        return
    text = io.StringIO(read_text(file), newline="")
    shape = find_shape(text, file, _usual_delimiter(file))
    text.seek(0)
    for where, row in delimited.read(text, file, shape):
        if None in row.values():
            raise UserError(f"{where}: has another number of fields than the header")
        yield where, row
