"""Readers of MovieLens 1M and 100K, and of the evaluation files of the NCF paper (He et al. 2017).

The codes of age, occupation and genre become words: the texts of users and items.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.package import table_beside
from isobatch.data.interactions.formats import FolderFormat, ItemText, RawInteractions
from isobatch.data.interactions.tables import Table, delimited_table, headless, read_fields, read_rows

_CODES = table_beside(__file__)
AGES: dict[str, str] = _CODES["ages"]
OCCUPATIONS: list[str] = _CODES["occupations"]
COLUMNS = ("user", "item", "rating", "time")
FILES_1M = ("ratings.dat", "users.dat", "movies.dat")
FILES_100K = ("u.data", "u.user", "u.item", "u.genre")
SEXES: dict[str, str] = _CODES["sexes"]


def _read_ml_1m(path: Path) -> RawInteractions:
    """ratings.dat, users.dat and movies.dat: fields between double colons, ISO-8859-1."""
    names = ["user", "_1", "item", "_2", "rating", "_3", "time"]
    table = delimited_table(path / "ratings.dat", headless(":", names), {name: name for name in COLUMNS})
    films = read_fields(path / "movies.dat", "::", 3)
    items = {movie: _movie_text(title, genres.split("|")) for _, (movie, title, genres) in films}
    return RawInteractions({"all": table}, _read_ml_1m_users(path / "users.dat"), items)


def _read_ml_1m_users(file: Path) -> dict[str, str]:
    """User id -> sex, age and occupation in words. Without the zip code, which is almost unique to a user."""
    found = {}
    for where, (user, sex, age, occupation, _) in read_fields(file, "::", 5):
        if not occupation.isdigit() or int(occupation) >= len(OCCUPATIONS):
            raise UserError(f"{where}: there is no occupation {occupation}")
        found[user] = ", ".join((SEXES.get(sex, sex), AGES.get(age, age), OCCUPATIONS[int(occupation)]))
    return found


def _movie_text(title: str, genres: Iterable[str]) -> ItemText:
    """The title with its article in front ("Matrix, The (1999)" -> "The Matrix (1999)"), and its genres."""
    shown = re.sub(r"^(.*), (The|A|An|Le|La|Les|Il|Das|Der|Die|El)( \(.*)?$", r"\2 \1\3", title)
    kinds = ", ".join(g for g in genres if g)
    return ItemText(shown, f"{shown}. {kinds}" if kinds else shown)


def _read_ml_100k(path: Path) -> RawInteractions:
    """u.data with tabs; u.user and u.item with bars; u.genre names the 0/1 columns of u.item."""
    table = delimited_table(path / "u.data", headless("\t", COLUMNS))
    genres = [name for _, (name, _) in read_fields(path / "u.genre", "|", 2)]
    users = {
        user: f"{SEXES.get(sex, sex)}, {age} years old, {occupation}"
        for _, (user, age, sex, occupation, _) in read_fields(path / "u.user", "|", 5)
    }
    items = {}
    for _, row in read_fields(path / "u.item", "|", 5 + len(genres)):
        flags = [name for name, flag in zip(genres, row[5:], strict=True) if flag == "1"]
        items[row[0]] = _movie_text(row[1], [g for g in flags if g != "unknown"])
    return RawInteractions({"all": table}, users, items)


def _ncf_files(path: Path) -> tuple[Path, Path, Path]:
    """The files of training, test and negatives, which may be missing."""
    negatives = next(iter(sorted(path.glob("*.test.negative"))), path / "*.test.negative")
    stem = negatives.name.removesuffix(".test.negative")
    train = next(iter(sorted(path.glob(f"{stem}.train.*"))), path / f"{stem}.train.rating")
    return train, path / f"{stem}.test.rating", negatives


def _ncf_text_files(path: Path) -> list[Path]:
    """The table of item titles, and users.dat of a folder `ml-1m` beside, if they are there."""
    folder = path.resolve()
    users = [folder.parent / "ml-1m" / "users.dat"] if "ml-1m" in folder.name else []
    return [file for file in (path / "item_map.tsv", *users) if file.is_file()]


def _read_ncf(path: Path) -> RawInteractions:
    """The NCF paper's protocol: train, one test row per user, and the 99 negatives it is ranked against."""
    train, test, negatives = _ncf_files(path)
    names, pairs = [*COLUMNS], {"user": "user", "item": "item"}
    headed = not train.open().readline()[:1].isdigit()
    width = len(train.open().readline().split("\t"))
    splits: dict[str, Table] = {
        "train": delimited_table(train, headless("\t", names[:width], int(headed)), pairs),
        "test": delimited_table(test, headless("\t", names), pairs),
    }
    found = RawInteractions(splits, negatives=_read_ncf_negatives(negatives, splits["test"]))
    for file in _ncf_text_files(path):
        if file.name == "users.dat":  # the protocol numbers users from 0, in the order of MovieLens' ids
            words = _read_ml_1m_users(file)
            found.users = {str(n): words[user] for n, user in enumerate(sorted(words, key=int))}
            continue
        named = [row for _, row in read_rows(file) if row["title"]]
        found.items = {row["ncf_item"]: _movie_text(row["title"], row["genres"].split("|")) for row in named}
    return found


def _read_ncf_negatives(file: Path, test: Table) -> np.ndarray:
    """(test rows, negatives) item ids. Raises UserError where the rows are not those of `test`."""
    import pyarrow as pa

    width = len(file.open().readline().rstrip("\n").split("\t")) - 1
    names = ["pair", *(f"n{n}" for n in range(width))]
    tables = delimited_table(file, headless("\t", names)), test
    table, tested = (pa.Table.from_batches(one.batches()) for one in tables)
    taken = zip(tested["user"].to_pylist(), tested["item"].to_pylist(), strict=True)
    if table["pair"].to_pylist() != [f"({user},{item})" for user, item in taken]:
        raise UserError(f"{file}: its rows are not those of the test file, in the same order")
    return np.stack([table[n].to_numpy() for n in names[1:]], 1)


FORMATS = {
    "ml-1m": FolderFormat("ratings.dat", lambda path: [path / name for name in FILES_1M], _read_ml_1m),
    "ml-100k": FolderFormat("u.data", lambda path: [path / name for name in FILES_100K], _read_ml_100k),
    "ncf": FolderFormat(
        "*.test.negative", lambda path: [*_ncf_files(path), *_ncf_text_files(path)], _read_ncf
    ),
}
