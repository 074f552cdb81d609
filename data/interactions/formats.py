"""Who took what, and the words for both, from the forms that such data comes in; arrays from end to end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.interactions.tables import parquet, parsed, rows
from isobatch.data.readers import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

TABLES = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
USERS = ("user", "user_id", "userId", "uid", "ncf_user")
ITEMS = ("item", "item_id", "itemId", "movieId", "movie_id", "product_id", "ncf_item")
RATINGS = ("rating", "score", "stars")
TIMES = ("timestamp", "time", "date", "datetime")
TITLES = ("title", "name")
WHOLE = ("interactions", "ratings", "log")
"""Stems of a file that is not split."""
SPLITS = ("train", "valid", "test")


class Columns(NamedTuple):
    """What the user calls the columns of tables; None where the usual names are looked for."""

    user: str | None = None
    item: str | None = None
    rating: str | None = None
    time: str | None = None
    user_text: str | None = None
    """The columns of the users' table that make the text, between commas."""
    item_text: str | None = None


class Item(NamedTuple):
    """What is known of an item."""

    title: str
    text: str


@dataclass
class Found:
    """Interactions as they lie in files."""

    splits: dict[str, pa.Table]
    """Columns user, item and perhaps rating and time; one split called `all` where the files make none."""
    users: dict[str, str] = field(default_factory=dict)
    """Id -> text."""
    items: dict[str, Item] = field(default_factory=dict)
    negatives: np.ndarray | None = None
    """(test rows, n) ids of items that each test row is ranked against."""


class Form(NamedTuple):
    """One way in which such data lies in a folder."""

    pattern: str
    """A file that only folders of this form have."""
    files: Callable[[Path], list[Path]]
    """All that `read` opens."""
    read: Callable[[Path], Found]


def tables_in(path: Path, form: str | None) -> list[Path]:
    """The tables of a folder, of one form, or a single one: interactions, splits, users and items."""
    if path.is_file():
        return [path]
    stems = ("users", "items", "movies")
    known = [f for f in sorted(path.iterdir()) if f.suffix in TABLES and (_split(f) or f.stem in stems)]
    forms = sorted({TABLES[f.suffix] for f in known if _split(f)})
    if form is None and len(forms) > 1:
        raise UserError(f"--data {path}: holds {' and '.join(forms)} files: choose with --format")
    found = [f for f in known if f.stem in stems or TABLES[f.suffix] == (form or forms[0])] if forms else []
    if not any(_split(f) for f in found):
        there = ", ".join(sorted(f.name for f in path.iterdir())[:6]) or "nothing"
        raise UserError(
            f"--data {path}: there is no ratings.dat, u.data or *.test.negative, and no table called"
            f" interactions, ratings or train (.csv, .tsv, .parquet); found: {there}"
        )
    return found


def _split(file: Path) -> str | None:
    words = re.split(r"[^a-z]+", file.stem.lower())
    if any(word in words for word in WHOLE):
        return "all"
    return next((split for split in SPLITS for word in words if word in (split, f"{split}ation")), None)


def read_tables(path: Path, form: str | None, asked: Columns) -> Found:
    """Interactions in one table or one a split, and tables of users and items beside them."""
    files = tables_in(path, form)
    if path.is_file():
        return Found({"all": _table(path, asked)})
    splits = {split: [f for f in files if _split(f) == split] for split in ("all", *SPLITS)}
    if splits["train"]:
        splits["all"] = []
    if twice := next((fs for fs in splits.values() if len(fs) > 1), None):
        raise UserError(f"--data {path}: {twice[0].name} and {twice[1].name} are the same split: keep one")
    found = Found({split: _table(fs[0], asked) for split, fs in splits.items() if fs})
    for file in files:
        if file.stem == "users":
            found.users = {key: item.text for key, item in _words(file, USERS, asked.user_text)}
        elif file.stem in ("items", "movies"):
            found.items = dict(_words(file, ITEMS, asked.item_text))
    return found


def _table(file: Path, asked: Columns) -> pa.Table:
    """The columns user, item, and rating and time where there are such."""
    import pyarrow as pa

    ids = [name for name in (asked.user, asked.item, *USERS, *ITEMS) if name]
    if file.suffix == ".parquet":
        table = parquet(file)
    else:
        table = parsed(file, "," if file.suffix == ".csv" else "\t", ids=ids)
    there = table.column_names
    wanted = {"user": (asked.user, USERS), "item": (asked.item, ITEMS)}
    wanted |= {"rating": (asked.rating, RATINGS), "time": (asked.time, TIMES)}
    chosen = {}
    for name, (given, usual) in wanted.items():
        column = given or next((u for u in usual if u in there), None)
        if column is None and name in ("rating", "time"):
            continue
        if column not in there:
            flag = f"--{name}-column"
            looked = f"{flag} {given}: is no column" if given else f"has no column {' or '.join(usual[:3])}"
            hint = did_you_mean(given, there) if given else f": say which with {flag}"
            raise UserError(f"{file}: {looked} (there are {', '.join(there[:8])}){hint}")
        chosen[name] = table[column]
    for name in ("rating", "time"):
        if name in chosen:
            _require_numbers(file, name, wanted[name][0] or name, chosen[name])
    return pa.table(chosen)


def _require_numbers(file: Path, name: str, column: str, values: pa.ChunkedArray) -> None:
    """Words would be sorted as words, and what is missing would come last."""
    import pyarrow as pa

    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind)):
        odd = next((v for v in values.to_pylist() if not _is_number(v)), None)
        raise UserError(
            f"{file}: its {name}s hold {odd!r}: give numbers"
            + (", or dates such as 2019-12-31 23:59:59" if name == "time" else "")
            + f", or leave the column {column} out"
        )
    if values.null_count:
        row = values.is_null().to_pylist().index(True) + 1
        raise UserError(f"{file}: row {row} has no {name}: fill it in, or leave the row out")


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _words(file: Path, ids: Sequence[str], asked: str | None) -> Iterator[tuple[str, Item]]:
    """(id, title and text) of each row of a table of users or items."""
    there: list[str] = []
    for _, row in rows(file):
        if not there:
            there = list(row)
            key = next((name for name in (*ids, "id") if name in there), there[0])
            named = asked.split(",") if asked else [n for n in there if n != key]
            if missing := [n for n in named if n not in there]:
                raise UserError(f"{file}: has no column {missing[0]}{did_you_mean(missing[0], there)}")
            title = next((n for n in TITLES if n in there), named[0] if named else key)
        text = ". ".join(str(row[n]).replace("|", ", ") for n in named if row[n] not in (None, ""))
        yield str(row[key]), Item(str(row[title] or row[key]), text)
