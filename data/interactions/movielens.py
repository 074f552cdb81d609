"""MovieLens and the NCF paper's protocol: their files, and their codes in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.interactions.formats import Form, Found, Item
from isobatch.data.interactions.tables import fields, parsed, rows

if TYPE_CHECKING:
    import pyarrow as pa

AGES = {"1": "under 18", "18": "18 to 24", "25": "25 to 34", "35": "35 to 44", "45": "45 to 49"}
AGES |= {"50": "50 to 55", "56": "56 or older"}
OCCUPATIONS = (
    *(
        "other",
        "educator",
        "artist",
        "clerical",
        "college student",
        "customer service",
        "doctor",
        "executive",
    ),
    *("farmer", "homemaker", "K-12 student", "lawyer", "programmer", "retired", "sales", "scientist"),
    *("self-employed", "engineer", "tradesman", "unemployed", "writer"),
)
FILES_1M = ("ratings.dat", "users.dat", "movies.dat")
FILES_100K = ("u.data", "u.user", "u.item", "u.genre")
SEXES = {"F": "female", "M": "male"}


def _ml_1m(path: Path) -> Found:
    """ratings.dat, users.dat and movies.dat: fields between double colons, ISO-8859-1."""
    names = ["user", "_1", "item", "_2", "rating", "_3", "time"]
    table = parsed(path / "ratings.dat", ":", names, ["user", "item", "rating", "time"])
    return Found({"all": table}, _ml_1m_users(path / "users.dat"), _ml_1m_movies(path / "movies.dat"))


def _ml_1m_users(file: Path) -> dict[str, str]:
    """Sex, age and occupation in words; not the zip code, with which hardly two users would be alike."""
    found = {}
    for where, (user, sex, age, occupation, _) in fields(file, "::", 5):
        kind, years = _numbered(OCCUPATIONS, occupation, where), AGES.get(age, age)
        found[user] = f"{SEXES.get(sex, sex)}, {years}, {kind}"
    return found


def _numbered(words: Sequence[str], number: str, where: str) -> str:
    if not number.isdigit() or int(number) >= len(words):
        raise UserError(f"{where}: there is no occupation {number}")
    return words[int(number)]


def _ml_1m_movies(file: Path) -> dict[str, Item]:
    return {movie: _movie(title, genres.split("|")) for _, (movie, title, genres) in fields(file, "::", 3)}


def _movie(title: str, genres: Iterable[str]) -> Item:
    """A title with its article in front: "Matrix, The (1999)" is filed, "The Matrix (1999)" is read."""
    shown = re.sub(r"^(.*), (The|A|An|Le|La|Les|Il|Das|Der|Die|El)( \(.*)?$", r"\2 \1\3", title)
    kinds = ", ".join(g for g in genres if g)
    return Item(shown, f"{shown}. {kinds}" if kinds else shown)


def _ml_100k(path: Path) -> Found:
    """u.data between tabs; u.user and u.item between bars, u.genre's names for the flags of u.item."""
    table = parsed(
        path / "u.data", "\t", ["user", "item", "rating", "time"], ["user", "item", "rating", "time"]
    )
    genres = [name for _, (name, _) in fields(path / "u.genre", "|", 2)]
    users = {
        user: f"{SEXES.get(sex, sex)}, {age} years old, {occupation}"
        for _, (user, age, sex, occupation, _) in fields(path / "u.user", "|", 5)
    }
    items = {}
    for _, row in fields(path / "u.item", "|", 5 + len(genres)):
        flags = [name for name, flag in zip(genres, row[5:], strict=True) if flag == "1"]
        items[row[0]] = _movie(row[1], [g for g in flags if g != "unknown"])
    return Found({"all": table}, users, items)


def _ncf_files(path: Path) -> tuple[Path, Path, Path]:
    """train, test and negatives."""
    negatives = next(iter(sorted(path.glob("*.test.negative"))), path / "*.test.negative")
    stem = negatives.name.removesuffix(".test.negative")
    train = next(iter(sorted(path.glob(f"{stem}.train.*"))), path / f"{stem}.train.rating")
    for file in (train, path / f"{stem}.test.rating", negatives):
        if not file.is_file():
            raise UserError(f"--data {path}: there is no {file.name}")
    return train, path / f"{stem}.test.rating", negatives


def _ncf_words(path: Path) -> tuple[Path | None, Path | None]:
    """The table that names the items, and the users of MovieLens 1M in the folder beside."""
    items, users = path / "item_map.tsv", path.resolve().parent / "ml-1m" / "users.dat"
    return (items if items.is_file() else None), (
        users if users.is_file() and "ml-1m" in path.resolve().name else None
    )


def _ncf(path: Path) -> Found:
    """The NCF paper's protocol: train, one test row a user, and the 99 items it is ranked against."""
    train, test, negatives = _ncf_files(path)
    names = ["user", "item", "rating", "time"]
    headed = not train.open().readline()[:1].isdigit()
    width = len(train.open().readline().split("\t"))
    splits = {
        "train": parsed(train, "\t", names[:width], ["user", "item"], skip=int(headed)),
        "test": parsed(test, "\t", names, ["user", "item"]),
    }
    found = Found(splits, negatives=_ncf_negatives(negatives, splits["test"]))
    items, users = _ncf_words(path)
    if items is not None:
        named = [row for _, row in rows(items) if row["title"]]
        found.items = {row["ncf_item"]: _movie(row["title"], row["genres"].split("|")) for row in named}
    if users is not None:  # numbered from 0 in the order of MovieLens' numbers
        words = _ml_1m_users(users)
        found.users = {str(n): words[user] for n, user in enumerate(sorted(words, key=int))}
    return found


def _ncf_negatives(file: Path, test: pa.Table) -> np.ndarray:
    width = len(file.open().readline().rstrip("\n").split("\t")) - 1
    names = ["pair", *(f"n{n}" for n in range(width))]
    table = parsed(file, "\t", names, names)
    pairs = [f"({u},{i})" for u, i in zip(test["user"].to_pylist(), test["item"].to_pylist(), strict=True)]
    if table["pair"].to_pylist() != pairs:
        raise UserError(f"{file}: its rows are not those of the test file, in the same order")
    return np.stack([table[n].to_numpy() for n in names[1:]], 1)


FORMS = {
    "ml-1m": Form("ratings.dat", lambda path: [path / name for name in FILES_1M], _ml_1m),
    "ml-100k": Form("u.data", lambda path: [path / name for name in FILES_100K], _ml_100k),
    "ncf": Form("*.test.negative", lambda path: [*_ncf_files(path), *filter(None, _ncf_words(path))], _ncf),
}
