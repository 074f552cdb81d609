"""A log of interactions on disk, in the order of the file; read in chunks, or user by user in buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isobatch.data.preparation.spooled_array import (
    SpooledArray,
    SpooledColumns,
    chunks_of,
    release,
    scratch_array,
    spool_to_array,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

BUCKET_ROWS = 1 << 20
"""Interactions that are sorted at once."""


class InteractionArrays(NamedTuple):
    """Interactions as arrays (n,): numbers of users and items, times (0 where there are none), and rows."""

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray
    row: np.ndarray
    """The place in the log."""

    def take(self, rows: np.ndarray) -> InteractionArrays:
        """The interactions at these indices, or where this mask is true."""
        return InteractionArrays(*(column[rows] for column in self))


class InteractionLog:
    """Columns (n,) by name: `user` and `item` int32, and perhaps `time` and `rating`."""

    def __init__(self, columns: Mapping[str, np.ndarray], folder: Path | None) -> None:
        """`folder` takes temporary files."""
        self.columns, self.folder = dict(columns), folder
        self.user, self.item = self.columns["user"], self.columns["item"]

    @classmethod
    def collect(cls, chunks: Iterable[Mapping[str, np.ndarray]], folder: Path | None) -> InteractionLog:
        """The chunks one after the other; without any, no interactions."""
        spooled = SpooledColumns(folder)
        for chunk in chunks:
            spooled.add(chunk)
        empty = {"user": np.empty(0, np.int32), "item": np.empty(0, np.int32)}
        return cls(spooled.arrays() or empty, folder)

    def __len__(self) -> int:
        return len(self.user)

    def chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """Some rows of all columns at a time."""
        for values in chunks_of(*self.columns.values()):
            yield dict(zip(self.columns, values, strict=True))

    def where(self, kept: np.ndarray) -> InteractionLog:
        """The interactions of which `kept` (n,) is true."""

        def chunks() -> Iterator[dict[str, np.ndarray]]:
            start = 0
            for chunk in self.chunks():
                mask = kept[start : start + len(chunk["user"])]
                yield {name: values[mask] for name, values in chunk.items()}
                start += len(mask)

        return self if kept.all() else InteractionLog.collect(chunks(), self.folder)

    def counts(self, column: str, most: int) -> np.ndarray:
        """(most,) int64: interactions of each user or item."""
        found = np.zeros(most, np.int64)
        for (values,) in chunks_of(self.columns[column]):
            found += np.bincount(values, minlength=most)
        return found

    def by_user(self, users: int) -> Iterator[InteractionArrays]:
        """The interactions of some users at a time, users in order, each bucket in the order of the log.

        They lie in temporary files meanwhile.
        """
        last = np.cumsum(self.counts("user", users))
        count = -(-len(self) // BUCKET_ROWS) or 1
        bucket_of = np.maximum(last - 1, 0) * count // max(1, len(self))
        time = self.columns["time"].dtype if "time" in self.columns else np.dtype(np.int64)
        dtype: Any = np.dtype([("user", np.int32), ("item", np.int32), ("time", time), ("row", np.int64)])
        spooled = [SpooledArray(dtype, self.folder) for _ in range(count)]
        start = 0
        for chunk in self.chunks():
            rows = np.zeros(len(chunk["user"]), dtype)
            for name in set(chunk) & set(rows.dtype.names):
                rows[name] = chunk[name]
            rows["row"] = np.arange(start, start + len(rows))
            start += len(rows)
            bucket = bucket_of[chunk["user"]]
            ends = np.cumsum(np.bincount(bucket, minlength=count))
            for number, part in enumerate(np.split(rows[np.argsort(bucket, kind="stable")], ends[:-1])):
                spooled[number].add(part)
        for one in spooled:
            found = one.array()
            yield InteractionArrays(*(np.array(found[name]) for name in InteractionArrays._fields))


VALIDATION_ONE_USER_IN = 5
"""Where no validation split is given, one user in this many gives a training interaction to it."""
TIME_SPLIT_ENDS = (0.8, 0.9)
"""The shares of all interactions at which train and valid end in a split by time."""
MISSING = -1
"""Stands for no item or no text."""


def pair_keys(user: np.ndarray, item: np.ndarray, items: int) -> np.ndarray:
    """(n,) int64: a number for each pair, user * items + item."""
    return user.astype(np.int64) * items + item


def drop_repeats(log: InteractionLog, users: int, items: int, split: str, notes: list[str]) -> InteractionLog:
    """Keep the latest interaction of each pair, in the order of the file; add a note of those dropped."""
    kept = np.zeros(len(log), bool)
    for pairs in log.by_user(users):
        key = pair_keys(pairs.user, pairs.item, items)
        order = np.lexsort((pairs.time, key))
        last = np.append(key[order][1:] != key[order][:-1], True) if len(key) else np.empty(0, bool)
        kept[pairs.row[order[last]]] = True
    if repeats := len(log) - int(kept.sum()):
        where = "" if split == "all" else f"{split}: "
        latest = "at its last time" if "time" in log.columns else "where it is last in the file"
        notes.append(f"{where}{repeats:,} repeated interactions count once, each {latest}")
    return log.where(kept)


def split_leave_one_out(
    log: InteractionLog, users: int, notes: list[str], by_id: bool = False
) -> dict[str, InteractionLog]:
    """Leave-one-out: a user's last interaction is test, the last but one validation.

    Training keeps at least one: a user with two has no validation item, a user with one no test item.
    Of interactions at one time the later in the file is later, or with `by_id` that of the larger item.
    """
    train, single = np.zeros(len(log), bool), 0
    held_out: dict[str, list[dict[str, np.ndarray]]] = {"valid": [], "test": []}
    for pairs in log.by_user(users):
        ties = (pairs.item,) if by_id else ()
        order = np.lexsort((*ties, pairs.time, pairs.user))
        counts = np.bincount(pairs.user)
        user = pairs.user[order]
        back = np.cumsum(counts)[user] - 1 - np.arange(len(user))  # 0 for a user's last
        test = (back == 0) & (counts[user] >= 2)
        valid = (back == 1) & (counts[user] >= 3)
        train[pairs.row[order[~(test | valid)]]] = True
        single += int((counts == 1).sum())
        for split, rows in (("valid", valid), ("test", test)):
            held_out[split].append({"user": user[rows], "item": pairs.item[order[rows]]})
    if single:
        notes.append(f"{single} users have one interaction: they are trained on and not evaluated")
    return {"train": log.where(train)} | {
        split: InteractionLog.collect(found, log.folder) for split, found in held_out.items()
    }


def in_random_order(log: InteractionLog) -> InteractionLog:
    """The interactions with times drawn at random, the same whatever the recipe's seed."""
    times = np.random.Generator(np.random.PCG64(0)).permutation(len(log))
    return InteractionLog({**log.columns, "time": times}, log.folder)


def count_tied_users(log: InteractionLog, users: int) -> tuple[int, int]:
    """(users for whom the times do not say which interaction is the last, or the last but one; all users)."""
    tied = known = 0
    for pairs in log.by_user(users):
        order = np.lexsort((pairs.time, pairs.user))
        user, time = pairs.user[order], pairs.time[order]
        same = (user[1:] == user[:-1]) & (time[1:] == time[:-1])
        back = np.cumsum(np.bincount(user))[user] - 1 - np.arange(len(user))
        tied += len(np.unique(user[1:][same & (back[1:] <= 1)]))
        known += len(np.unique(user))
    return tied, known


def split_by_time(log: InteractionLog) -> dict[str, InteractionLog]:
    """The earliest 80 % of all interactions are train, the next 10 % valid, the last 10 % test.

    Those at one time are in the order of users and items.
    """
    order = np.lexsort((log.item, log.user, log.columns["time"]))
    parts = np.split(order, [round(share * len(log)) for share in TIME_SPLIT_ENDS])
    return {
        split: InteractionLog({"user": log.user[rows], "item": log.item[rows]}, log.folder)
        for split, rows in zip(("train", "valid", "test"), parts, strict=True)
    }


def hold_out_validation(
    parts: dict[str, InteractionLog], users: int, notes: list[str]
) -> dict[str, InteractionLog]:
    """Add a validation split: a random training interaction of every fifth user, if they have two or more."""
    train = parts["train"]
    any_order = np.random.Generator(np.random.PCG64(0)).permutation(len(train))
    kept, found = np.ones(len(train), bool), []
    for pairs in train.by_user(users):
        order = np.lexsort((any_order[pairs.row], pairs.user))
        user = pairs.user[order]
        last = np.append(user[1:] != user[:-1], True) if len(user) else np.empty(0, bool)
        held_out = order[last & (user % VALIDATION_ONE_USER_IN == 0) & (np.bincount(user)[user] >= 2)]
        kept[pairs.row[held_out]] = False
        found.append({"user": pairs.user[held_out], "item": pairs.item[held_out]})
    notes.append("there is no validation split: one training interaction of every fifth user is it")
    return {**parts, "train": train.where(kept), "valid": InteractionLog.collect(found, train.folder)}


def unique_pair_keys(logs: Iterable[InteractionLog], users: int, items: int) -> np.ndarray:
    """(pairs,) int64: the `pair_keys` of all pairs of the splits, sorted, each once."""
    whole = [log for log in logs if len(log)]
    folder = whole[0].folder if whole else None
    joined = InteractionLog.collect(
        ({"user": chunk["user"], "item": chunk["item"]} for log in whole for chunk in log.chunks()), folder
    )
    keys = (_each_once(pair_keys(part.user, part.item, items)) for part in joined.by_user(users))
    return spool_to_array(keys, np.int64, folder)


def _each_once(keys: np.ndarray) -> np.ndarray:
    """The keys sorted, each once: np.unique's table of hashes takes ten times the memory (numpy 2.4)."""
    ordered = np.sort(keys)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def count_in(keys: Iterable[np.ndarray], among: np.ndarray) -> int:
    """How many of the keys are among these, which are sorted."""
    found = 0
    for some in keys if len(among) else ():
        place = np.minimum(np.searchsorted(among, some), len(among) - 1)
        found += int((among[place] == some).sum())
        release(among)
    return found


def draw_eval_negatives(
    user: np.ndarray, seen: np.ndarray, items: int, count: int, seed: int, folder: Path | None = None
) -> np.ndarray:
    """Draw, for each of `user` (n,), `count` different items that the user has not seen, uniformly.

    `seen` are sorted `pair_keys`. Returns (n, count) int32, in a temporary file in `folder`; -1 fills the
    rows of users with too few items.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    found = scratch_array((len(user), count), np.int32, folder)
    known = np.searchsorted(seen, (user + 1).astype(np.int64) * items) - np.searchsorted(
        seen, user.astype(np.int64) * items
    )
    has_few = items - known <= 2 * count
    for start in range(0, len(user), 1 << 14):
        rows = np.arange(start, min(start + (1 << 14), len(user)))
        rows = rows[~has_few[rows]]
        found[rows] = _draw_with_rejection(user[rows], seen, items, count, rng)
        release(found)
        release(seen)
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
