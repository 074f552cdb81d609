"""Readers of tables: large ones as pyarrow columns, small ones row by row."""

from __future__ import annotations

import csv
import io
import itertools
import re
from functools import partial
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.data.interactions.reading import BATCH_ROWS, InteractionTable, NotInBlocksError
from isobatch.data.preparation.progress import position
from isobatch.data.readers import numbers_in, open_utf8, read_lines, shape_of, wide_encoding
from isobatch.data.tables import delimited
from isobatch.data.tables.delimited import find_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from isobatch.data.tables.delimited import Shape


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


def csv_options(file: Path, columns: Iterable[str | None], notes: list[str]) -> dict[str, Any]:
    """What `read_delimited` should know of a table, of which flags name these columns; `notes` grow.

    Raises UserError for a quote that is not closed.
    """
    shape = shape_of(require_file(file), _usual_delimiter(file), numbers_in(columns))
    _refuse_open_quotes(file, shape)
    notes += [note for note in shape.notes if note not in notes]
    return {"delimiter": shape.dialect["delimiter"], "names": shape.names, "skip": shape.header_lines}


def _refuse_open_quotes(file: Path, shape: Shape) -> None:
    """Raise UserError with the line of a quote that is not closed: pyarrow would read on to the next."""
    with open_utf8(file) as stream:
        quoted = any(b'"' in block for block in iter(partial(stream.read, 1 << 20), b""))
        stream.seek(0)
        quoted = quoted and any(line.count(b'"') % 2 for line in stream)
    if quoted and shape.dialect["quoting"] != csv.QUOTE_NONE:
        for _ in delimited.read(read_lines(file), file, shape):
            pass


def read_rows(file: Path, numbers: Iterable[str] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, column -> value) of each row of a small csv, tsv or parquet table.

    `numbers`: columns that flags take by number. Raises UserError for a row that does not fit the header.
    """
    if file.suffix == ".parquet":
        yield from ((str(file), row) for row in read_parquet(file).to_pylist())
        return
    text = io.StringIO(read_text(file), newline="")
    shape = find_shape(text, file, _usual_delimiter(file), numbers)
    text.seek(0)
    for where, row in delimited.read(text, file, shape):
        if None in row.values():
            raise UserError(f"{where}: has another number of fields than the header")
        yield where, row


def place_of_row(file: Path, header: int, row: int) -> str:
    """Where the row with this number, from 1, stands in a file whose first `header` lines are none."""
    if file.suffix == ".parquet":
        return f"{file} row {row}"
    with open_utf8(file) as stream:  # pyarrow passes over empty lines
        lines = (number for number, line in enumerate(stream, 1) if line.strip(b"\r\n"))
        return f"{file} line {next(itertools.islice(lines, header + row - 1, None), header + row)}"


def _csv_options(
    delimiter: str, names: list[str] | None, wanted: list[str] | None, skip: int, ids: Sequence[str]
) -> tuple[Any, Any, Any]:
    """pyarrow's options to read, to parse and to convert; the arguments are those of `read_delimited`."""
    import pyarrow as pa
    from pyarrow import csv as arrow

    parse = arrow.ParseOptions(delimiter=delimiter, quote_char='"' if delimiter in ",;|" else False)
    numbers = {n: pa.int64() for n in ("user", "item", "time") if names and n in names and not ids}
    words = dict.fromkeys(ids, pa.dictionary(pa.int32(), pa.string()))
    convert = arrow.ConvertOptions(
        include_columns=wanted, column_types={**words, **numbers}, null_values=[""], strings_can_be_null=True
    )
    return arrow.ReadOptions(skip_rows=skip, **({"column_names": names} if names else {})), parse, convert


def stream_delimited(
    file: Path,
    delimiter: str,
    names: list[str] | None = None,
    wanted: list[str] | None = None,
    skip: int = 0,
    ids: Sequence[str] = (),
) -> Iterator[pa.RecordBatch]:
    """What `read_delimited` reads, a megabyte at a time.

    Raises NotInBlocksError where a type does not follow from the first block, or the file has a fault.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow

    if not file.is_file() or wide_encoding(file):
        raise NotInBlocksError
    read, parse, convert = _csv_options(delimiter, names, wanted, skip, ids)
    position.begin([file])
    rows = 0
    try:
        with arrow.open_csv(file, read, parse, convert) as reader:
            for batch in reader:
                rows += len(batch)
                yield batch
                position.advance(read.block_size)
    except (pa.ArrowException, UnicodeDecodeError):
        raise NotInBlocksError from None
    if not rows:
        raise NotInBlocksError


def stream_parquet(file: Path, wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """These columns of a parquet file, BATCH_ROWS rows at a time.

    Raises NotInBlocksError where the file has a fault.
    """
    import pyarrow as pa
    import pyarrow.parquet as reader

    try:
        with reader.ParquetFile(file, pre_buffer=False) as table:
            position.begin([file])
            share = file.stat().st_size / max(1, table.metadata.num_rows)
            for batch in table.iter_batches(BATCH_ROWS, columns=list(wanted)):
                yield batch
                position.advance(len(batch) * share)
    except (pa.ArrowException, OSError):
        raise NotInBlocksError from None


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
    read, parse, convert = _csv_options(delimiter, names, wanted, skip, ids)

    def attempt(threads: bool) -> pa.Table:
        read.use_threads = threads
        return arrow.read_csv(open_utf8(file) if wide_encoding(file) else file, read, parse, convert)

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


def parquet_columns(file: Path) -> list[str]:
    """The names of a parquet file's columns. Raises NotInBlocksError where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as reader

    try:
        names: list[str] = reader.read_schema(file).names
    except (pa.ArrowException, OSError):
        raise NotInBlocksError from None
    delimited.refuse_twins(names, file)
    return names


def read_parquet(file: Path) -> pa.Table:
    """All of a parquet file, as a table. Raises UserError where it cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as reader

    try:
        return reader.read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: is no whole parquet file: {error}") from None


def delimited_table(file: Path, *options: Any, **named: Any) -> InteractionTable:
    """The interactions in a file without header; the arguments are those of `read_delimited`."""
    read, stream = (partial(f, file, *options, **named) for f in (read_delimited, stream_delimited))
    return InteractionTable(read, stream, partial(place_of_row, file, named.get("skip", 0)))
