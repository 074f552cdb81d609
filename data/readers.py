"""Text files as splits of strings: .txt as one stream; csv, tsv, jsonl, json and parquet by rows."""

from __future__ import annotations

import csv
import dataclasses
import difflib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core.errors import UserError
from isobatch.data.tokenizers import file_hash

PIECE_BYTES = 1 << 15
LONGEST_LINE = 1 << 20
HELD_OUT = 20
"""One part in this many becomes the validation split where there is none."""

FORMS = {".txt": "txt", ".text": "txt", ".raw": "txt", ".tokens": "txt", ".csv": "csv", ".tsv": "tsv"}
FORMS |= {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
SPLITS = {"train": "train", "training": "train", "valid": "valid", "validation": "valid", "val": "valid"}
SPLITS |= {"dev": "valid", "test": "test"}
Rows = Iterable[tuple[str, Mapping[str, Any]]]
"""(where it stands, the row) of each."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of one or more files of one form: bytes `start` to `stop` of a txt file, else rows."""

    files: tuple[Path, ...]
    form: str
    start: int = 0
    stop: int | None = None

    @property
    def is_stream(self) -> bool:
        return self.form == "txt"


def find(path: Path, form: str | None) -> dict[str, Part]:
    """The splits in a folder, or a single file as `train`."""
    if form is not None and form not in FORMS.values():
        raise UserError(f"--format {form}: is not one of {', '.join(dict.fromkeys(FORMS.values()))}")
    try:
        if path.is_dir():
            return _find_in_folder(path, form)
        with path.open("rb"):
            return {"train": Part((path,), form or _form_of(path))}
    except PermissionError as error:
        raise UserError(f"--data {path}: {error.filename} cannot be read: no permission") from None


def content(parts: Mapping[str, Part]) -> dict[str, list[str]]:
    """Each split's form and its files' hashes."""
    return {split: [part.form, *map(file_hash, part.files)] for split, part in parts.items()}


def _form_of(path: Path) -> str:
    if path.suffix.lower() not in FORMS:
        raise UserError(
            f"--data {path}: has no known ending ({' '.join(FORMS)}): say what it is with --format"
        )
    return FORMS[path.suffix.lower()]


def _find_in_folder(folder: Path, form: str | None) -> dict[str, Part]:
    names = sorted(f for f in folder.iterdir() if f.is_file())
    known = [f for f in names if f.suffix.lower() in FORMS and _split_of(f)]
    forms = sorted({_form_of(f) for f in known})
    if form is None and len(forms) > 1:
        raise UserError(f"--data {folder}: holds {' and '.join(forms)} files: choose with --format")
    known = [f for f in known if form in (None, _form_of(f))]
    found = {split: tuple(f for f in known if _split_of(f) == split) for split in ("train", "valid", "test")}
    if not found["train"]:
        there = ", ".join(f.name for f in names[:5]) or "nothing"
        raise UserError(
            f"--data {folder}: there is no train.txt (or .csv, .tsv, .jsonl, .json, .parquet); found: {there}"
        )
    for file in known:
        with file.open("rb"):
            pass
    return {split: Part(files, form or forms[0]) for split, files in found.items() if files}


def _split_of(file: Path) -> str | None:
    words = re.split(r"[^a-z]+", file.stem.lower())
    return next((SPLITS[w] for w in words if w in SPLITS), None)


def hold_out(part: Part) -> tuple[Part, Part]:
    """The part without its last twentieth, and that: bytes up to a line's end, whole files, or rows."""
    if not part.is_stream:
        count = sum(1 for _ in rows(part))
        if not count:
            raise UserError(f"--data {part.files[0]}: holds no rows")
        border = count - max(1, count // HELD_OUT)
    elif len(part.files) > 1:
        return dataclasses.replace(part, files=part.files[:-1]), dataclasses.replace(
            part, files=part.files[-1:]
        )
    else:
        border = _line_border(part.files[0])
    return dataclasses.replace(part, stop=border), dataclasses.replace(part, start=border)


def _line_border(file: Path) -> int:
    """A line's end at or after 95 % of the file, else the last before, else the last space, else 95 %."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(size - size // HELD_OUT - 1)
        stream.readline(LONGEST_LINE)
        if stream.tell() < size:
            return stream.tell()
        stream.seek(max(0, size - LONGEST_LINE))
        tail = stream.read().rstrip()
    cut = tail.rfind(b"\n")
    cut = cut if cut >= 0 else tail.rfind(b" ")
    cut = cut + 1 if cut >= 0 else len(tail) - len(tail) // HELD_OUT
    while cut < len(tail) and tail[cut] & 0xC0 == 0x80:  # inside a character
        cut += 1
    return max(0, size - LONGEST_LINE) + cut


def texts(part: Part, column: str) -> Iterator[str]:
    """The texts of a part: pieces of a stream that end at line borders, or one per row."""
    if part.is_stream:
        for file in part.files:
            yield from _pieces(file, part.start, part.stop)
    else:
        for where, row in rows(part):
            if (text := _cell(row, column, where)).strip():
                yield text


def columns(part: Part) -> list[str]:
    """The names of a part's columns, from its first row."""
    return next(([str(k) for k in row] for _, row in rows(part)), [])


def require_column(part: Part, column: str) -> None:
    names = columns(part)
    if names and column not in names:
        raise UserError(
            f"--text-column {column}: {part.files[0]} has no such column{nearest(column, names)}; "
            f"it has: {', '.join(names[:20])}"
        )


def nearest(name: str, names: Sequence[str]) -> str:
    """A question after the name that was perhaps meant, or nothing."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f" (did you mean {close[0]}?)" if close else ""


def _cell(row: Mapping[str, Any], column: str, where: str) -> str:
    text = row.get(column, "")
    if not isinstance(text, str | None):
        raise UserError(
            f"{where}: {column} holds {type(text).__name__}, not text: choose another --text-column"
        )
    return text or ""


def _pieces(file: Path, start: int, stop: int | None) -> Iterator[str]:
    stop = file.stat().st_size if stop is None else stop
    with file.open("rb") as stream:
        stream.seek(start)
        while (place := stream.tell()) < stop:
            block = stream.read(min(PIECE_BYTES, stop - place))
            if stream.tell() < stop:
                block += stream.readline(LONGEST_LINE)
            while (following := stream.peek(1)[:1]) and following[0] & 0xC0 == 0x80:
                block += stream.read(1)  # a line too long to wait for was cut inside a character
            yield decode(block, file, place)


def decode(block: bytes, file: Path, place: int = 0) -> str:
    """Text from bytes at `place` of a file; names the byte that is not UTF-8."""
    try:
        return block.decode("utf-8").removeprefix("\ufeff" if place == 0 else "")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file}: byte {place + error.start} is not UTF-8: convert it (iconv -f latin1 -t utf-8)"
        ) from None


def _lines(file: Path) -> Iterator[str]:
    place = 0
    with file.open("rb") as stream:
        for line in stream:
            yield decode(line, file, place)
            place += len(line)


def rows(part: Part) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) of every row from `start` to `stop`, file after file."""
    reader = {"csv": _csv, "tsv": _csv, "jsonl": _jsonl, "json": _json, "parquet": _parquet}[part.form]
    found = itertools.chain.from_iterable(reader(file, part.form) for file in part.files)
    return itertools.islice(found, part.start, part.stop)


def _csv(file: Path, form: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    csv.field_size_limit(1 << 30)
    plain: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if form == "tsv" else {}
    reader = csv.DictReader(_lines(file), **plain)
    try:
        for row in reader:
            where = f"{file} line {reader.line_num}"
            if None in row:  # where csv puts what the header has no name for
                names = len(row) - 1
                raise UserError(
                    f"{where}: has {names + len(row[None])} fields and the header {names}"
                    + (": quote a field that holds a comma" if form == "csv" else "")
                )
            yield where, row
    except csv.Error as error:
        raise UserError(f"{file} line {reader.line_num}: is not {form}: {error}") from None


def _jsonl(file: Path, form: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            yield _record(_parsed(line, f"{file} line {number}"), f"{file} line {number}")


def _json(file: Path, form: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    records = _parsed(decode(file.read_bytes(), file), str(file))
    if isinstance(records, dict):
        records = next((v for v in records.values() if isinstance(v, list)), [])
    return (_record(record, f"{file} record {number}") for number, record in enumerate(records, 1))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: is not JSON: {error.msg} at character {error.pos + 1}") from None


def _record(record: Any, where: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(record, dict):
        raise UserError(f'{where}: is {type(record).__name__}, not an object such as {{"text": "..."}}')
    return where, record


def _parquet(file: Path, form: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{file}: parquet needs pyarrow: pip install pyarrow") from None
    try:
        batches = parquet.ParquetFile(os.fspath(file)).iter_batches(batch_size=1000)
        records = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, record in enumerate(records, 1):
            yield f"{file} row {number}", record
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: is no whole parquet file: {error}") from None
