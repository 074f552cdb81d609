"""Readers of text files: .txt as one stream of text; csv, tsv, jsonl, json, parquet and conll row by row."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import gzip
import io
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError, explain_errors
from isobatch.core.flags import nearest_hint
from isobatch.data.digests import file_hash
from isobatch.data.preparation.progress import position
from isobatch.data.tables import delimited

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

CHUNK_BYTES = 1 << 15
MAX_LINE_BYTES = 1 << 20
ARROW_BATCH_ROWS = 1000
PARQUET_BATCH_BYTES = 1 << 22
VALIDATION_ONE_IN = 20
"""Where there is no validation split, one part in this many of the training data becomes it."""

FORMATS = {".txt": "txt", ".text": "txt", ".raw": "txt", ".tokens": "txt", ".csv": "csv", ".tsv": "tsv"}
FORMATS |= {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
FORMATS |= dict.fromkeys(delimited.ATOMIC, "tsv")
FORMATS |= dict.fromkeys((".conll", ".bio", ".iob", ".iob2"), "conll")
DELIMITERS = {"csv": ",", "tsv": "\t"}
GZIP = ".gz"
NOT_UTF8 = "is not UTF-8: save it as CSV UTF-8 in Excel, or convert it (iconv -f cp1252 -t utf-8)"
NOT_CP1252 = re.compile("\xc3[^\0-\x7f]|\0")
"""As a letter of UTF-8 or UTF-16 looks in cp1252: such a file has faults, and is not guessed at."""
SPLITS = {"train": "train", "training": "train", "valid": "valid", "validation": "valid", "val": "valid"}
SPLITS |= {"dev": "valid", "test": "test"}
"""Words in names -> the split that they mean."""
SPLIT_NAMES = ("train", "valid", "test")
LocatedRows = Iterable[tuple[str, Mapping[str, Any]]]
"""(where, row) of each row; `where` names its file and line, for error messages."""


@dataclass(frozen=True, slots=True)
class SplitFiles:
    """The files of one split, all of one format, and what of them belongs to it.

    `start` and `stop` are bytes of a single txt file.
    """

    files: tuple[Path, ...]
    format: str
    start: int = 0
    stop: int | None = None
    numbers: tuple[str, ...] = ()
    """The columns that flags take by number, from 1 on."""
    key: str | None = None
    """Of a JSON object that holds several splits: the name of this one's rows."""
    only: str | None = None
    """Of Parquet the one column that is read; None for all."""

    @property
    def is_stream(self) -> bool:
        return self.format == "txt"


def find_splits(path: Path, file_format: str | None, options: Any = None) -> dict[str, SplitFiles]:
    """The splits in a folder, by the words in its files' names; or in a JSON object; else a file is `train`.

    `options`: the fields that end in _column may name columns by number. Raises UserError for an unknown
    format, several formats, no training file, or no permission.
    """
    if file_format is not None and file_format not in FORMATS.values():
        raise UserError(f"--format {file_format}: is not one of {', '.join(dict.fromkeys(FORMATS.values()))}")
    try:
        fields = getattr(options, "__dataclass_fields__", ())
        numbers = numbers_in(getattr(options, name) for name in fields if name.endswith("_column"))
        if path.is_dir():
            found = _find_in_folder(path, file_format)
        else:
            with path.open("rb"):
                found = {"train": SplitFiles((path,), file_format or _format_of(path))}
            if found["train"].format == "json" and (keys := _split_keys(path, path.stat().st_mtime_ns)):
                found = {split: dataclasses.replace(found["train"], key=key) for split, key in keys.items()}
        return {split: dataclasses.replace(part, numbers=numbers) for split, part in found.items()}
    except PermissionError as error:
        raise UserError(f"--data {path}: {error.filename} cannot be read: no permission") from None


def numbers_in(columns: Iterable[str | None]) -> tuple[str, ...]:
    """The names of columns that are numbers."""
    return tuple(name for some in columns if some for name in some.split(",") if name.isdecimal())


@functools.lru_cache
def _split_keys(file: Path, changed: int) -> dict[str, str]:  # noqa: ARG001  part of the cache's key
    """Split -> its key in a JSON object that holds rows of training by that name; else nothing."""
    value = _parse_json_file(file)
    keys = _lists_of_rows(value) if isinstance(value, dict) else []
    found = {SPLITS[key.lower()]: key for key in keys if key.lower() in SPLITS}
    return found if "train" in found else {}


def table_notes(parts: Mapping[str, SplitFiles]) -> list[str]:
    """What the user should know of how the tables are read, one line each."""
    tables = [(file, part) for part in parts.values() if part.format in DELIMITERS for file in part.files]
    shapes = [shape_of(file, DELIMITERS[part.format], part.numbers) for file, part in tables]
    notes = [note for shape in shapes for note in shape.notes]
    if (train := parts["train"]).key:
        known = {part.key for part in parts.values()}
        unread = [k for k in _lists_of_rows(_parse_json_file(train.files[0])) if k not in known]
        notes += [f"of the splits in the file, {', '.join(unread)} are not read"] * bool(unread)
    return list(dict.fromkeys(notes))


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
        ways = {GZIP: "unpack it (gunzip)", **dict.fromkeys((".xlsx", ".xls", ".ods"), "save it as CSV")}
        known, way = " ".join(FORMATS), ways.get(ending, "say what it is with --format")
        raise UserError(f"--data {path}: has no known ending ({known}; of tables with .gz behind it): {way}")
    return FORMATS[ending]


def _find_in_folder(folder: Path, file_format: str | None) -> dict[str, SplitFiles]:
    names = sorted(f for f in folder.iterdir() if f.is_file())
    known = [f for f in names if _ending(f) in FORMATS and split_named(f.stem)]
    formats = sorted({_format_of(f) for f in known})
    if file_format is None and len(formats) > 1:
        raise UserError(f"--data {folder}: holds {' and '.join(formats)} files: choose with --format")
    known = [f for f in known if file_format in (None, _format_of(f))]
    found: dict[str, tuple[Path, ...]] = dict.fromkeys(SPLIT_NAMES, ())
    for file in known:
        file.open("rb").close()
        found[str(split_named(file.stem))] += (file,)
    if not found["train"]:
        there = ", ".join(f.name for f in names[:5]) or "nothing"
        raise UserError(
            f"--data {folder}: there is no train.txt (or .csv, .tsv, .jsonl, .json, .parquet, .conll);"
            f" found: {there}"
        )
    return {split: SplitFiles(files, file_format or formats[0]) for split, files in found.items() if files}


def split_named(name: str) -> str | None:
    """The split that the words of a file's name say."""
    return next((SPLITS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLITS), None)


def count_rows(part: SplitFiles) -> int:
    """The rows of all files of a split: of Parquet from their metadata, otherwise by reading them."""
    if part.format != "parquet":
        return sum(1 for _ in read_rows(part))
    count = 0
    for file in part.files:
        with open_parquet(file) as table:
            count += table.metadata.num_rows
    return count


def read_stream(part: SplitFiles) -> Iterator[str]:
    """The text of a split of txt files, in chunks of whole lines."""
    position.begin(part.files, part.stop and part.stop - part.start)
    for file in part.files:
        yield from _read_stream(file, part.start, part.stop)


def require_content(part: SplitFiles) -> None:
    """Raise UserError where all files of a split are empty."""
    if not any(file.stat().st_size for file in part.files):
        raise UserError(f"--data: {part.files[0]} is empty")


def column_names(part: SplitFiles) -> list[str]:
    """The names of the columns, from the first row that has some; empty where there is none."""
    return next(([str(k) for k in row] for _, row in read_rows(part) if row), [])


def require_column(part: SplitFiles, column: str, flag: str = "", otherwise: str = "") -> None:
    """Raise UserError unless each file's rows have this column; arguments as of `require_name`."""
    for file in part.files:
        if names := column_names(dataclasses.replace(part, files=(file,))):
            require_name(column, names, file, flag, otherwise)


def require_name(
    column: str, names: Sequence[str], where: object, flag: str = "", otherwise: str = ""
) -> None:
    """Raise UserError unless a column is among the names of those that `where` has.

    `flag`: what was typed to name it, perhaps nothing; `otherwise`: what else would be read.
    """
    if column not in names:
        what = f"{flag} {column}: {where} has no such column" if flag else f"{where}: has no column {column}"
        more, usual = f"; {otherwise}" if otherwise else "", column.split(" or ")
        of_usual = next(filter(None, (nearest_hint(name, usual) for name in names)), "")
        hint = of_usual if usual[1:] else nearest_hint(column, names)
        raise UserError(f"{what}{hint}; it has: {name_columns(names)}{more}")


def name_columns(names: Sequence[str]) -> str:
    """The names of columns for a message; where they look like a row, how to take columns by number."""
    listed = ", ".join(name[:80] for name in names[:20]) or "no rows"
    like_row = any(delimited.is_number(name) or name.count(" ") > 3 for name in names)
    return listed + " (where these are no names, a number takes a column: 1 the first)" * like_row


def text_cell(row: Mapping[str, Any], column: str, where: str, flag: str = "--text-column") -> str:
    """The text in a column of a row, empty where there is none. Raises UserError for what is no text."""
    text = row.get(column)
    if not isinstance(text, str | None):
        raise UserError(f"{where}: {column} holds {type(text).__name__}, not text: choose another {flag}")
    return text or ""


def encoding_of(file: Path) -> str:
    """utf-16 as a byte order mark says; cp1252 of a table that is not UTF-8 and can be that; else utf-8."""
    return _encoding(file, file.stat().st_mtime_ns)


def encoding_notes(file: Path) -> list[str]:
    """What the user should know of it."""
    return [f"{file.name}: is not UTF-8 and is read as Windows-1252"] * (encoding_of(file) == "cp1252")


@functools.lru_cache
def _encoding(file: Path, changed: int) -> str:  # noqa: ARG001  part of the cache's key
    with file.open("rb") as stream:
        if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            return "utf-16"
        if file.suffix.lower() == GZIP or FORMATS.get(_ending(file)) not in DELIMITERS:
            return "utf-8"
        try:
            for _ in codecs.iterdecode(iter(functools.partial(stream.read, 1 << 20), b""), "utf-8"):
                pass
        except UnicodeDecodeError:
            with contextlib.suppress(UnicodeDecodeError):
                return "utf-8" if NOT_CP1252.search(file.read_text("cp1252")) else "cp1252"
    return "utf-8"


class _Unpacked(gzip.GzipFile):
    """Unpacks a file as it is read. Raises UserError where it is no whole gzip file."""

    def read(self, size: int | None = -1) -> bytes:
        kinds = gzip.BadGzipFile, EOFError, zlib.error
        with explain_errors(f"{self.name}: is no whole gzip file", *kinds, way_out=": fetch it again"):
            return super().read(size)


def open_utf8(file: Path) -> io.BufferedReader:
    """A file's bytes in UTF-8, unpacked; converted in memory from others, or where lines end with CR.

    Raises UserError.
    """
    if file.suffix.lower() == GZIP:
        return io.BufferedReader(_Unpacked(file), 1 << 20)
    if (encoding := encoding_of(file)) == "utf-8":
        stream = file.open("rb")
        head = stream.peek(1)
        if b"\r" in head and b"\n" not in head and FORMATS.get(_ending(file)) in DELIMITERS:
            with stream:  # as the first Macintoshes ended lines, and Excel can
                return io.BufferedReader(io.BytesIO(stream.read().replace(b"\r", b"\n")))
        return stream
    with explain_errors(f"{file}: is not whole UTF-16, as its first bytes say it is", UnicodeError):
        return io.BufferedReader(io.BytesIO(file.read_bytes().decode(encoding).encode()))


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
        raise UserError(f"{file}: byte {offset + error.start} {NOT_UTF8}") from None


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a text file, with their ends. Raises UserError where it is not UTF-8."""
    offset = 0
    with open_utf8(file) as stream:
        for line in stream:
            yield decode(line, file, offset)
            offset += len(line)
            position.advance(len(line))


def read_rows(part: SplitFiles) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) of every row that is `kept`, file after file.

    Raises UserError with the line for a row that cannot be read.
    """
    position.begin(part.files)
    return itertools.chain.from_iterable(_READERS[part.format](file, part) for file in part.files)


def shape_of(file: Path, usual: str, numbers: Iterable[str] = ()) -> delimited.Shape:
    """As `delimited.find_shape`; text that is not UTF-8 is passed over until it is read."""
    with open_utf8(file) as stream:
        head = (line.decode("utf-8-sig", "replace") for line in stream)
        shape = delimited.find_shape(head, file, usual, numbers)
    shape.notes.extend(encoding_notes(file))
    return shape


def has_semicolons(file: str | None) -> bool:
    """Whether this is a csv file whose cells are parted by semicolons."""
    is_csv = file is not None and (path := Path(file).expanduser()).is_file() and _ending(path) == ".csv"
    return is_csv and shape_of(path, DELIMITERS["csv"]).dialect["delimiter"] == ";"


def _read_delimited(file: Path, part: SplitFiles) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return delimited.read(read_lines(file), file, shape_of(file, DELIMITERS[part.format], part.numbers))


def _read_jsonl(file: Path, _: SplitFiles) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(read_lines(file), 1):
        if line.strip():
            if number == 1 and line.strip() in ("[", "{"):
                what = "is one list or object in JSON, not one a line"
                raise UserError(f"{file}: {what}: --format json reads it")
            yield _as_row(parse_json(line, where := f"{file} line {number}"), where)


def _read_json(file: Path, part: SplitFiles) -> Iterator[tuple[str, Mapping[str, Any]]]:
    rows = _rows_in(_parse_json_file(file), part.key, file)
    return (_as_row(row, f"{file} record {number}") for number, row in enumerate(rows, 1))


def _parse_json_file(file: Path) -> Any:
    with open_utf8(file) as stream:
        return parse_json(decode(stream.read(), file), str(file))


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _lists_of_rows(value: Mapping[str, Any], kind: Any = (dict, list)) -> list[str]:
    """The keys of an object that hold lists of objects, or of lists."""
    return [k for k, v in value.items() if v and isinstance(v, list) and all(isinstance(x, kind) for x in v)]


def _rows_in(value: Any, key: str | None, file: Path) -> list[Any]:
    """The rows of a JSON file, of an object those at `key`. Raises UserError unless it is clear which."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise UserError(f"{file}: holds {type(value).__name__}, not a list of objects")
    sizes = {len(column) if isinstance(column, list) else None for column in value.values()}
    keys = [key] if key else _lists_of_rows(value, dict)
    if not keys and len(value) > 1 and None not in sizes:
        if len(sizes) > 1:
            lengths = ", ".join(f"{name} {len(column)}" for name, column in value.items())
            raise UserError(f"{file}: its columns are not of one length ({lengths})")
        return [dict(zip(value, cells, strict=True)) for cells in zip(*value.values(), strict=True)]
    keys = keys or _lists_of_rows(value)
    if len(keys) == 1:
        return value[keys[0]]
    held = f"several lists of rows ({', '.join(keys[:6])}): call them train, valid and test, or keep one"
    raise UserError(f"{file}: holds {held if keys else 'an object without a list of rows'}")


def _as_row(record: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    """`where` and the row; of a list of values the columns are numbered from 1. Raises UserError."""
    if isinstance(record, list) and len(record) > 1 and not any(isinstance(cell, dict) for cell in record):
        return where, {str(number): cell for number, cell in enumerate(record, 1)}
    if not isinstance(record, dict):
        raise UserError(f'{where}: is {type(record).__name__}, not an object such as {{"text": "..."}}')
    return where, record


def parse_json(text: str, where: str) -> Any:
    """The value that a text in JSON stands for. Raises UserError."""
    try:
        value = atomic_files.parse_json(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:  # half of a character, thousands of digits, ...
        reason = str(error).partition(";")[0] or type(error).__name__
        raise UserError(f"{where}: is not JSON that can be read: {reason}") from None


def open_parquet(file: Path) -> ParquetFile:
    """The file, of which only the metadata is read. Raises UserError where it is no whole Parquet file."""
    with explain_parquet_errors(file):
        from pyarrow import parquet

        table = parquet.ParquetFile(os.fspath(file), page_checksum_verification=True)
    delimited.refuse_twins(table.schema_arrow.names, file)
    return table


def explain_parquet_errors(
    file: Path, what: str = "is no whole parquet file"
) -> contextlib.AbstractContextManager[None]:
    """Raise UserError that says `what` of the file where pyarrow cannot read it."""
    import pyarrow

    kinds = pyarrow.ArrowException, OSError, UnicodeDecodeError
    return explain_errors(f"{file}: {what}", *kinds, way_out=": fetch it again")


def _read_parquet(file: Path, part: SplitFiles) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows, row group by row group, some at a time: fewer where rows are long. Class labels are given by
    name, where the file has names.
    """
    number, only = 0, None if part.only is None else [part.only]
    with open_parquet(file) as table:
        names = _class_names(table)
        for group in range(table.num_row_groups):
            about = table.metadata.row_group(group)
            most = about.num_rows * PARQUET_BATCH_BYTES // max(1, about.total_byte_size)
            rows = max(1, min(most, ARROW_BATCH_ROWS))
            what = f"row group {group + 1} of {table.num_row_groups} cannot be read"
            with explain_parquet_errors(file, what):
                for batch in table.iter_batches(rows, row_groups=[group], columns=only):
                    for number, record in enumerate(batch.to_pylist(), number + 1):  # noqa: B020
                        cells = {k: class_named(without_nulls(v), names.get(k)) for k, v in record.items()}
                        yield f"{file} row {number}", cells


def _class_names(table: ParquetFile) -> dict[str, list[str]]:
    """Column -> the names of its class labels, or of those in its lists, as Hugging Face's datasets write
    them beside the schema; nothing for what is written otherwise.
    """
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError, AttributeError):
        about = atomic_files.parse_json(table.schema_arrow.metadata[b"huggingface"].decode())["info"]
        features = {k: v.get("feature", v) for k, v in about["features"].items() if isinstance(v, dict)}
        return {k: [*map(str, v["names"])] for k, v in features.items() if "names" in v}
    return {}


def class_named(label: Any, names: Sequence[str] | None) -> Any:
    """The name of a class label, or those in a list; None of one that is withheld. What has no name stays."""
    if names and isinstance(label, list):
        return [class_named(one, names) for one in label]
    if not names or not isinstance(label, int) or label >= len(names):
        return label
    return names[label] if label >= 0 else None


def without_nulls(value: Any) -> Any:
    """A value without the fields that Arrow has added: in a column all objects have the fields of each."""
    if isinstance(value, dict):
        return {name: without_nulls(part) for name, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


TAG = re.compile(r"[OBI]|[BIESLUM]-.+")
"""A tag of a word in BIO, or with the letters of BIOES, BILOU and BMES."""
NEW_DOCUMENT = "-DOCSTART-"


def first_tag(tag: str) -> str:
    """The tag; where those of several annotators are joined by commas, the first."""
    parts = tag.split(",")
    return parts[0] if all(map(TAG.fullmatch, parts)) else tag


def as_conll(part: SplitFiles) -> SplitFiles:
    """The same files, as conll where they are called text or tsv and begin with sentences of tagged words."""
    if part.format in ("txt", "tsv"):
        with contextlib.suppress(UserError):
            if all(len([*itertools.islice(_read_conll(file, part), 2)]) == 2 for file in part.files):
                return dataclasses.replace(part, format="conll")
    return part


def _read_conll(file: Path, _: SplitFiles) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A row with lists of `words` and `tags`, the first and the last column, for each sentence.

    Between columns are tabs where a line has some, else blanks. Lines of comment (`# id ...`) above a
    sentence, and those that begin a document, are passed over.
    """
    words, tags, width, begin = list[str](), list[str](), 0, 0
    for number, line in enumerate(itertools.chain(read_lines(file), [""]), 1):
        text = line.strip("\r\n ")
        found = [field.strip(" ") for field in re.split("\t" if "\t" in text else " +", text)]
        is_tagged = bool(found) and TAG.fullmatch(first_tag(found[-1]))
        if not any(found) or found[0] == NEW_DOCUMENT or (line[0] == "#" and not words and not is_tagged):
            if words:
                yield f"{file} line {begin}", {"words": words, "tags": tags}
                words, tags = [], []
            continue
        width, begin = width or len(found), begin if words else number
        if len(found) != width or width < 2 or not found[0] or not is_tagged:
            raise UserError(
                f"{file} line {number}: {text[:40]!r} is no word with a tag (O, B-type, I-type), in"
                f" {max(2, width)} columns; a blank line ends a sentence"
            )
        words.append(found[0])
        tags.append(found[-1])


_READERS: dict[str, Callable[[Path, SplitFiles], Iterator[tuple[str, Mapping[str, Any]]]]] = {
    "csv": _read_delimited,
    "tsv": _read_delimited,
    "jsonl": _read_jsonl,
    "json": _read_json,
    "parquet": _read_parquet,
    "conll": _read_conll,
}
