"""The catalogue of prepared data: its users, items and texts as arrays, in the folder `catalogue`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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

    @classmethod
    def read(cls, folder: str | Path) -> Catalogue:
        """The catalogue of a prepared folder."""
        place = Path(folder) / CATALOGUE_FOLDER
        return cls(**{name: np.load(place / f"{name}.npy") for name in cls.__slots__})


def read_names(folder: str | Path) -> dict[str, list[str]]:
    """`users` and `items`: ids as in the data; `titles` of the items."""
    return json.loads((Path(folder) / CATALOGUE_FOLDER / NAMES_FILE).read_text())
