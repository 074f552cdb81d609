"""Interactions of users with items: numbered, without repeats, split; the texts of both are tokenized.

A sample is a pair (user, item). The texts and names of users and items, the counts of items, and the pairs
of each user lie in the folder `catalogue` beside the splits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.data import corpora, tokenizers
from isobatch.data.base import TEST, WEIGHT, Columns, Ragged, fingerprint, save, save_array
from isobatch.data.digests import file_hash
from isobatch.data.interactions import demo, formats, movielens
from isobatch.data.interactions.log import MISSING, are_in, draw_eval_negatives, pair_keys
from isobatch.data.interactions.log_splits import LogSplits, Numbering, read_log, renumbered
from isobatch.data.tokenized import TOKENIZER_FILE, TokenizedData, path_of

CATALOGUE, NAMES_FILE = "catalogue", "names.json"
"""Folder beside the splits, and its file of ids and titles (read by models/recommendation/catalogue.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InteractionOptions:
    """The fields of interactions."""

    split: Literal["leave-one-out", "last", "time", "users", "given", "none"] | None = None
    """leave-one-out: a user's last is test, the last but one valid. last: a user's last is test, all before
    is trained on. time: the last tenth of all is test, the tenth before valid. users: the last of a fifth of
    the users, of whom nothing is trained on. none: all are trained on, and nothing is measured. By default
    given where the files are split, else leave-one-out."""
    test_input: Literal["all", "train"] = "all"
    """What is known of a user in the test: all that the user had before, or that without the validation item,
    as in the NCF paper."""
    eval_negatives: int = 0
    """Rank each held-out item against so many drawn ones too, beside the ranking among all; where files name
    such items, theirs are taken."""
    repeats: Literal["once", "all"] = "once"
    """once: a pair that is repeated counts once, at its last time, and what a user had is no candidate. all:
    repeats stay, and what a user had may be held out again and stays among the candidates."""
    samples: Literal["pairs", "sequences"] = "pairs"
    """What is trained on: pairs of a user and an item, or each user's last --max-length + 1 items in time."""
    catalogue: Literal["all", "taken"] = "all"
    """all: every item of the items' table is ranked and recommended. taken: those with an interaction."""
    without_items: str | None = None
    """Ids of what is no product, as shipping, with commas between them: its rows are left out."""
    min_rating: float = 0.0
    """Ratings below do not count as interactions."""
    user_column: str | None = None
    """The column of users; by default user_id, customer_no, client or the like. Of sequences 1 (the
    first) or none."""
    item_column: str | None = None
    """The column of items; by default item_id, sku, article or the like. A cell may hold several: a|b|c, or
    a list."""
    rating_column: str | None = None
    """The column of ratings; by default rating, score or stars. none: it is not read."""
    time_column: str | None = None
    """The column of times; by default timestamp, date, order_date or the like. none: it is not read."""
    quantity_column: str | None = None
    """The column of quantities; by default quantity, qty, amount or the like. One of 0 or less is a return:
    what came back whole was not taken. none: it is not read."""
    order_column: str | None = None
    """The column of orders; by default order_id, invoice, Auftragsnummer or the like. An order is held out
    whole; the column of times makes one of what a user took at one time. none: it is not read."""
    date_order: Literal["day", "month"] | None = None
    """What dates such as 3/4/2024 begin with; by default what the column shows."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the texts, where no model brings one; by default 8192."""


class Interactions(TokenizedData):
    """Interactions from MovieLens' files, files of the NCF paper's protocol, tables, or the demo.

    Columns: `user`, `item` (n,) int32. Held-out splits also have `inputs` (n,) int32, how many of the user's
    interactions in time are known, and where negatives were asked for or the data names them `rivals` (n,
    negatives) int32, those that each item is ranked against; -1 stands for none. Of --samples sequences
    training rows have `user`, `items`, int32 in time of each row, and `target.weight` (n,), how many of these
    follow another.
    """

    Options: ClassVar[type] = InteractionOptions
    version: ClassVar[int] = 11
    cache_name: ClassVar[str] = "data.interactions.Interactions"
    demo_vocabulary_size: ClassVar[int] = 512

    def check(self) -> None:
        self._tokenizer_source()
        options = self.options
        if options.eval_negatives < 0:
            typed = f"--eval-negatives {options.eval_negatives}"
            raise UserError(f"{typed}: must be 0, which draws none, or more")
        path = path_of(self.recipe.data)
        if path is not None:
            for file in self._tables(path):
                if not file.is_file():
                    alone = self._tables(path)[0]
                    way = f"; --data {alone} reads the interactions alone" if alone.is_file() else ""
                    raise UserError(f"--data {path}: there is no {file.name}{way}")
            if path.is_dir() and not self._folder_format(path):
                formats.refuse_twins(path, self._tables(path))
        elif self.recipe.data != corpora.DEMO:
            corpora.require_dataset(self.recipe.data)
            raise UserError(f"--data {self.recipe.data}: give a folder or file; hub data has no one form")

    def _content_identity(self) -> Any:
        path = path_of(self.recipe.data)
        return corpora.DEMO if path is None else [[f.name, file_hash(f)] for f in self._tables(path)]

    def _folder_format(self, path: Path) -> formats.FolderFormat | None:
        """MovieLens' or the NCF protocol's; None for tables. Raises UserError for an unknown --format."""
        asked = self.recipe.format
        known = [*movielens.FORMATS, *dict.fromkeys(formats.TABLE_FORMATS.values()), formats.SEQUENCES]
        if asked is not None and asked not in known:
            raise UserError(f"--format {asked}: is not one of {', '.join(known)}")
        if asked is not None or path.is_file():
            return movielens.FORMATS.get(asked or "")
        return next((f for f in movielens.FORMATS.values() if any(path.glob(f.pattern))), None)

    def _tables(self, path: Path) -> list[Path]:
        folder_format = self._folder_format(path)
        return folder_format.files(path) if folder_format else formats.find_tables(path, self.recipe.format)

    def _load(self) -> formats.RawInteractions:
        """The interactions as they are in the files, or the demo."""
        path = path_of(self.recipe.data)
        if path is None:
            return demo.demo_interactions()
        if folder_format := self._folder_format(path):
            return folder_format.read(path)
        return formats.read_tables(path, self.recipe.format, self.options)

    def read(self) -> Mapping[str, Columns]:
        return self._columns(LogSplits(self._load(), self.options, self.recipe))

    def _columns(self, found: LogSplits) -> dict[str, Columns]:
        """Split -> columns. Raises UserError where no user has a sequence."""
        columns = dict(found.columns())
        if self.options.samples == "sequences":
            trained = found.logs["train"].counts("user", len(found.users))
            user = np.flatnonzero(trained > 1).astype(np.int32)
            if short := int((trained == 1).sum()):
                found.notes.append(f"{short:,} users have one item to train on, which follows none: left out")
            if not len(user):
                raise UserError(
                    f"--samples sequences: no user of {self.recipe.data} has two items to train on: train on"
                    " pairs (--preset classics, or --samples pairs)"
                )
            length = np.minimum(trained[user], self.recipe.max_length + 1)
            ends = found.starts[user] + trained[user]  # who is trained on has nothing before
            within = np.arange(length.sum()) - np.repeat(np.cumsum(length), length)
            items = Ragged.of_lengths(found.history[np.repeat(ends, length) + within], length)
            columns["train"] = {"items": items, "user": user, f"target{WEIGHT}": length - 1}
        return columns

    def prepare(self, folder: Path) -> dict[str, Any]:
        raw = self._load()
        found = LogSplits(raw, self.options, self.recipe)
        users, items = found.users, found.items
        for split, columns in self._columns(found).items():
            save(folder / split, columns)
        texts, of_users, of_items = unique_texts(raw, users, items)
        tokenizer, special = self._open_or_train_tokenizer(lambda: texts)
        tokenizer.enable_truncation(self.recipe.max_length)
        encoded, pad = tokenizer.encode_batch(texts, add_special_tokens=True), special["pad"] or 0
        tokenizer.no_truncation()
        dtype = tokenizers.token_dtype(tokenizer)
        tokens = Ragged.from_rows([np.array(e.ids or [pad], dtype) for e in encoded], pad)
        catalogue = folder / CATALOGUE
        catalogue.mkdir()
        arrays = {"tokens": tokens.values, "offsets": tokens.offsets, "user_text": of_users}
        arrays |= {"item_text": of_items, "seen": found.seen}
        arrays |= {"history": found.history, "starts": found.starts, "recent": found.recent_counts()}
        taken = found.logs["train"].counts
        arrays |= {"counts": taken("item", len(items)), "trained": taken("user", len(users))}
        for name, array in arrays.items():
            save_array(catalogue / f"{name}.npy", array)
        tokenizer.save(str(folder / TOKENIZER_FILE))
        titles = [raw.items[name].title if name in raw.items else name for name in items]
        names = {"users": users, "items": items, "titles": titles}
        (catalogue / NAMES_FILE).write_text(json.dumps(names, ensure_ascii=False))
        measured = [
            found.protocol,
            *(fingerprint(folder / split) for split in found.logs if split != "train"),
        ]
        measured += [file_hash(catalogue / name) for name in ("history.npy", "starts.npy", NAMES_FILE)]
        if missing := int((of_items == MISSING).sum()):
            found.notes.append(f"{missing:,} of {len(items):,} items have no text: their ids alone count")
        return {
            "users": len(users),
            "items": len(items),
            "protocol": found.protocol,
            "texts": len(texts),
            "text_tokens": len(tokens.values),
            "longest_text": int(tokens.lengths.max(initial=1)),
            **self._tokenizer_facts(tokenizer, special),
            "untaken": found.untaken,
            "held_out": " ".join(measured),
            "repeats": self.options.repeats == "all",
            "notes": found.notes,
        }

    def prepare_test(self, folder: Path, facts: Facts) -> Mapping[str, Any]:
        self.check()
        names, users, items, noted = self._names(facts), Numbering(), Numbering(), list[str]()
        log = read_log(self._load().splits["all"], users, items, noted)
        place = {side: {name: n for n, name in enumerate(names[side])} for side in ("users", "items")}
        of_user, of_item = (
            np.array([known.get(name, MISSING) for name in ids.names], np.int32)
            for known, ids in ((place["users"], users), (place["items"], items))
        )
        log, size = renumbered(log, of_user, of_item, self.options.min_rating), len(names["items"])
        user, item = log.user, log.item
        known = (user != MISSING) & (item != MISSING)
        if not known.any():
            raise UserError(f"--test {self.recipe.data}: no row has a user and an item that the run knows")
        keys = np.unique(pair_keys(user[known], item[known], size))
        user, item = (part.astype(np.int32) for part in np.divmod(keys, size))
        arrays = ("history", "starts", "trained")
        history, starts, trained = (np.load(Path(facts.folder) / CATALOGUE / f"{n}.npy") for n in arrays)
        inputs, once = np.diff(starts), self.options.repeats == "once"
        owner = np.repeat(np.arange(len(inputs)), inputs)
        had, position = pair_keys(owner, history, size), np.arange(len(history)) - starts[owner]
        if once:  # what the run has held out itself is not known, nor what came after it
            again = are_in(had, keys) & (position >= trained[owner])
            np.minimum.at(inputs, owner[again], position[again])
        columns = {"user": user, "item": item, "inputs": inputs[user].astype(np.int32)}
        if count := self.options.eval_negatives:
            no_rivals = np.union1d(had, keys) if once else keys
            columns["rivals"] = draw_eval_negatives(user, no_rivals, size, count)
        save(folder / TEST, columns)
        same = int(are_in(keys, np.load(Path(facts.folder) / CATALOGUE / "seen.npy")).sum())
        said = f"{same:,} of its {len(keys):,} interactions were trained on, so the figures flatter the run"
        left = f"{int((~known).sum()):,} of its {len(known):,} rows are left out: their user or item is new"
        notes = [*noted, *[said] * bool(same), *[left] * (not known.all())]
        return {"notes": notes} if notes else {}

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:
        names = self._names(facts)
        item = batch.get("item")
        if item is None:  # the last of each sequence
            item = batch["items"][np.arange(len(batch["user"])), batch["length"] - 1]
        pairs = zip(batch["user"].tolist(), item.tolist(), strict=True)
        return [f"user {names['users'][u]}, item {names['titles'][i]}" for u, i in pairs]

    def _names(self, facts: Facts) -> dict[str, list[str]]:
        """Ids of `users` and `items` by number, and `titles` of the items."""
        return json.loads((Path(facts.folder) / CATALOGUE / NAMES_FILE).read_text())


def unique_texts(
    raw: formats.RawInteractions, users: list[str], items: list[str]
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """(every different text once, number of each user's text, number of each item's); -1 for no text."""
    number: dict[str, int] = {}

    def of(text: str) -> int:
        return number.setdefault(text, len(number)) if text.strip() else MISSING

    by_user = np.array([of(raw.users.get(name, "")) for name in users], np.int32)
    by_item = np.array([of(raw.items[n].text) if n in raw.items else MISSING for n in items], np.int32)
    return list(number), by_user, by_item
