"""Splits of interactions: removal of repeats, leave-one-out or by time, and negatives for evaluation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

VALIDATION_ONE_USER_IN = 5
"""Where no validation split is given, one user in this many gives a training interaction to it."""
TIME_SPLIT_ENDS = (0.8, 0.9)
"""The shares of all interactions at which train and valid end in a split by time."""
MISSING = -1
"""Stands for no item or no text."""


class InteractionArrays(NamedTuple):
    """Interactions as arrays (n,): numbers of users and items; time and rating, 0 where there are none."""

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    rating: np.ndarray

    def take(self, rows: np.ndarray) -> InteractionArrays:
        """The interactions at these indices, or where this mask is true."""
        return InteractionArrays(*(column[rows] for column in self))


def pair_keys(user: np.ndarray, item: np.ndarray, items: int) -> np.ndarray:
    """(n,) int64: a number for each pair, user * items + item."""
    return user.astype(np.int64) * items + item


def interaction_arrays(table: Any, user: np.ndarray, item: np.ndarray) -> InteractionArrays:
    """Numbered users and items with the times and ratings of a pyarrow table; dates become integers."""

    def column(name: str) -> np.ndarray:
        if name not in table.column_names:
            return np.zeros(len(user), np.int64)
        found: np.ndarray = table[name].to_numpy()
        return found.astype(np.int64) if found.dtype.kind == "M" else found

    return InteractionArrays(user, item, column("time"), column("rating"))


def drop_repeats(pairs: InteractionArrays, items: int, split: str, notes: list[str]) -> InteractionArrays:
    """Keep the latest interaction of each pair, in the order of the file; add a note of those dropped."""
    key = pair_keys(pairs.user, pairs.item, items)
    order = np.lexsort((pairs.time, key))
    last = np.append(key[order][1:] != key[order][:-1], True) if len(key) else np.empty(0, bool)
    if repeats := len(key) - int(last.sum()):
        where = "" if split == "all" else f"{split}: "
        notes.append(f"{where}{repeats:,} repeated interactions count once")
    return pairs.take(np.sort(order[last]))


def split_leave_one_out(
    pairs: InteractionArrays, notes: list[str], ties: np.ndarray | None = None
) -> dict[str, InteractionArrays]:
    """Leave-one-out: a user's last interaction is test, the last but one validation.

    Training keeps at least one: a user with two has no validation item, a user with one no test item.
    Of interactions at one time the larger of `ties` (n,) is later; without it, the later in the file.
    """
    order = np.lexsort((pairs.time, pairs.user) if ties is None else (ties, pairs.time, pairs.user))
    user = pairs.user[order]
    counts = np.bincount(user)
    end = np.cumsum(counts)
    back = end[user] - 1 - np.arange(len(user))  # 0 for a user's last
    test = (back == 0) & (counts[user] >= 2)
    valid = (back == 1) & (counts[user] >= 3)
    if single := int((counts == 1).sum()):
        notes.append(f"{single} users have one interaction: they are trained on and not evaluated")
    return {
        "train": pairs.take(np.sort(order[~(test | valid)])),
        "valid": pairs.take(order[valid]),
        "test": pairs.take(order[test]),
    }


def count_tied_users(pairs: InteractionArrays) -> int:
    """Users for whom the times do not say which interaction is the last, or the last but one."""
    order = np.lexsort((pairs.time, pairs.user))
    user, time = pairs.user[order], pairs.time[order]
    same = (user[1:] == user[:-1]) & (time[1:] == time[:-1])
    back = np.cumsum(np.bincount(user))[user] - 1 - np.arange(len(user))
    return len(np.unique(user[1:][same & (back[1:] <= 1)]))


def split_by_time(pairs: InteractionArrays, by_id: bool = False) -> dict[str, InteractionArrays]:
    """The earliest 80 % of all interactions are train, the next 10 % valid, the last 10 % test.

    Those at one time are in the order of the file, or by user and item with `by_id`.
    """
    order = np.lexsort((pairs.item, pairs.user, pairs.time) if by_id else (pairs.time,))
    first, second = (round(share * len(order)) for share in TIME_SPLIT_ENDS)
    parts = {"train": order[:first], "valid": order[first:second], "test": order[second:]}
    return {split: pairs.take(rows) for split, rows in parts.items()}


def hold_out_validation(
    parts: dict[str, InteractionArrays], notes: list[str]
) -> dict[str, InteractionArrays]:
    """Add a validation split: a random training interaction of every fifth user, if they have two or more."""
    train = parts["train"]
    any_order = np.random.Generator(np.random.PCG64(0)).permutation(len(train.user))
    order = np.lexsort((any_order, train.user))
    user = train.user[order]
    last = np.append(user[1:] != user[:-1], True)
    held_out = last & (user % VALIDATION_ONE_USER_IN == 0) & (np.bincount(user)[user] >= 2)
    notes.append("there is no validation split: one training interaction of every fifth user is it")
    return {**parts, "train": train.take(np.sort(order[~held_out])), "valid": train.take(order[held_out])}


def draw_eval_negatives(user: np.ndarray, seen: np.ndarray, items: int, count: int, seed: int) -> np.ndarray:
    """Draw, for each of `user` (n,), `count` different items that the user has not seen, uniformly.

    `seen` are sorted `pair_keys`. Returns (n, count) int32; -1 fills the rows of users with too few items.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    found = np.empty((len(user), count), np.int32)
    known = np.searchsorted(seen, (user + 1).astype(np.int64) * items) - np.searchsorted(
        seen, user.astype(np.int64) * items
    )
    has_few = items - known <= 2 * count
    for start in range(0, len(user), 1 << 14):
        rows = np.arange(start, min(start + (1 << 14), len(user)))
        rows = rows[~has_few[rows]]
        found[rows] = _draw_with_rejection(user[rows], seen, items, count, rng)
    for row in np.flatnonzero(has_few):
        first, last = np.searchsorted(seen, [user[row] * items, (user[row] + 1) * items])
        unseen = np.setdiff1d(np.arange(items), seen[first:last] - int(user[row]) * items)
        some = rng.permutation(unseen)[:count]
        found[row] = np.append(some, np.full(count - len(some), MISSING))
    return found


def _draw_with_rejection(
    user: np.ndarray, seen: np.ndarray, items: int, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Rejection sampling: draw again whatever is seen or drawn twice, until nothing is. (n, count) int32."""
    found = rng.integers(items, size=(len(user), count)).astype(np.int32)
    rows = np.arange(len(user))
    while len(rows):
        drawn = found[rows]
        key = pair_keys(np.repeat(user[rows], count), drawn.reshape(-1), items)
        position = np.minimum(np.searchsorted(seen, key), len(seen) - 1)
        bad = (seen[position] == key).reshape(drawn.shape)
        order = np.argsort(drawn, axis=1, kind="stable")
        ordered = np.take_along_axis(drawn, order, 1)
        again = np.zeros_like(bad)
        again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        np.put_along_axis(bad, order, again | np.take_along_axis(bad, order, 1), 1)
        drawn[bad] = rng.integers(items, size=int(bad.sum()))
        found[rows] = drawn
        rows = rows[bad.any(1)]
    return found
