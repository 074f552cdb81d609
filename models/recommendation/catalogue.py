"""The catalogue of prepared data: its users, items and texts as arrays, in the folder `catalogue`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open

from isobatch.core.errors import UserError
from isobatch.models.recommendation.recommendations import VECTORS_FILE, written_otherwise

CATALOGUE_FOLDER, NAMES_FILE = "catalogue", "names.json"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Users and items by number. The fields are the names of the files."""

    tokens: np.ndarray
    """Token ids of all different texts, one after the other."""
    offsets: np.ndarray
    """(texts + 1,) int64: text t is tokens[offsets[t]:offsets[t + 1]]."""
    user_text: np.ndarray
    """(users,) number of each user's text; -1 for none."""
    item_text: np.ndarray
    """(items,) number of each item's text; -1 for none."""
    counts: np.ndarray
    """(items,) number of training interactions."""
    seen: np.ndarray
    """Sorted user * items + item of every training interaction."""
    history: np.ndarray
    """(interactions,) int32 items by user and time: a user's of training first, then held-out ones."""
    starts: np.ndarray
    """(users + 1,) int64: user u had history[starts[u]:starts[u + 1]]."""
    trained: np.ndarray
    """(users,) number of each user's training interactions."""
    recent: np.ndarray
    """(windows, items) how often each item is among the latest training interactions; no window where there
    are no times, or too few interactions."""

    @classmethod
    def read(cls, folder: str | Path) -> Catalogue:
        """The catalogue of a prepared folder."""
        place = Path(folder) / CATALOGUE_FOLDER
        return cls(**{name: np.load(place / f"{name}.npy") for name in cls.__slots__})


def read_names(folder: str | Path) -> dict[str, list[str]]:
    """`users` and `items`: ids as in the data; `titles` of the items."""
    return json.loads((Path(folder) / CATALOGUE_FOLDER / NAMES_FILE).read_text())


def kept_rows(
    final: Path, folder: str | Path, sides: Iterable[str], reads_texts: bool
) -> tuple[dict[str, np.ndarray], str]:
    """(table -> the row of an earlier run for each user or item of the data, by the name that both have; how
    many these are, a line). `sides`: those with vectors of their own, of `user` and `item`.

    New ones begin with the mean (-1), or with zeros (-2) where training has nothing of them, or where their
    texts speak for them. Raises UserError where `final` has no names, where most users or interactions are
    gone, as in data of a day or cut short, or where of a side none is known and no texts are read.
    """
    before, places = _places(final, folder)
    known, found, said, fits = Catalogue.read(folder), dict[str, np.ndarray](), list[str](), True
    items = len(places["item"])
    trained = {"user": known.seen // items, "item": known.seen % items}
    for what in sides:
        rows = places[what].copy()
        kept = int((rows >= 0).sum())
        new, gone, fits = len(rows) - kept, before[what] - kept, fits and kept > 0
        said.append(f"{kept:,} {what}s carried over, {new:,} new, {gone:,} gone")
        rows[np.setdiff1d(np.flatnonzero(rows < 0), trained[what])] = -2
        found[f"{what}_bias.weight"] = rows
        found[f"{what}_ids.weight"] = np.where(rows < 0, -2, rows) if reads_texts else rows
    line = f"--from {final.parent}: {'; '.join(said)}"
    is_part = 0 < 2 * int((places["user"] >= 0).sum()) < before["user"]
    had = _vectors(final, "had")
    if had is not None and (lost := len(np.setdiff1d(had, _pairs(before, places, known)[0]))):
        line += f"; {lost:,} of its {len(had):,} interactions are not in the data"
        is_part |= len(had) < 2 * lost < 2 * len(had)  # without any it is other data
    if is_part or not (fits or reads_texts):
        way = "all interactions, not a part of them," if is_part else "data with the ids of that run,"
        raise UserError(f"{line}: give {way} or --like {final.parent}, which takes its recipe alone")
    return found, line


def _pairs(
    before: Mapping[str, int], places: Mapping[str, np.ndarray], known: Catalogue
) -> tuple[np.ndarray, np.ndarray]:
    """(n,) the data's interactions by the numbers of an earlier run, -1 for those of new users or items; (n,)
    bool: which are held out.
    """
    owner = np.repeat(np.arange(len(known.trained)), np.diff(known.starts))
    user, item = places["user"][owner].astype(np.int64), places["item"][known.history]
    pairs = np.where((user >= 0) & (item >= 0), user * before["item"] + item, -1)
    return pairs, np.arange(len(owner)) - known.starts[owner] >= known.trained[owner]


def _vectors(final: Path, name: str) -> np.ndarray | None:
    """An array of an earlier run; None where it wrote none."""
    if not (final / VECTORS_FILE).is_file():
        return None
    with safe_open(final / VECTORS_FILE, "np") as file:
        return file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118, an object without `in`


def trained_before(final: Path, folder: str | Path) -> str:
    """A line on how many of the data's held-out interactions the run in `final` was trained on; "" where it
    was on none, or does not say which pairs it held out.
    """
    (before, places), known = _places(final, folder), Catalogue.read(folder)
    pairs, is_held_out = _pairs(before, places, known)
    had, held_out = (_vectors(final, name) for name in ("had", "held_out"))
    if had is None or held_out is None:
        return ""
    learnt = np.setdiff1d(had, held_out)
    same = int(np.isin(pairs[is_held_out], learnt).sum())
    said = f"it was trained on {same:,} of the {is_held_out.sum():,} interactions that are held out now"
    way = "figures flatter it, but for what was bought again: keep its --split, and hold out in both"
    return f"--from {final.parent}: {said}, so that {way}" if same else ""


def _places(final: Path, folder: str | Path) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Of `user` and `item`: (how many an earlier run has, the number there of each of the data, or -1).

    Raises UserError where `final` has no names, or most ids are written otherwise than there.
    """
    if not (final / NAMES_FILE).is_file():
        raise UserError(f"--from {final.parent}: has no {NAMES_FILE} of its users and items: put final/ back")
    before, now = json.loads((final / NAMES_FILE).read_text()), read_names(folder)
    counts, places = dict[str, int](), dict[str, np.ndarray]()
    for what in ("user", "item"):
        numbers = {name: number for number, name in enumerate(before[f"{what}s"])}
        new = (name for name in now[f"{what}s"] if name not in numbers)
        lost = [(name, there) for name in new if (there := written_otherwise(name, numbers))]
        if 2 * len(lost) > len(now[f"{what}s"]):
            said = f"{len(lost):,} {what}s are written otherwise there, as {lost[0][1]} for {lost[0][0]}"
            raise UserError(f"--from {final.parent}: {said}: write them alike, as text with their zeros")
        counts[what] = len(before[f"{what}s"])
        places[what] = np.array([numbers.get(name, -1) for name in now[f"{what}s"]], np.int64)
    return counts, places
