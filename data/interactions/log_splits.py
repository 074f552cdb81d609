"""From raw interactions to splits: numbered, without repeats, each held-out one with negatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import doing
from isobatch.data.base import Columns
from isobatch.data.interactions.formats import RawInteractions
from isobatch.data.interactions.log import (
    MISSING,
    InteractionLog,
    are_in,
    draw_eval_negatives,
    drop_repeats,
    hold_out_validation,
    in_time,
    joined,
    pair_keys,
    split_by_time,
    split_last,
    split_users,
    unique_pair_keys,
    without_returns,
)
from isobatch.data.interactions.tables import Table, some_ids, whole_ids

RECENT_SHARES = (1 / 4, 1 / 16, 1 / 64)
"""Of the training interactions, the latest in which the popularity of items is counted."""
LAST = ("leave-one-out", "last", "users")
"""Splits that hold out what a user took last."""
LEAST_RECENT = 100
"""Interactions in such a window at least, ten for each place of a list of ten. With fewer most items have
none, and as equal scores count half, any item held out may then stand among the first ten of twenty."""


class Numbering:
    """Numbers ids as they come; their final numbers follow from the names of all."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """The ids by provisional number."""
        return whole_ids(self._place)

    def codes(self, column: Any) -> np.ndarray:
        """(n,) int32 provisional numbers of a pyarrow array; MISSING for an empty value."""
        coded, place = column.dictionary_encode(), self._place
        names = ["" if v is None or v != v else str(v).strip() for v in coded.dictionary.to_pylist()]
        of = [place.setdefault(name, len(place)) if name else MISSING for name in (*names, "")]
        return np.array(of, np.int32)[coded.indices.fill_null(len(names)).to_numpy()]

    def finish(self, named: Iterable[str] = (), out: Collection[str] = ()) -> tuple[list[str], np.ndarray]:
        """(ids in order, `named` too, none of `out`; (provisional numbers,) int32 places or MISSING)."""
        own = self.names
        names = [name for name in dict.fromkeys((*own, *named)) if name not in out]
        names.sort(key=(lambda n: (int(n), n)) if all(n.isdecimal() for n in names) else str)
        place = {name: number for number, name in enumerate(names)}
        return names, np.array([place.get(name, MISSING) for name in own], np.int32)


def read_log(table: Table, users: Numbering, items: Numbering, notes: list[str]) -> InteractionLog:
    """The interactions with provisional numbers of users and items, without returns. Raises UserError."""
    doing("reading interactions")
    parts: dict[str, list[np.ndarray]] = {"user": [], "item": []}
    numbered = {"user": users, "item": items, "order": Numbering()}
    for batch in table.batches():
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            ids = numbered.get(name)
            values = ids.codes(column) if ids else column.to_numpy(zero_copy_only=False)
            parts.setdefault(name, []).append(values.astype(np.int64) if values.dtype.kind == "M" else values)
    empty = np.empty(0, np.int32)
    log = InteractionLog({name: np.concatenate(parts.pop(name) or [empty]) for name in [*parts]})
    for name in ("user", "item"):
        if lacking := int((log.columns[name] == MISSING).sum()):
            said = f"{Path(table.name).name}: {lacking:,} of {len(log):,} rows have no {name}: left out"
            if lacking == len(log):
                raise UserError(f"{said}, so that none is left: --{name}-column says where they are")
            notes.append(said)
            log = log.take(log.columns[name] != MISSING)
    return without_returns(log, Path(table.name).name, notes)


def renumbered(
    log: InteractionLog, users: np.ndarray, items: np.ndarray, min_rating: float
) -> InteractionLog:
    """The log with final numbers, without ratings, and without interactions rated below `min_rating`."""
    columns = {**log.columns, "user": users[log.user], "item": items[log.item]}
    rating = columns.pop("rating", None)
    found = InteractionLog(columns)
    return found if rating is None else found.take(rating >= min_rating)


class LogSplits:
    """The splits of interactions, ids by number, and what is known of them all. Raises UserError."""

    def __init__(self, raw: RawInteractions, options: Any, recipe: Recipe) -> None:
        """`options`: InteractionOptions."""
        self.options, self.recipe, self.negatives = options, recipe, raw.negatives
        self.notes = raw.notes
        parts, self.has_times = self._read(raw)
        self.method = options.split or ("given" if "train" in parts else "leave-one-out")
        self.before: list[InteractionLog] = []
        """What held-out users had, where it is no training data."""
        self.logs = self._split(parts)
        self.has_orders = self.method in LAST and "order" in self.logs["train"].columns
        """Whether what a user took together is held out together."""
        self._require_held_out()
        self.seen = unique_pair_keys([self.logs["train"]], len(self.items))
        """The `pair_keys` of the training interactions, sorted, each once."""
        self.history, self.starts = self._in_time()
        """(interactions,) items by user and time; (users + 1,) where those of each user start."""
        taken = np.bincount(self.history, minlength=len(self.items))
        self.untaken = int((taken == 0).sum()) if self.negatives is None else 0
        """Items without any interaction that held-out ones are ranked against all the same."""
        self._leave_out_users_with_all_items()
        self.notes += self._split_notes()

    @property
    def protocol(self) -> str:
        """How the data is split, what is known of a user, and what each held-out item is ranked against."""
        options, repeats = self.options, self.options.repeats == "all"
        said = [self.method + ", whole orders" * self.has_orders]
        said += ["test input train"] if options.test_input == "train" and "valid" in self.logs else []
        said += ["repeats all"] if repeats else []
        if self.negatives is not None:
            rivals = f"{self.negatives.shape[1]} negatives of the data"
        elif options.eval_negatives:
            rivals = f"{options.eval_negatives} negatives"
        else:
            rivals = "all items" if repeats else "all items that a user had not"
        return ", ".join([*said, rivals])

    def _read(self, raw: RawInteractions) -> tuple[dict[str, InteractionLog], bool]:
        """(the splits that the data has, without repeats; whether there are times)"""
        users, items = Numbering(), Numbering()
        logs = {split: read_log(table, users, items, self.notes) for split, table in raw.splits.items()}
        given = [] if self.negatives is None else [str(n) for n in np.unique(self.negatives)]
        self.users, of_users = users.finish()
        described = raw.items if self.options.catalogue == "all" else ()
        out = {name.strip() for name in (self.options.without_items or "").split(",") if name.strip()}
        self.items, of_items = items.finish([*described, *given], out)
        rows, counts = Counter[str](), np.sum([log.counts("item", len(of_items)) for log in logs.values()], 0)
        for name, count in zip(items.names, counts.tolist(), strict=True):  # 3 and 3.0 have one name
            rows[name] += count
        left = "".join(f", {name} ({rows.pop(name, 0):,} rows)" for name in sorted(out))
        self.notes += [f"--without-items leaves out {left[2:]}"] * bool(out)
        self.notes += join_notes("users", Counter(users.names), raw.users)
        self.notes += join_notes("items", rows, raw.items)
        least = self.options.min_rating
        if least > 0 and any("rating" not in log.columns for log in logs.values()):
            raise UserError(f"--min-rating {least}: {self.recipe.data} has no ratings")
        has_times = "time" in next(iter(logs.values())).columns
        numbered = {s: renumbered(log, of_users, of_items, least) for s, log in logs.items()}
        numbered = {s: log.take(log.item != MISSING) for s, log in numbered.items()}
        if below := rows.total() - sum(map(len, numbered.values())):
            if below == rows.total():
                raise UserError(f"--min-rating {least:g}: all {below:,} ratings are below: give a lower one")
            low = f"{below:,} of {rows.total():,} interactions are rated below --min-rating {least:g}"
            self.notes.append(f"{low}: left out")
        return {s: self._without_repeats(log, s) for s, log in numbered.items()}, has_times

    def _without_repeats(self, log: InteractionLog, split: str) -> InteractionLog:
        return log if self.options.repeats == "all" else drop_repeats(log, len(self.items), split, self.notes)

    def _split(self, parts: dict[str, InteractionLog]) -> dict[str, InteractionLog]:
        data, method = self.recipe.data, self.method
        given = "train" in parts
        if method == "none":
            return {"train": self._without_repeats(joined(parts.values()), "all") if given else parts["all"]}
        if method == "given":
            if not given:
                raise UserError(f"--split given: {data} has no train file: name them train, valid and test")
            return parts if "valid" in parts else hold_out_validation(parts, self.notes)
        if given:
            raise UserError(f"--split {method}: {data} is split already: leave it out")
        if method == "time":
            if not self.has_times:
                raise UserError(f"--split time: {data} has no times (see --time-column)")
            return split_by_time(parts["all"])
        if not self.has_times:
            self.notes.append("there are no times: a user's last interaction is the last in the file")
        if method == "users":
            found, before = split_users(parts["all"])
            self.before = [before]
            return found
        return split_last(parts["all"], ["test"] if method == "last" else ["test", "valid"])

    def _require_held_out(self) -> None:
        """Leave empty splits out. Raises UserError where none, or nothing to train on, is left."""
        data, why = self.recipe.data, "no user has enough interactions"
        why = {"time": "all are at one time or too few", "given": "its file holds none"}.get(self.method, why)
        full = [split for split, log in self.logs.items() if len(log)]
        if self.method not in ("given", "none") and ("train" not in full or len(full) < 2):
            said = f"--split {self.method}: nothing of {data} can be held out, as {why}"
            raise UserError(f"{said}: choose another split, or none, which measures nothing")
        if "train" not in full:
            raise UserError(f"--data {data}: no interactions are left to train on")
        for split in [split for split in self.logs if split not in full]:
            self.notes.append(f"{split}: nothing can be held out for it, as {why}")
            del self.logs[split]

    def _in_time(self) -> tuple[np.ndarray, np.ndarray]:
        """Training comes before validation, and that before the test, whatever the times say."""
        ordered = (self.logs[split] for split in ("train", "valid", "test") if split in self.logs)
        parts = [*self.before, *ordered]
        whole = joined(parts)
        of_part = np.repeat(np.arange(len(parts)), [len(log) for log in parts])
        order = in_time(whole)
        order = order[np.lexsort((of_part[order], whole.user[order]))]  # stable
        user, item, time = whole.user[order], whole.item[order], whole.time[order]
        if self.has_orders:
            self.notes.append("a user's last order is held out whole (--order-column none: its last item)")
        elif self.has_times and self.method in LAST:
            out = of_part[order] > len(self.before)
            tied = out[1:] & (user[1:] == user[:-1]) & (time[1:] == time[:-1]) & (item[1:] != item[:-1])
            if some := len(np.unique(user[1:][tied])):
                of = f"of {some:,} of {len(np.unique(user[out])):,} held-out users the last items are tied"
                way = "counts as the later; --order-column, perhaps that of times, holds an order out whole"
                self.notes.append(f"{of} (one time): the larger id {way}")
        return item, np.append(0, np.cumsum(whole.counts("user", len(self.users))))

    def _inputs(self, split: str) -> np.ndarray:
        """(users,) how many of each user's interactions, from the first on, are the input for this split."""
        known = [*self.before, *(log for name, log in self.logs.items() if name in self._known_splits(split))]
        return joined(known).counts("user", len(self.users))

    def _known_splits(self, split: str) -> tuple[str, ...]:
        """The splits that are known of a user in this one."""
        return ("train", "valid") if split == "test" and self.options.test_input == "all" else ("train",)

    def _no_rivals(self) -> dict[str, np.ndarray]:
        """Held-out split -> sorted `pair_keys` of what none of its items is ranked against: all that the user
        had; where repeats stay, what the user has from then on.
        """
        held_out, items = [split for split in self.logs if split != "train"], len(self.items)
        if self.options.repeats == "once" and held_out:
            return dict.fromkeys(held_out, unique_pair_keys([*self.before, *self.logs.values()], items))
        known = {split: self._known_splits(split) for split in held_out}
        later = {s: [log for name, log in self.logs.items() if name not in known[s]] for s in held_out}
        return {split: unique_pair_keys(logs, items) for split, logs in later.items()}

    def _leave_out_users_with_all_items(self) -> None:
        """Nothing is left that their held-out items could be ranked against, unless the data names it."""
        users, items = len(self.users), len(self.items)
        self.no_rivals = self._no_rivals()
        held_out = [s for s in self.logs if s == "valid" or (s == "test" and self.negatives is None)]
        for split in held_out:
            keys = self.no_rivals[split]
            has_all = np.diff(np.searchsorted(keys, np.arange(users + 1) * items)) == items
            kept = ~has_all[self.logs[split].user]
            self.logs[split] = self.logs[split].take(kept)
            if out := int((~kept).sum()):
                self.notes.append(
                    f"{split}: {out:,} of {len(kept):,} held-out interactions are of users who took all"
                    " items: left out, as none is left to rank against"
                )
        if self.no_rivals and not any(len(self.logs[split]) for split in self.no_rivals):
            raise UserError(
                f"--data {self.recipe.data}: each held-out user took all {items:,} items, so that none is"
                " left to rank against: add those that nobody took (a table items), or give --split none"
            )
        self.logs = {split: log for split, log in self.logs.items() if len(log)}

    def _split_notes(self) -> Iterator[str]:
        """Notes on held-out users and items that training lacks, and on pairs that are in training too."""
        if self.method == "none":
            yield "--split none: all interactions are trained on, so nothing is held out to measure by"
        elif self.untaken:
            lifted = ", which lifts hr and ndcg, popularity's too" if self.options.eval_negatives else ""
            alone = f"{self.untaken:,} of {len(self.items):,} items have no interaction"
            yield f"{alone} and are ranked all the same{lifted}: --catalogue taken leaves them out"
        counts = [("users", "user", len(self.users)), ("items", "item", len(self.items))]
        known = {column: self.logs["train"].counts(column, most) > 0 for _, column, most in counts}
        for split, log in self.logs.items():
            if split != "train" and len(log):
                for what, column, most in counts:
                    there = log.counts(column, most) > 0
                    if new := int((there & ~known[column]).sum()):
                        yield f"{split}: {new:,} of its {what} are in no training interaction"
                if same := int(are_in(pair_keys(log.user, log.item, len(self.items)), self.seen).sum()):
                    yield f"{split}: {same:,} of {len(log):,} interactions are in train too"

    def recent_counts(self) -> np.ndarray:
        """(windows, items) how often each item is among the latest training interactions; no window where
        there are no times, or fewer than LEAST_RECENT interactions in it.
        """
        train, items = self.logs["train"], len(self.items)
        latest = train.item[np.argsort(train.time, kind="stable")[::-1]]
        sizes = [round(share * len(train)) for share in RECENT_SHARES if self.has_times]
        counts = [np.bincount(latest[:size], minlength=items) for size in sizes if size >= LEAST_RECENT]
        return np.array(counts, np.int64).reshape(-1, items)

    def columns(self) -> Mapping[str, Columns]:
        """Split -> `user`, `item`, and of a held-out split `inputs` and perhaps `rivals`."""
        found: dict[str, dict[str, Any]] = {}
        for split, log in self.logs.items():
            found[split] = {"user": log.user, "item": log.item}
            if split != "train":
                found[split]["inputs"] = self._inputs(split)[log.user].astype(np.int32)
                if self.options.eval_negatives or (split == "test" and self.negatives is not None):
                    found[split]["rivals"] = self._rivals(split, log)
        return found

    def _rivals(self, split: str, log: InteractionLog) -> np.ndarray:
        """(n, negatives) int32: what each held-out item is ranked against; -1 for none."""
        if split == "test" and self.negatives is not None:
            given = self.negatives
            if len(given) != len(log):
                why = "some test rows are the same, or below --min-rating"
                raise UserError(f"--data {self.recipe.data}: {why}")
            index = {name: number for number, name in enumerate(self.items)}
            named, where = np.unique(given, return_inverse=True)
            return np.array([index.get(str(n), MISSING) for n in named], np.int32)[where.reshape(given.shape)]
        count = self.options.eval_negatives
        drawn = draw_eval_negatives(log.user, self.no_rivals[split], len(self.items), count)
        if short := int((drawn == MISSING).any(1).sum()):
            few = f"{split}: {short} users have fewer than {count} unseen items"
            self.notes.append(f"{few}: theirs are ranked against those there are")
        return drawn


def join_notes(what: str, own: Counter[str], described: Collection[str]) -> Iterator[str]:
    """What the ids of interactions and those of the table of texts look like, where few are equal; the items
    that the table lacks. `own`: id -> its rows.
    """
    alone = [name for name in own if name not in described]
    bare = {name.lstrip("0"): name for name in described}
    if lost := [name for name in alone if name.lstrip("0") in bare]:
        pair = f"{lost[0]} and {bare[lost[0].lstrip('0')]}: write them alike"
        yield f"{len(lost):,} {what} differ from those in the table of {what} by zeros in front ({pair})"
    elif described and 2 * len(alone) > len(own):
        others = set(described).difference(own)
        there = some_ids(name for name in described if name in others)
        yield (
            f"{len(own) - len(alone):,} of {len(own):,} {what} with interactions are in the table of {what}:"
            f" ids such as {some_ids(alone)} are not" + f", and the table has {there}" * bool(there)
        )
    elif described and alone and what == "items":
        alone.sort(key=own.__getitem__, reverse=True)
        most = ", ".join(f"{name} ({own[name]:,} of {own.total():,} rows)" for name in alone[:3])
        most += f" and {len(alone) - 3:,} more" * (len(alone) > 3)
        yield f"not in the table of items: {most}: what is no product, --without-items {alone[0]} leaves out"
