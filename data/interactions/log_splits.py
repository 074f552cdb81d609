"""From raw interactions to splits: numbered, without repeats, each held-out one with negatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.interactions.log import InteractionLog
from isobatch.data.interactions.reading import Numbering, read_log, renumbered
from isobatch.data.interactions.splits import (
    MISSING,
    count_in,
    count_tied_users,
    draw_eval_negatives,
    drop_repeats,
    hold_out_validation,
    in_random_order,
    pair_keys,
    split_by_time,
    split_leave_one_out,
    unique_pair_keys,
)
from isobatch.data.preparation.spooled_array import chunks_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from isobatch.core.recipe import Recipe
    from isobatch.data.base import Columns
    from isobatch.data.interactions.formats import RawInteractions

EVAL_NEGATIVES_SEED = 0
"""Fixed: runs with different seeds rank against the same items, so that their metrics can be compared."""


class LogSplits:
    """The splits of interactions, ids by number, and what is known of them all. Raises UserError."""

    def __init__(self, raw: RawInteractions, options: Any, recipe: Recipe, folder: Path | None) -> None:
        """`options`: InteractionOptions; `folder` takes temporary files."""
        self.options, self.recipe, self.negatives, self.folder = options, recipe, raw.negatives, folder
        self.notes = raw.notes
        parts, self.has_times = self._read(raw)
        self.method = options.split or ("given" if "train" in parts else "leave-one-out")
        self.logs = self._split(parts)
        if len(self.logs["train"]) == 0:
            raise UserError(f"--data {recipe.data}: no interactions are left to train on")
        sizes = len(self.users), len(self.items)
        self.seen = unique_pair_keys([self.logs["train"]], *sizes)
        """The `pair_keys` of the training interactions, sorted, each once."""
        self.had = unique_pair_keys(self.logs.values(), *sizes)
        """Those of all interactions."""
        taken = np.sum([log.counts("item", len(self.items)) for log in self.logs.values()], axis=0)
        self.untaken = int((taken == 0).sum()) if self.negatives is None else 0
        """Items without any interaction that held-out ones are ranked against all the same."""
        self.notes += self._split_notes()

    @property
    def protocol(self) -> str:
        """How the data is split, and how many negatives each held-out item is ranked against."""
        if self.negatives is None:
            return f"{self.method}, {self.options.eval_negatives} negatives"
        return f"{self.method}, {self.negatives.shape[1]} negatives of the data"

    def _read(self, raw: RawInteractions) -> tuple[dict[str, InteractionLog], bool]:
        """(the splits that the data has, without repeats; whether there are times)"""
        users, items, folder = Numbering(), Numbering(), self.folder
        logs = {split: read_log(table, users, items, folder) for split, table in raw.splits.items()}
        given = [] if self.negatives is None else [str(n) for n in np.unique(self.negatives)]
        self.users, of_users = users.finish()
        described = raw.items if self.options.catalogue == "all" else ()
        self.items, of_items = items.finish([*described, *given])
        least = self.options.min_rating
        if least > 0 and any("rating" not in log.columns for log in logs.values()):
            raise UserError(f"--min-rating {least}: {self.recipe.data} has no ratings")
        has_times = "time" in next(iter(logs.values())).columns
        for split in logs:
            numbered = renumbered(logs[split], of_users, of_items, least)
            logs[split] = drop_repeats(numbered, len(self.users), len(self.items), split, self.notes)
        return logs, has_times

    def _split(self, parts: dict[str, InteractionLog]) -> dict[str, InteractionLog]:
        data, method, users = self.recipe.data, self.method, len(self.users)
        given = "train" in parts
        if method == "none":
            return {"train": self._join(parts)}
        if method == "given":
            if not given:
                raise UserError(f"--split given: {data} has no train file")
            return parts if "valid" in parts else hold_out_validation(parts, users, self.notes)
        if given:
            raise UserError(f"--split {method}: {data} is split already: leave it out")
        if method == "random":
            return split_leave_one_out(in_random_order(parts["all"]), users, self.notes)
        if method == "time":
            if not self.has_times:
                raise UserError(f"--split time: {data} has no times (see --time-column)")
            return split_by_time(parts["all"])
        if not self.has_times:
            self.notes.append("there are no times: a user's last interaction is the last in the file")
        elif (found := count_tied_users(parts["all"], users))[0]:
            tied, known = found
            self.notes.append(
                f"{tied:,} of {known:,} users have last interactions at one time: the larger item id is"
                " the last"
            )
        return split_leave_one_out(parts["all"], users, self.notes, self.has_times)

    def _join(self, parts: dict[str, InteractionLog]) -> InteractionLog:
        """All interactions: those of the splits one after the other, where the data is split."""
        if len(parts) == 1:
            return next(iter(parts.values()))
        pairs = ({n: c[n] for n in ("user", "item")} for log in parts.values() for c in log.chunks())
        joined = InteractionLog.collect(pairs, self.folder)
        return drop_repeats(joined, len(self.users), len(self.items), "all", self.notes)

    def _split_notes(self) -> Iterator[str]:
        """Notes on held-out users and items that training lacks, and on pairs that are in training too."""
        if self.method == "none":
            yield "--split none: all interactions are trained on, so nothing is held out to measure by"
        elif self.untaken:
            yield (
                f"{self.untaken:,} of {len(self.items):,} items have no interaction and are ranked all the"
                " same, which lifts hr and ndcg, popularity's too: --catalogue taken leaves them out"
            )
        counts = [("users", "user", len(self.users)), ("items", "item", len(self.items))]
        known = {column: self.logs["train"].counts(column, most) > 0 for _, column, most in counts}
        for split, log in self.logs.items():
            if split != "train" and len(log):
                if self.method == "time":
                    held_out = int((log.counts("user", len(self.users)) > 0).sum())
                    yield f"{split}: {held_out:,} of {len(self.users):,} users have held-out interactions"
                for what, column, most in counts:
                    if new := int(((log.counts(column, most) > 0) & ~known[column]).sum()):
                        yield f"{split}: {new:,} of its {what} are in no training interaction"
                keys = (pair_keys(u, i, len(self.items)) for u, i in chunks_of(log.user, log.item))
                if same := count_in(keys, self.seen):
                    yield f"{split}: {same:,} of {len(log):,} interactions are in train too"

    def columns(self, split: str) -> Columns:
        """`user`, `item`, and of a held-out split `rivals` and `hidden`."""
        log = self.logs[split]
        pairs: Columns = {"user": log.user, "item": log.item}
        return pairs if split == "train" else {**pairs, **self._held_out_columns(split, log)}

    def _held_out_columns(self, split: str, log: InteractionLog) -> Columns:
        hidden = np.full((len(log), 1), MISSING, np.int32)
        valid = self.logs["valid"]
        if split == "test" and valid.counts("user", len(self.users)).max(initial=0) <= 1:
            of_user = np.full(len(self.users), MISSING, np.int32)
            of_user[valid.user] = valid.item
            hidden[:, 0] = of_user[log.user]
        if split == "test" and self.negatives is not None:
            return {"rivals": self._given_rivals(self.negatives, log), "hidden": hidden}
        drawn = draw_eval_negatives(
            log.user, self.had, len(self.items), self.options.eval_negatives, EVAL_NEGATIVES_SEED, self.folder
        )
        if short := sum(int((rows == MISSING).any(1).sum()) for (rows,) in chunks_of(drawn)):
            self.notes.append(
                f"{split}: {short} users have fewer than {self.options.eval_negatives} unseen items: theirs"
                " are ranked against those there are"
            )
        return {"rivals": drawn, "hidden": hidden}

    def _given_rivals(self, given: np.ndarray, log: InteractionLog) -> np.ndarray:
        """(test rows, n) int32: the items that the data names for each test row."""
        if len(given) != len(log):
            raise UserError(f"--data {self.recipe.data}: some test rows are the same, or below --min-rating")
        index = {name: number for number, name in enumerate(self.items)}
        named, where = np.unique(given, return_inverse=True)
        number = np.array([index[str(n)] for n in named], np.int32)
        found: np.ndarray = number[where].reshape(given.shape)
        return found
