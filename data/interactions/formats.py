"""File formats of interactions: what a format reads, and the reader of csv, tsv and parquet tables."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import UserError
from isobatch.data.interactions import tables
from isobatch.data.readers import SPLIT_NAMES, name_columns, open_parquet, require_name
from isobatch.data.tables.delimited import ATOMIC

if TYPE_CHECKING:
    import numpy as np  # noqa: TC004  heavy, and no class here has flags

TABLE_FORMATS = {".csv": "csv", ".tsv": "tsv", ".parquet": "parquet", **dict.fromkeys(ATOMIC, "tsv")}


def _spelled(*names: str) -> tuple[str, ...]:
    """The names as people write them: user_id, userId, UserId, UserID, userid, USER_ID."""
    found = [*names]
    for name in names:
        first, *rest = name.split("_")
        pascal = "".join(part.title() for part in (first, *rest))
        camel = first + "".join(part.title() for part in rest)
        found += [camel, pascal, re.sub("Id$", "ID", pascal), name.replace("_", ""), name.upper()]
    return tuple(dict.fromkeys(found))


USUAL_COLUMNS = {
    "user": """user user_id uid ncf_user customer_id customer client_id account_id member_id buyer_id
        visitor_id reviewer_id""",
    "item": """item item_id movie_id product_id ncf_item product article_id sku asin stock_code book_id
        track_id song_id artist_id game_id""",
    "rating": "rating score stars",
    "time": """timestamp time date datetime order_date ordered_at created_at purchased_at event_time
        invoice_date ts""",
}
COLUMNS = {name: _spelled(*words.split()) for name, words in USUAL_COLUMNS.items()}
"""What is read of an interaction -> the usual names of its column."""
USER_COLUMNS, ITEM_COLUMNS = COLUMNS["user"], COLUMNS["item"]
TITLE_COLUMNS = _spelled("title", "name")
UNSPLIT_STEMS = (
    *("interactions", "ratings", "log", "orders", "purchases", "transactions", "clicks", "views", "plays"),
    *("events", "reviews"),
)
"""Words in the name of a file that holds all interactions, not yet split."""
USER_STEMS, ITEM_STEMS = ("users", "customers"), ("items", "movies", "products", "articles", "books")
"""Names of the tables of texts."""


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


def find_tables(path: Path, file_format: str | None) -> list[Path]:
    """The tables of a folder (interactions or splits, users, items), or the single file `path`.

    Raises UserError where there are no interactions, or tables of several formats and none was chosen.
    """
    if path.is_file():
        return [path]
    known = [f for f in sorted(path.iterdir()) if f.suffix in TABLE_FORMATS]
    logs = [f for f in known if _split_from_name(f)]
    formats = sorted({TABLE_FORMATS[f.suffix] for f in logs})
    if file_format is None and len(formats) > 1:
        raise UserError(f"--data {path}: holds {' and '.join(formats)} files: choose with --format")
    found = [f for f in logs if TABLE_FORMATS[f.suffix] == (file_format or formats[0])]
    if not found:
        there = ", ".join(sorted(f.name for f in path.iterdir())[:6]) or "nothing"
        raise UserError(
            f"--data {path}: there is no ratings.dat, u.data or *.test.negative, and no table called"
            f" interactions, ratings or train (.csv, .tsv, .inter, .parquet); found: {there}"
        )
    return [f for f in known if f in found or _side_of(f)]


def _split_from_name(file: Path) -> str | None:
    words = re.split(r"[^a-z]+", file.stem.lower())
    if _side_of(file):
        return None
    if any(word in words for word in UNSPLIT_STEMS):
        return "all"
    found = (split for split in SPLIT_NAMES for word in words if word in (split, f"{split}ation"))
    return next(found, "all" if file.suffix == ".inter" else None)


def _side_of(file: Path) -> str | None:
    """Whose texts a table holds: users', items', or nobody's."""
    names = {"users": (*USER_STEMS, ".user"), "items": (*ITEM_STEMS, ".item")}
    return next((side for side, own in names.items() if file.stem in own or file.suffix in own), None)


def read_tables(path: Path, file_format: str | None, options: Any) -> RawInteractions:
    """Read interactions from one table, or one per split, and the texts from tables of users and items.

    Raises UserError for a missing column, missing or unreadable values, or two files of one split.
    """
    files = find_tables(path, file_format)
    notes: list[str] = []
    if path.is_file():
        return RawInteractions({"all": _open_interactions(path, options, notes)}, notes=notes)
    splits = {split: [f for f in files if _split_from_name(f) == split] for split in ("all", *SPLIT_NAMES)}
    if splits["train"]:
        splits["all"] = []
    if twice := next((fs for fs in splits.values() if len(fs) > 1), None):
        raise UserError(f"--data {path}: {twice[0].name} and {twice[1].name} are the same split: keep one")
    found = RawInteractions({}, notes=notes)
    for file in files:
        if _side_of(file) == "users":
            texts = _texts_by_id(file, USER_COLUMNS, notes)
            found.users = {key: item.text for key, item in texts.items()}
        elif _side_of(file) == "items":
            found.items = _texts_by_id(file, ITEM_COLUMNS, notes)
    found.splits = {split: _open_interactions(fs[0], options, notes) for split, fs in splits.items() if fs}
    return found


def _open_interactions(file: Path, options: Any, notes: list[str]) -> tables.Table:
    """The columns user and item, and rating and time where the table has them."""
    asked = {name: getattr(options, f"{name}_column") for name in COLUMNS}
    if file.suffix == ".parquet":
        with open_parquet(file) as table:
            names = table.schema_arrow.names
        return tables.parquet_table(file, _choose_columns(file, names, asked, notes))
    shape = tables.shape_to_stream(file, asked.values(), notes)
    ids = [name for name in (asked["user"], asked["item"], *USER_COLUMNS, *ITEM_COLUMNS) if name]
    columns = _choose_columns(file, shape.names, asked, notes)
    mark, lines = shape.dialect["delimiter"], shape.header_lines
    return tables.delimited_table(file, mark, shape.names, columns, skip=lines, ids=ids)


def _choose_columns(
    file: Path, available: list[str], asked: Mapping[str, str | None], notes: list[str]
) -> dict[str, str]:
    """user, item, rating or time -> its column in the file, which `notes` say where it is called otherwise.

    Raises UserError where one is missing.
    """
    chosen = {}
    for name, usual in COLUMNS.items():
        given = asked[name]
        column = given or next((u for u in usual if u in available), None)
        if column is None and name in ("rating", "time"):
            continue
        flag = f"--{name}-column"
        if column is None:
            wanted, has = " or ".join(usual[:3]), name_columns(available)
            raise UserError(f"{file}: has no column {wanted}; {flag} says which; it has: {has}")
        require_name(column, available, file, flag)
        chosen[name] = column
    renamed = [f"{column} as {name}" for name, column in chosen.items() if column != name]
    unread = [name for name in available if name not in chosen.values()]
    said = [f"read {', '.join(renamed)}"] if renamed else []
    said += [f"not read: {', '.join(unread[:8])}"] if unread else []
    if said and (note := f"{file.name}: {'; '.join(said)}") not in notes:
        notes.append(note)
    return chosen


def _texts_by_id(file: Path, ids: Sequence[str], notes: list[str]) -> dict[str, ItemText]:
    """Id -> title and text of a table of users or items: all columns but the id make the text.

    A note says where several rows have one id.
    """
    keys, texts = [], []
    key = title = ""
    for where, row in tables.read_rows(file):
        if not key:
            key = next((name for name in (*ids, "id") if name in row), next(iter(row)))
            if key.isdecimal() and key not in ("0", "1"):
                shown = ", ".join([*row][:4])
                raise UserError(f"{file}: its first row names no columns ({shown}): give it a header")
            others = [name for name in row if name != key]
            title = next((name for name in TITLE_COLUMNS if name in row), [*others, key][0])
        if row[key] in (None, "") or row[key] != row[key]:
            raise UserError(f"{where}: has no {key}: fill it in, or leave the row out")
        said = [str(row[n]).replace("|", ", ") for n in row if n != key and row[n] not in (None, "")]
        keys.append(str(row[key]))
        texts.append(ItemText(str(row[title] or row[key]), ". ".join(said)))
    keys = tables.whole_ids(keys)
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        several = f"{file.name}: {len(twice):,} of its ids have several rows ({tables.some_ids(twice)})"
        notes.append(f"{several}: the last is read")
    return dict(zip(keys, texts, strict=True))
