"""What prepared data knows of users and items, as arrays in its folder `catalogue`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FOLDER, NAMES_FILE = "catalogue", "names.json"
SMALL_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Users and items by number."""

    tokens: np.ndarray
    """Of all different texts, end to end."""
    offsets: np.ndarray
    """(texts + 1,) int64: each text's borders in `tokens`."""
    user_text: np.ndarray
    """(users,) number of each one's text; -1 for none."""
    item_text: np.ndarray
    """(items,)"""
    counts: np.ndarray
    """(items,) training interactions."""
    seen: np.ndarray
    """Sorted user * items + item of every training interaction."""
    had: np.ndarray
    """The same of all interactions, held-out ones too."""

    @classmethod
    def read(cls, folder: str | Path) -> Catalogue:
        """From a prepared folder."""
        return cls(**{name: _array(Path(folder) / FOLDER / f"{name}.npy") for name in cls.__slots__})


def _array(file: Path) -> np.ndarray:
    """Mapped where it is large: an empty one cannot be."""
    found: np.ndarray = np.load(file, mmap_mode="r" if file.stat().st_size > SMALL_FILE_BYTES else None)
    return found


def names(folder: str | Path) -> dict[str, list[str]]:
    """Ids of users and items as written, and the items' titles."""
    found: dict[str, list[str]] = json.loads((Path(folder) / FOLDER / NAMES_FILE).read_text())
    return found
