"""File formats of interactions: what a format reads, and the reader of csv, tsv and parquet tables."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import readers
from isobatch.data.interactions import tables
from isobatch.data.tables import delimited

_ENDINGS = (".csv", ".tsv", ".parquet", *delimited.ATOMIC, ".txt")
TABLE_FORMATS = {ending: readers.FORMATS[ending] for ending in _ENDINGS} | {".dat": "txt"}
SEQUENCES = "sequences"
"""The format of files with one user's items a line."""


NUMBERED = ("_id", "_no", "_nr", "_number", "_nummer", "_code")
_USUAL = delimited.USUAL_COLUMNS["interactions"]
COLUMNS = {
    kind: [delimited.simple_name(word.replace("*", end)) for word in words for end in NUMBERED]
    for kind, words in _USUAL.items()
}
"""What is read of an interaction, and an item's title -> the usual names of its column, simplified."""
READ = ("user", "item", "rating", "time", "quantity", "order")
"""What is read of an interaction, where it is there."""
UNSPLIT = "interactions ratings log orders sales purchases transactions clicks views plays events reviews"
UNSPLIT += " bestellungen auftraege verkaeufe"
"""Words in the name of a file that holds all interactions, not yet split."""
SIDES = {side: {re.sub(r"_id|[*]", "", word) for word in _USUAL[side]} for side in ("user", "item")}
"""Names of the tables of texts, without a plural's s: those of the columns that join them."""
PROSE = ("readme", "license", "licence", "source", "sources", "notice", "citation", "changelog", "about")
"""Names of text files that describe data."""
NAME = re.compile(r"(.*?)(\.inter|\.item|\.user)?(\.csv|\.tsv|\.parquet|\.txt|\.dat)?(\.gz)?", re.S)
"""A file's name: what is before its endings, RecBole's ending, a format's, and gzip's."""


class ItemText(NamedTuple):
    """The title of an item, and the text that the model reads."""

    title: str
    text: str


@dataclass
class RawInteractions:
    """Interactions as they are in the files: ids are not numbered, repeats are not removed."""

    splits: dict[str, tables.Table]
    """One split `all` where the files are not split."""
    users: dict[str, str] = field(default_factory=dict)
    """User id -> text."""
    items: dict[str, ItemText] = field(default_factory=dict)
    """Item id -> its title and text."""
    negatives: np.ndarray | None = None
    """(test rows, n) ids of items that each test row is ranked against."""
    notes: list[str] = field(default_factory=list)
    """What was read from which columns, once it is read."""


class FolderFormat(NamedTuple):
    """A format whose data is a folder of several files."""

    pattern: str
    """The name (glob) of a file that only folders of this format have."""
    files: Callable[[Path], list[Path]]
    """The files that `read` opens."""
    read: Callable[[Path], RawInteractions]


def usual_column(kind: str, available: Iterable[str]) -> str | None:
    """The column that is `kind` of COLUMNS, as its name says: customer_id, Customer-ID, customerId."""
    found = {delimited.simple_name(name): name for name in reversed([*available])}
    shopify = ("name",) * (kind == "order" and "lineitemname" in found)
    return next((found[name] for name in (*shopify, *COLUMNS[kind]) if name in found), None)


def find_tables(path: Path, file_format: str | None) -> list[Path]:
    """The tables of a folder (interactions or splits, users, items), or the single file `path`.

    Raises UserError where there are no interactions, or tables of several formats and none was chosen.
    """
    if path.is_file():
        return [path]
    known = [f for f in _files_in(path) if _named(f)[2]]
    logs = [f for f in known if not _side_of(f) and file_format in (None, SEQUENCES, _named(f)[2])]
    found = [f for f in logs if _split_from_name(f, path)] or logs
    found = [f for f in found if _named(f)[2] != "txt"] or found
    formats = sorted({str(_named(f)[2]) for f in found})
    if file_format is None and len(formats) > 1:
        raise UserError(f"--data {path}: holds {' and '.join(formats)} files: choose with --format")
    if not found:
        there = ", ".join(sorted(f.name for f in path.iterdir())[:6]) or "nothing"
        raise UserError(
            f"--data {path}: there is no ratings.dat, u.data or *.test.negative, and no table of interactions"
            f" ({', '.join(TABLE_FORMATS)}; with .gz behind them, too); found: {there}"
        )
    return [f for f in known if f in found or _side_of(f)]


def refuse_twins(folder: Path, read: Sequence[Path]) -> None:
    """Raise UserError for a text table that is not read and begins with the header of one that is, as a day's
    orders would beside those of the year under a name that says nothing.
    """
    unread = [f for f in _files_in(folder) if f not in read and _named(f)[2] in readers.DELIMITERS]
    headers = {_first_line(f): f for f in read if unread and _named(f)[2] in readers.DELIMITERS}
    for file in unread:
        if (line := _first_line(file)).strip() and (twin := headers.get(line)):
            way = f"name it {twin.name.partition('.')[0]}-{file.name}, or take it out of the folder"
            why = f"{file.name} has the columns of {twin.name} and is not read"
            raise UserError(f"--data {folder}: {why}: {way}")


def _first_line(file: Path) -> bytes:
    with readers.open_utf8(file) as stream:
        return stream.readline().rstrip(b"\r\n")


def _is_bare(file: Path) -> bool:
    """Whether a text table has a header alone."""
    if _named(file)[2] not in readers.DELIMITERS:
        return False
    with readers.open_utf8(file) as stream:
        return not any(line.strip() for line in itertools.islice(stream, 1, None))


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder that are not hidden, 2 before 10; where it has no tables those of its folders."""
    for pattern in ("*", "**/*"):
        files = [f.relative_to(folder) for f in folder.glob(pattern) if f.is_file()]
        found = [folder / f for f in files if not any(part[0] in "._" for part in f.parts)]
        if any(_named(f)[2] and not _side_of(f) for f in found):
            break
    return sorted(found, key=lambda f: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", str(f))])


def _named(file: Path) -> tuple[str, str, str | None]:
    """(the name without its endings, RecBole's ending, the format) of a file; None for what is no table."""
    stem, atomic, ending, _ = NAME.fullmatch(file.name.lower()).groups("")  # type: ignore[union-attr]
    form = TABLE_FORMATS.get(ending or atomic)
    return stem, atomic, None if form == "txt" and stem in PROSE else form


def _split_from_name(file: Path, folder: Path) -> str | None:
    """The split that the words of a name say, its folder's too; `all` for a log that is not split."""
    stem, atomic, _ = _named(file)
    words = re.split(r"[^a-z]+", f"{file.relative_to(folder).parent} {stem}".lower())
    if {*words}.intersection(UNSPLIT.split()):
        return "all"
    found = (split for split in readers.SPLIT_NAMES for word in words if word in (split, f"{split}ation"))
    return next(found, "all" if atomic else None)


def _side_of(file: Path) -> str | None:
    """Whose texts a table holds: `user`, `item`, or nobody's."""
    names = [name.strip(".").removesuffix("s") for name in _named(file)[:2]]
    return next((side for side, own in SIDES.items() if own.intersection(names)), None)


def read_tables(path: Path, file_format: str | None, options: Any) -> RawInteractions:
    """Read interactions from one table, or from those of each split, and the texts from tables of users and
    items.

    Raises UserError for a missing column, missing or unreadable values, or files of one split that differ.
    """
    files, notes = find_tables(path, file_format), list[str]()
    texts: dict[str, dict[str, ItemText]] = {"user": {}, "item": {}}
    splits: dict[str, list[Path]] = {split: [] for split in ("all", *readers.SPLIT_NAMES)}
    for file in files:
        if path.is_dir() and (side := _side_of(file)):
            texts[side] = _texts_by_id(file, side, notes)
        else:
            splits[(path.is_dir() and _split_from_name(file, path)) or "all"].append(file)
    if splits["train"]:
        splits["all"] = []
    unread = [f.name for f in _files_in(path) if f not in files and _named(f)[0] not in PROSE]
    notes += [f"{path.name}: not read: {', '.join(unread[:8])}"] * bool(unread)
    found = RawInteractions({}, {k: t.text for k, t in texts["user"].items()}, texts["item"], notes=notes)
    for split, fs in splits.items():
        if fs:
            headers = Counter(_first_line(f) for f in fs if _named(f)[2] in readers.DELIMITERS)
            bare = [f for f in fs if _is_bare(f) and (not _first_line(f) or headers[_first_line(f)] > 1)]
            if bare and len(bare) < len(fs):
                fs = [f for f in fs if f not in bare]
                notes.append(f"left out, as they hold no rows: {', '.join(f.name for f in bare[:8])}")
            parts = [
                _open_interactions(f, file_format, options, [] if n else notes) for n, f in enumerate(fs)
            ]
            parts = [replace(part, date_order=options.date_order) for part in parts]
            found.splits[split] = _as_one(path, fs, parts, notes)
    return found


def _as_one(path: Path, files: list[Path], parts: list[tables.Table], notes: list[str]) -> tables.Table:
    """The tables of a split, one behind the other. Raises UserError where their columns differ."""
    one = parts[0]
    if len(parts) == 1:
        return one
    for file, part in zip(files, parts, strict=True):
        if (part.names, part.columns) != (one.names, one.columns) or tables.LINE in part.names:
            which = f"{files[0].name} and {file.name}"
            which += " are the same split: keep one, or give both the same columns"
            raise UserError(f"--data {path}: {which}")
    ends = f"{files[0].relative_to(path)} to {files[-1].relative_to(path)}"
    notes.append(f"{len(files)} files are read as one, in the order of their names: {ends}")
    same = {name: name for name in one.columns}
    return tables.Table(str(path), same, lambda: (b for p in parts for b in p.batches()))


def _open_interactions(file: Path, file_format: str | None, options: Any, notes: list[str]) -> tables.Table:
    """The columns user and item, and rating and time where the table has them."""
    asked: dict[str, str | None] = {name: getattr(options, f"{name}_column") for name in READ}
    form = _named(file)[2] if file_format in (None, SEQUENCES) else file_format
    if form == "parquet":
        with readers.open_parquet(file) as table:
            names = {delimited.ATOMIC_TYPE.sub("", name): name for name in table.schema_arrow.names}
        columns = _choose_columns(file, [*names], asked, notes)
        return tables.parquet_table(file, {name: names[c] for name, c in columns.items()}, [*names])
    given = [delimited.simple_name(n) for n in asked.values() if n and not n.isdecimal()]
    known = {*given, *itertools.chain(*(COLUMNS[name] for name in READ))}
    shape = tables.shape_to_stream(file, str(form), asked.values(), known)
    if not shape.names:
        raise UserError(f"{file}: is empty: leave it out")
    is_table = shape.even or known & {*map(delimited.simple_name, shape.names)}
    if file_format == SEQUENCES or (not is_table and tables.are_sequences(file)):
        return tables.sequence_table(file, asked["user"], notes)
    notes += [note for note in shape.notes if note not in notes]
    asked = {name: given or _by_place(shape).get(name) for name, given in asked.items()}
    return tables.delimited_table(file, shape, _choose_columns(file, shape.names, asked, notes))


def _by_place(shape: delimited.Shape) -> dict[str, str | None]:
    """What the columns of a table without names are, by their numbers: user, item, rating, time.

    Of a third and a fourth the one with seconds since 1970 or dates is the time, else the fourth. More or
    fewer columns are not guessed.
    """
    if shape.header_lines or not 2 <= len(shape.names) <= 4:
        return {}
    others = dict(zip("34", [*zip(*shape.rows, strict=False)][2:], strict=False))
    times = [n for n, column in others.items() if all(map(tables.TIME_CELL.match, column))]
    numbers = [n for n, column in others.items() if all(map(delimited.is_number, column))]
    time = next(iter(times[-1:] or numbers[1:]), None)
    return {"user": "1", "item": "2", "time": time, "rating": next((n for n in numbers if n != time), None)}


def _choose_columns(
    file: Path, available: list[str], asked: Mapping[str, str | None], notes: list[str]
) -> dict[str, str]:
    """What READ names -> its column in the file, which `notes` say where it is called otherwise.

    Raises UserError where one is missing.
    """
    chosen = {}
    for name in READ:
        column = asked[name] or usual_column(name, available)
        if name not in ("user", "item") and column in (None, "none"):
            continue
        flag = f"--{name}-column"
        if column is None:
            wanted, has = f"{name}_id or {name}", readers.name_columns(available)
            rows = "; --format sequences reads a user's items a line" * all(map(str.isdecimal, available))
            raise UserError(f"{file}: has no column {wanted}; {flag} says which{rows}; it has: {has}")
        readers.require_name(column, available, file, flag)
        chosen[name] = column
    renamed = [f"{column} as {name}" for name, column in chosen.items() if column != name]
    unread = [name for name in available if name not in chosen.values()]
    said = [f"read {', '.join(renamed)}"] if renamed else []
    said += [f"not read: {', '.join(unread[:8])}"] if unread else []
    if said and (note := f"{file.name}: {'; '.join(said)}") not in notes:
        notes.append(note)
    return chosen


def _texts_by_id(file: Path, side: str, notes: list[str]) -> dict[str, ItemText]:
    """Id -> title and text of a table of users or items: of all columns but the id and an item's numbers, as
    price and stock, which change.

    Notes say what is read, and where several rows have one id.
    """
    rows = [*tables.read_rows(file)]
    if not rows:
        return {}
    columns = {name: [row[name] for _, row in rows] for name in rows[0][1]}
    key = usual_column(side, columns) or usual_column("id", columns) or next(iter(columns))
    if key.isdecimal() and key not in ("0", "1"):
        some = ", ".join([*columns][:4])
        raise UserError(f"{file}: its first row names no columns ({some}): give it a header")
    others = [name for name in columns if name != key]
    title = usual_column("title", columns) or [*others, key][0]
    numeric = {n for n in others if {*map(type, delimited.numbers(columns[n]))} == {float}}
    numeric |= {n for n in others if delimited.simple_name(n) in COLUMNS["amount"]}
    said = [n for n in others if side == "user" or n == title or n not in numeric]
    unread = [n for n in others if n not in said][:8]
    read = f"read {key} as {side}" + f", {', '.join(said)} as text" * bool(said)
    notes.append(f"{file.name}: {read}" + f"; not read: {', '.join(unread)}" * bool(unread))
    texts = []
    for where, row in rows:
        if row[key] in (None, "") or row[key] != row[key]:
            raise UserError(f"{where}: has no {key}: fill it in, or leave the row out")
        words = [str(row[n]).replace("|", ", ") for n in said if row[n] not in (None, "")]
        texts.append(ItemText(str(row[title] or row[key]), ". ".join(words)))
    keys = tables.whole_ids(map(str, columns[key]))
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        several = f"{len(twice):,} of its ids have several rows ({tables.some_ids(twice)})"
        notes.append(f"{file.name}: {several}: the last is read")
    return dict(zip(keys, texts, strict=True))
