"""Readers of text files: .txt as one stream of text; csv, tsv, jsonl, json and parquet row by row."""

from __future__ import annotations

import codecs
import contextlib
import csv
import dataclasses
import difflib
import gzip
import io
import itertools
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.preparation.file_digests import file_hash
from isobatch.data.preparation.progress import position

if TYPE_CHECKING:
    import pyarrow
    from pyarrow.parquet import ParquetFile

CHUNK_BYTES = 1 << 15
MAX_LINE_BYTES = 1 << 20
ARROW_BATCH_ROWS = 4096
PARQUET_BATCH_BYTES = 1 << 22
NO_PARQUET = "is no whole parquet file"
VALIDATION_ONE_IN = 20
"""Where there is no validation split, one part in this many of the training data becomes it."""

FORMATS = {".txt": "txt", ".text": "txt", ".raw": "txt", ".tokens": "txt", ".csv": "csv", ".tsv": "tsv"}
FORMATS |= {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
GZIP = ".gz"
_WIDE = (
    *((codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32")),
    *((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")),
)
"""Byte order marks and what they say; the shorter ones are beginnings of the longer."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
SPLITS = {"train": "train", "training": "train", "valid": "valid", "validation": "valid", "val": "valid"}
SPLITS |= {"dev": "valid", "test": "test"}
LocatedRows = Iterable[tuple[str, Mapping[str, Any]]]
"""(where, row) of each row; `where` names its file and line, for error messages."""


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The files of one split, all of one format, and the range of them that belongs to it.

    `start` and `stop` are bytes of a single txt file; of other formats, rows counted over all files.
    """

    files: tuple[Path, ...]
    format: str
    start: int = 0
    stop: int | None = None
    kept: np.ndarray | None = field(default=None, compare=False, repr=False)
    """(rows,) bool: which rows of a table belong to it; None for all."""

    @property
    def is_stream(self) -> bool:
        return self.format == "txt"


def find_splits(path: Path, file_format: str | None) -> dict[str, SplitFiles]:
    """The splits in a folder, by the words in its files' names; a single file is `train`.

    Raises UserError for an unknown format, several formats, no training file, or no permission.
    """
    if file_format is not None and file_format not in FORMATS.values():
        raise UserError(f"--format {file_format}: is not one of {', '.join(dict.fromkeys(FORMATS.values()))}")
    try:
        if path.is_dir():
            return _find_in_folder(path, file_format)
        with path.open("rb"):
            return {"train": SplitFiles((path,), file_format or _format_of(path))}
    except PermissionError as error:
        raise UserError(f"--data {path}: {error.filename} cannot be read: no permission") from None


def content_hashes(splits: Mapping[str, SplitFiles]) -> dict[str, list[str]]:
    """Split -> [format, the hash of each file]."""
    return {split: [part.format, *map(file_hash, part.files)] for split, part in splits.items()}


def _ending(path: Path) -> str:
    """What a file's name ends with, in small letters; of a compressed table what stands before .gz."""
    endings = [suffix.lower() for suffix in path.suffixes[-2:]]
    packed = endings[1:] == [GZIP] and FORMATS.get(endings[0]) in ("csv", "tsv", "json", "jsonl")
    return endings[0] if packed else "".join(endings[-1:])


def _format_of(path: Path) -> str:
    if (ending := _ending(path)) not in FORMATS:
        raise UserError(
            f"--data {path}: has no known ending ({' '.join(FORMATS)}; of tables with .gz behind it): "
            + ("unpack it (gunzip)" if ending == GZIP else "say what it is with --format")
        )
    return FORMATS[ending]


def _find_in_folder(folder: Path, file_format: str | None) -> dict[str, SplitFiles]:
    names = sorted(f for f in folder.iterdir() if f.is_file())
    known = [f for f in names if _ending(f) in FORMATS and _split_from_name(f)]
    formats = sorted({_format_of(f) for f in known})
    if file_format is None and len(formats) > 1:
        raise UserError(f"--data {folder}: holds {' and '.join(formats)} files: choose with --format")
    known = [f for f in known if file_format in (None, _format_of(f))]
    found = {
        split: tuple(f for f in known if _split_from_name(f) == split) for split in ("train", "valid", "test")
    }
    if not found["train"]:
        there = ", ".join(f.name for f in names[:5]) or "nothing"
        raise UserError(
            f"--data {folder}: there is no train.txt (or .csv, .tsv, .jsonl, .json, .parquet); found: {there}"
        )
    for file in known:
        with file.open("rb"):
            pass
    return {split: SplitFiles(files, file_format or formats[0]) for split, files in found.items() if files}


def _split_from_name(file: Path) -> str | None:
    words = re.split(r"[^a-z]+", file.stem.lower())
    return next((SPLITS[w] for w in words if w in SPLITS), None)


def count_rows(part: SplitFiles) -> int:
    """The rows of all files of a split: of Parquet from their metadata, otherwise by reading them."""
    if part.format != "parquet":
        return sum(1 for _ in read_rows(part))
    return sum(_parquet_rows(file) for file in part.files)


def _parquet_rows(file: Path) -> int:
    with open_parquet(file) as table:
        return int(table.metadata.num_rows)


def read_stream(part: SplitFiles) -> Iterator[str]:
    """The text of a split of txt files, in chunks of whole lines."""
    position.begin(part.files, part.stop and part.stop - part.start)
    for file in part.files:
        yield from _read_stream(file, part.start, part.stop)


def column_names(part: SplitFiles) -> list[str]:
    """The names of the columns, from the first row; empty where there is no row."""
    return next(([str(k) for k in row] for _, row in read_rows(part)), [])


def require_column(part: SplitFiles, column: str, flag: str = "", otherwise: str = "") -> None:
    """Raise UserError unless each file's rows have this column. `flag`: what was typed to name it, perhaps
    nothing; `otherwise`: what else would be read.
    """
    for file in part.files:
        names = column_names(dataclasses.replace(part, files=(file,)))
        if names and column not in names:
            what = f"{flag} {column}: {file} has no such column"
            raise UserError(
                (what if flag else f"{file}: has no column {column}")
                + f"{did_you_mean(column, names)}; it has: {', '.join(names[:20])}"
                + (f"; {otherwise}" if otherwise else "")
            )


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """The hint `(did you mean X?)` with the closest of `names`; empty where none is close."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def text_cell(row: Mapping[str, Any], column: str, where: str) -> str:
    """The text in a column of a row, empty where there is none. Raises UserError for what is no text."""
    text = row.get(column, "")
    if not isinstance(text, str | None):
        raise UserError(
            f"{where}: {column} holds {type(text).__name__}, not text: choose another --text-column"
        )
    return text or ""


def wide_encoding(file: Path) -> str | None:
    """utf-16 or utf-32, if the file's byte order mark says so."""
    with file.open("rb") as stream:
        head = stream.read(4)
    return next((name for mark, name in _WIDE if head.startswith(mark)), None)


def open_utf8(file: Path) -> io.BufferedReader:
    """A file's bytes in UTF-8; one in UTF-16 or UTF-32 is converted in memory, and so is a compressed one.

    Raises UserError.
    """
    if file.suffix.lower() == GZIP:
        try:
            return io.BufferedReader(io.BytesIO(gzip.decompress(file.read_bytes())))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise UserError(f"{file}: is no whole gzip file: {error}: fetch it again") from None
    encoding = wide_encoding(file)
    if encoding is None:
        return file.open("rb")
    try:
        return io.BufferedReader(io.BytesIO(file.read_bytes().decode(encoding).encode()))
    except UnicodeError as error:
        raise UserError(f"{file}: is not whole {encoding}, as its first bytes say it is: {error}") from None


def _read_stream(file: Path, start: int, stop: int | None) -> Iterator[str]:
    """The text between two bytes, in chunks that end where a line ends, unless a line is very long."""
    with open_utf8(file) as stream:
        stop = stream.seek(0, os.SEEK_END) if stop is None else stop
        stream.seek(start)
        while (offset := stream.tell()) < stop:
            block = stream.read(min(CHUNK_BYTES, stop - offset))
            if stream.tell() < stop:
                block += stream.readline(MAX_LINE_BYTES)
            while (following := stream.peek(1)[:1]) and following[0] & 0xC0 == 0x80:
                block += stream.read(1)  # a very long line was cut inside a character
            position.advance(len(block))
            yield decode(block, file, offset)


def decode(block: bytes, file: Path, offset: int = 0) -> str:
    """The text of bytes that begin at `offset` of a file, without a byte order mark.

    Raises UserError with the first byte that is not UTF-8.
    """
    try:
        return block.decode("utf-8").removeprefix("\ufeff" if offset == 0 else "")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: byte {offset + error.start} is not UTF-8: convert it (iconv -f latin1 -t utf-8)"
        ) from None


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a text file, with their ends. Raises UserError where it is not UTF-8."""
    offset = 0
    with open_utf8(file) as stream:
        for line in stream:
            yield decode(line, file, offset)
            offset += len(line)
            position.advance(len(line))


def read_rows(part: SplitFiles) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) of every row from `start` to `stop`, file after file.

    Raises UserError with the line for a row that cannot be read.
    """
    position.begin(part.files)
    found = itertools.chain.from_iterable(map(_READERS[part.format], part.files))
    if part.kept is not None:
        return itertools.compress(found, part.kept.tobytes())
    return itertools.islice(found, part.start, part.stop)


def _read_csv(file: Path, file_format: str = "csv") -> Iterator[tuple[str, Mapping[str, Any]]]:
    csv.field_size_limit(1 << 30)
    plain: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if file_format == "tsv" else {}
    reader = csv.DictReader(read_lines(file), **plain)
    try:
        for row in reader:
            where = f"{file} line {reader.line_num}"
            if None in row:  # csv collects fields without a header under None
                names = len(row) - 1
                raise UserError(
                    f"{where}: has {names + len(row[None])} fields and the header {names}"
                    + (": quote a field that holds a comma" if file_format == "csv" else "")
                )
            yield where, row
    except csv.Error as error:
        raise UserError(f"{file} line {reader.line_num}: is not {file_format}: {error}") from None


def _read_jsonl(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(read_lines(file), 1):
        if line.strip():
            yield _require_object(_parse_json(line, f"{file} line {number}"), f"{file} line {number}")


def _read_json(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with open_utf8(file) as stream:
        records = _parse_json(decode(stream.read(), file), str(file))
    if isinstance(records, dict):
        lists = [v for v in records.values() if isinstance(v, list) and isinstance((v or [0])[0], dict)]
        if len(lists) != 1:
            keys = ", ".join(map(str, list(records)[:20])) or "nothing"
            raise UserError(
                f"{file}: is an object with {keys}, of which {len(lists)} are lists of rows: give one list of"
                " objects, or an object a line (.jsonl)"
            )
        records = lists[0]
    if not isinstance(records, list):
        raise UserError(f"{file}: holds {type(records).__name__}, not a list of objects")
    return (_require_object(record, f"{file} record {number}") for number, record in enumerate(records, 1))


def _parse_json(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: is not JSON: {error.msg} at character {error.pos + 1}") from None
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(
            f"{where}: holds {half}, half of a character: remove it or complete the pair"
        ) from None
    except RecursionError:
        raise UserError(f"{where}: its lists or objects nest too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{where}: cannot be read: {str(error).partition(';')[0]}") from None


def _require_object(record: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(record, dict):
        raise UserError(f'{where}: is {type(record).__name__}, not an object such as {{"text": "..."}}')
    return where, record


def open_parquet(file: Path) -> ParquetFile:
    """The file, of which only the metadata is read. Raises UserError where it is no whole Parquet file."""
    with _explain_parquet_errors(file, NO_PARQUET):
        from pyarrow import parquet

        return parquet.ParquetFile(os.fspath(file), page_checksum_verification=True)


@contextlib.contextmanager
def _explain_parquet_errors(file: Path, what: str) -> Iterator[None]:
    """Raise UserError that says `what` of the file where pyarrow cannot read it, or is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{file}: parquet needs pyarrow: pip install pyarrow") from None
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: {what}: {str(error).partition(chr(10))[0]}") from None


def _read_parquet(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with open_parquet(file) as table, _explain_parquet_errors(file, NO_PARQUET):
        batches = table.iter_batches(batch_size=1000)
        records = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, record in enumerate(records, 1):
            yield f"{file} row {number}", record


def read_parquet_column(part: SplitFiles, column: str) -> Iterator[tuple[Path, int, pyarrow.Array]]:
    """(file, rows of it that come before, values) of one column from row `start` to `stop`.

    The files are read row group by row group, a few thousand rows at a time; other columns are not read.
    Raises UserError that names the row group where one is damaged.
    """
    stop = sys.maxsize if part.stop is None else part.stop
    passed = 0
    for file in part.files:
        with open_parquet(file) as table:
            first = passed
            for group in range(table.num_row_groups):
                position = passed
                passed += table.metadata.row_group(group).num_rows
                if passed <= part.start or position >= stop:
                    continue
                for values in _read_row_group(file, table, group, column):
                    low, high = max(part.start - position, 0), min(stop - position, len(values))
                    if low < high:
                        yield file, position - first + low, values[low:high]
                    position += len(values)


def _read_row_group(file: Path, table: ParquetFile, group: int, column: str) -> Iterator[pyarrow.Array]:
    """The values of one column of one row group, in batches: fewer rows where rows are long."""
    where = f"row group {group + 1} of {table.num_row_groups} cannot be read"
    with _explain_parquet_errors(file, where):
        about = table.metadata.row_group(group)
        rows = about.num_rows * PARQUET_BATCH_BYTES // max(1, about.total_byte_size)
        rows = max(1, min(rows, ARROW_BATCH_ROWS))
        for batch in table.iter_batches(rows, row_groups=[group], columns=[column]):
            yield batch.column(0)


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Mapping[str, Any]]]]] = {
    "csv": _read_csv,
    "tsv": partial(_read_csv, file_format="tsv"),
    "jsonl": _read_jsonl,
    "json": _read_json,
    "parquet": _read_parquet,
}
