"""Interactions as numbers: repeats, splits, and the items that a held-out one is ranked against."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

HELD_USERS = 5
"""One user in this many gives a training interaction to validation where none is given."""
TIME_SHARES = (0.8, 0.9)
"""Where train and valid end of a split by time."""
NOTHING = -1
"""In place of an item or a text."""


class Pairs(NamedTuple):
    """Interactions by number, (n,) each."""

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    rating: np.ndarray

    def at(self, rows: np.ndarray) -> Pairs:
        return Pairs(*(column[rows] for column in self))


def keys(user: np.ndarray, item: np.ndarray, items: int) -> np.ndarray:
    """(n,) int64: one number for a pair."""
    return user.astype(np.int64) * items + item


def pairs_of(table: Any, user: np.ndarray, item: np.ndarray) -> Pairs:
    def column(name: str) -> np.ndarray:
        if name not in table.column_names:
            return np.zeros(len(user), np.int64)
        found: np.ndarray = table[name].to_numpy()
        return found.astype(np.int64) if found.dtype.kind == "M" else found

    return Pairs(user, item, column("time"), column("rating"))


def unrepeated(pairs: Pairs, items: int, split: str, notes: list[str]) -> Pairs:
    """Each pair once, as it was last, in the order of the file."""
    key = keys(pairs.user, pairs.item, items)
    order = np.lexsort((pairs.time, key))
    last = np.append(key[order][1:] != key[order][:-1], True) if len(key) else np.empty(0, bool)
    if repeats := len(key) - int(last.sum()):
        where = "" if split == "all" else f"{split}: "
        notes.append(f"{where}{repeats:,} repeated interactions count once")
    return pairs.at(np.sort(order[last]))


def last_out(pairs: Pairs, notes: list[str]) -> dict[str, Pairs]:
    """A user's last is test, the last but one valid; something must stay to train on."""
    order = np.lexsort((pairs.time, pairs.user))
    user = pairs.user[order]
    counts = np.bincount(user)
    end = np.cumsum(counts)
    back = end[user] - 1 - np.arange(len(user))  # 0 for a user's last
    test = (back == 0) & (counts[user] >= 2)
    valid = (back == 1) & (counts[user] >= 3)
    if single := int((counts == 1).sum()):
        notes.append(f"{single} users have one interaction: they are trained on and not evaluated")
    return {
        "train": pairs.at(np.sort(order[~(test | valid)])),
        "valid": pairs.at(order[valid]),
        "test": pairs.at(order[test]),
    }


def by_time(pairs: Pairs) -> dict[str, Pairs]:
    order = np.argsort(pairs.time, kind="stable")
    first, second = (round(share * len(order)) for share in TIME_SHARES)
    parts = {"train": order[:first], "valid": order[first:second], "test": order[second:]}
    return {split: pairs.at(rows) for split, rows in parts.items()}


def validated(parts: dict[str, Pairs], notes: list[str]) -> dict[str, Pairs]:
    """Given splits without a valid one: some training interaction of every fifth user with two is it."""
    train = parts["train"]
    any_order = np.random.Generator(np.random.PCG64(0)).permutation(len(train.user))
    order = np.lexsort((any_order, train.user))
    user = train.user[order]
    last = np.append(user[1:] != user[:-1], True)
    held = last & (user % HELD_USERS == 0) & (np.bincount(user)[user] >= 2)
    notes.append("there is no validation split: one training interaction of every fifth user is it")
    return {**parts, "train": train.at(np.sort(order[~held])), "valid": train.at(order[held])}


def rivals_of(user: np.ndarray, seen: np.ndarray, items: int, count: int, seed: int) -> np.ndarray:
    """(n, count) int32 of different items that the users have not seen, evenly drawn; -1 where too few.

    `seen` are sorted `keys`.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    found = np.empty((len(user), count), np.int32)
    known = np.searchsorted(seen, (user + 1).astype(np.int64) * items) - np.searchsorted(
        seen, user.astype(np.int64) * items
    )
    few = items - known <= 2 * count
    for start in range(0, len(user), 1 << 14):
        rows = np.arange(start, min(start + (1 << 14), len(user)))
        rows = rows[~few[rows]]
        found[rows] = _rejected(user[rows], seen, items, count, draw)
    for row in np.flatnonzero(few):
        first, last = np.searchsorted(seen, [user[row] * items, (user[row] + 1) * items])
        unseen = np.setdiff1d(np.arange(items), seen[first:last] - int(user[row]) * items)
        some = draw.permutation(unseen)[:count]
        found[row] = np.append(some, np.full(count - len(some), NOTHING))
    return found


def _rejected(
    user: np.ndarray, seen: np.ndarray, items: int, count: int, draw: np.random.Generator
) -> np.ndarray:
    """Draws again what is seen or drawn twice, until nothing is."""
    found = draw.integers(items, size=(len(user), count)).astype(np.int32)
    rows = np.arange(len(user))
    while len(rows):
        drawn = found[rows]
        key = keys(np.repeat(user[rows], count), drawn.reshape(-1), items)
        place = np.minimum(np.searchsorted(seen, key), len(seen) - 1)
        bad = (seen[place] == key).reshape(drawn.shape)
        order = np.argsort(drawn, axis=1, kind="stable")
        ordered = np.take_along_axis(drawn, order, 1)
        again = np.zeros_like(bad)
        again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        np.put_along_axis(bad, order, again | np.take_along_axis(bad, order, 1), 1)
        drawn[bad] = draw.integers(items, size=int(bad.sum()))
        found[rows] = drawn
        rows = rows[bad.any(1)]
    return found
