"""A log of interactions in the order of the file, and how it is split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np


class InteractionLog:
    """Columns (n,) by name: `user` and `item` int32, and perhaps `time`, `rating` and `quantity`."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self.columns = dict(columns)
        self.user, self.item = self.columns["user"], self.columns["item"]

    def __len__(self) -> int:
        return len(self.user)

    @property
    def time(self) -> np.ndarray:
        """(n,) of each interaction, 0 where there are no times."""
        return self.columns.get("time", np.zeros(len(self), np.int64))

    def take(self, rows: np.ndarray) -> InteractionLog:
        """The interactions at these indices, or where this mask is true."""
        return InteractionLog({name: values[rows] for name, values in self.columns.items()})

    def counts(self, column: str, most: int) -> np.ndarray:
        """(most,) int64: interactions of each user or item."""
        return np.bincount(self.columns[column], minlength=most)


USERS_HELD_OUT = 0.1
"""The shares of users that are valid, and that are test, in a split by users."""
VALIDATION_ONE_USER_IN = 5
"""Where no validation split is given, one user in this many gives a training interaction to it."""
TIME_SPLIT_ENDS = (0.8, 0.9)
"""The shares of all interactions at which train and valid end in a split by time."""
MISSING = -1
"""Stands for no item or no text."""
EVAL_NEGATIVES_SEED = 0
"""Fixed: runs with different seeds rank against the same items, so that their metrics can be compared."""


def pair_keys(user: np.ndarray, item: np.ndarray, items: int) -> np.ndarray:
    """(n,) int64: a number for each pair, user * items + item."""
    return user.astype(np.int64) * items + item


def drop_repeats(log: InteractionLog, items: int, split: str, notes: list[str]) -> InteractionLog:
    """Keep the latest interaction of each pair, in the order of the file; add a note of those dropped."""
    key = pair_keys(log.user, log.item, items)
    order = np.lexsort((log.time, key))
    kept = np.zeros(len(log), bool)
    kept[order[_ends_run(key[order])]] = True
    if repeats := len(log) - int(kept.sum()):
        where = "" if split == "all" else f"{split}: "
        latest = "at its last time" if "time" in log.columns else "where it is last in the file"
        notes.append(f"{where}{repeats:,} repeated interactions count once, each {latest}")
    return log.take(kept)


def without_returns(log: InteractionLog, name: str, notes: list[str]) -> InteractionLog:
    """The log without quantities, rows of 0 or less, and pairs of which nothing is left; a note says so."""
    quantity = log.columns.pop("quantity", np.ones(len(log)))
    if (back := quantity <= 0).any():
        _, pair = np.unique(pair_keys(log.user, log.item, int(log.item.max()) + 1), return_inverse=True)
        kept = np.bincount(pair, quantity)[pair] > 0
        gone = f"{int((~kept & ~back).sum()):,} that were returned whole are left out with them"
        count = f"{int(back.sum()):,} of {len(log):,} rows"
        notes.append(f"{name}: {count} are returns (quantity 0 or less): {gone}")
        return log.take(kept & ~back)
    return log


def _ends_run(values: np.ndarray) -> np.ndarray:
    """(n,) bool: whether the next of these sorted values is another."""
    return np.append(values[1:] != values[:-1], True) if len(values) else np.empty(0, bool)


def in_time(log: InteractionLog) -> np.ndarray:
    """(n,) the rows of a user after those of the user before, each user's in time.

    Of interactions at one time that of the larger item is later, those of an order together; without times
    the later in the file is.
    """
    ties = [log.columns[name] for name in ("item", "order") if name in log.columns and "time" in log.columns]
    return np.lexsort((*ties, log.time, log.user))


def split_last(log: InteractionLog, held_out: Sequence[str]) -> dict[str, InteractionLog]:
    """A user's last interaction is `held_out[0]`, the last but one `held_out[1]`, if there are two; where
    there are orders, all of an order.

    Training keeps at least one: a user with two has one that is held out, a user with one has none.
    """
    order = in_time(log)
    user = log.user[order]
    ends = _ends_run(user) | _ends_run(log.columns.get("order", np.arange(len(log)))[order])
    counts = np.bincount(user, ends).astype(np.int64)
    back = np.cumsum(counts)[user] - 1 - (np.cumsum(ends) - ends)  # 0 for a user's last
    chosen = {split: (back == n) & (counts[user] >= n + 2) for n, split in enumerate(held_out)}
    train = np.sort(order[~np.logical_or.reduce([*chosen.values()])])
    parts = {split: log.take(order[rows]) for split, rows in reversed(chosen.items())}
    return {"train": log.take(train), **parts}


def split_users(log: InteractionLog) -> tuple[dict[str, InteractionLog], InteractionLog]:
    """Of a tenth of the users with two interactions or more the last is valid, of another tenth test, each at
    least one user; (the splits, what these users had before). None of theirs is trained on.
    """
    counts = np.bincount(log.user)
    users = np.random.Generator(np.random.PCG64(0)).permutation(np.flatnonzero(counts >= 2))
    each = max(1, round(USERS_HELD_OUT * len(users))) if len(users) > 2 else 0
    split_of = np.zeros(len(counts), np.int8)
    split_of[users[: 2 * each]] = np.repeat((1, 2), each)
    parts, before = {"train": log.take(split_of[log.user] == 0)}, []
    for number, split in enumerate(("valid", "test"), 1):
        found = split_last(log.take(split_of[log.user] == number), [split])
        before.append(found["train"])
        parts[split] = found[split]
    return parts, joined(before)


def joined(logs: Iterable[InteractionLog]) -> InteractionLog:
    """All of them, one after the other, with the columns that each has."""
    each = [log.columns for log in logs]
    shared = [name for name in each[0] if all(name in columns for columns in each)]
    return InteractionLog({name: np.concatenate([columns[name] for columns in each]) for name in shared})


def split_by_time(log: InteractionLog) -> dict[str, InteractionLog]:
    """The earliest 80 % of all interactions are train, the next 10 % valid, the last 10 % test.

    Those at the time of a cut come after it, so that no time is in two splits.
    """
    order = np.lexsort((log.item, log.user, log.time))
    times = log.time[order]
    cuts = [times[min(round(share * len(log)), len(log) - 1)] for share in TIME_SPLIT_ENDS]
    parts = np.split(order, np.searchsorted(times, cuts))
    return {split: log.take(rows) for split, rows in zip(("train", "valid", "test"), parts, strict=True)}


def hold_out_validation(parts: dict[str, InteractionLog], notes: list[str]) -> dict[str, InteractionLog]:
    """Add a validation split: a random training interaction of every fifth user, if they have two or more."""
    train = parts["train"]
    any_order = np.random.Generator(np.random.PCG64(0)).permutation(len(train))
    order = np.lexsort((any_order, train.user))
    user = train.user[order]
    chosen = (user % VALIDATION_ONE_USER_IN == 0) & (np.bincount(user)[user] >= 2)
    held_out = order[_ends_run(user) & chosen]
    kept = np.ones(len(train), bool)
    kept[held_out] = False
    notes.append("there is no validation split: one training interaction of every fifth user is it")
    return {**parts, "train": train.take(kept), "valid": train.take(held_out)}


def unique_pair_keys(logs: Iterable[InteractionLog], items: int) -> np.ndarray:
    """(pairs,) int64: the `pair_keys` of all pairs of the splits, sorted, each once.

    np.unique's table of hashes takes ten times the memory (numpy 2.4).
    """
    ordered = np.sort(np.concatenate([pair_keys(log.user, log.item, items) for log in logs]))
    return ordered[_ends_run(ordered)]


def are_in(keys: np.ndarray, among: np.ndarray) -> np.ndarray:
    """(n,) bool: whether each of the keys is among these, which are sorted."""
    if not len(among):
        return np.zeros(len(keys), bool)
    return among[np.minimum(np.searchsorted(among, keys), len(among) - 1)] == keys


def draw_eval_negatives(user: np.ndarray, seen: np.ndarray, items: int, count: int) -> np.ndarray:
    """Draw, for each of `user` (n,), `count` different items that the user has not seen, uniformly.

    `seen` are sorted `pair_keys`. Returns (n, count) int32; -1 fills the rows of users with too few items.
    """
    rng = np.random.Generator(np.random.PCG64(EVAL_NEGATIVES_SEED))
    found = np.empty((len(user), count), np.int32)
    own = np.searchsorted(seen, np.add.outer(user.astype(np.int64), (0, 1)) * items)
    has_few = items - np.diff(own)[:, 0] <= 2 * count
    for start in range(0, len(user), 1 << 14):
        rows = np.arange(start, min(start + (1 << 14), len(user)))
        rows = rows[~has_few[rows]]
        found[rows] = _draw_with_rejection(user[rows], seen, items, count, rng)
    for row in np.flatnonzero(has_few):
        unseen = np.setdiff1d(np.arange(items), seen[slice(*own[row])] - int(user[row]) * items)
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
        bad = are_in(key, seen).reshape(drawn.shape)
        order = np.argsort(drawn, axis=1, kind="stable")
        ordered = np.take_along_axis(drawn, order, 1)
        again = np.zeros_like(bad)
        again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        np.put_along_axis(bad, order, again | np.take_along_axis(bad, order, 1), 1)
        drawn[bad] = rng.integers(items, size=int(bad.sum()))
        found[rows] = drawn
        rows = rows[bad.any(1)]
    return found
