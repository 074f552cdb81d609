"""Interactions of users with items: numbered, without repeats, split, with the texts of both tokenized.

Samples are pairs; what is known of users and items lies in the folder `catalogue` beside the splits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import hub, tokenizers
from isobatch.data.base import Columns, Ragged, save
from isobatch.data.corpora import DEMO
from isobatch.data.interactions import demo, formats, movielens
from isobatch.data.interactions.splits import (
    NOTHING,
    Pairs,
    by_time,
    keys,
    last_out,
    pairs_of,
    rivals_of,
    unrepeated,
    validated,
)
from isobatch.data.interactions.tables import numbered
from isobatch.data.tokenized import TokenizedData
from isobatch.data.tokenizers import file_hash

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CATALOGUE, NAMES_FILE = "catalogue", "names.json"
"""Folder of arrays beside the splits, and the ids as written in it (models/recommendation/catalogue.py)."""
RIVALS_SEED = 0
"""The same whatever the recipe's seed is, so that runs with several can be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InteractionOptions:
    """The fields of interactions."""

    split: Literal["leave-one-out", "time", "given"] | None = None
    """leave-one-out: a user's last is test, the last but one valid. time: the last fifth of all. By default
    given where the files are split, else leave-one-out."""
    eval_negatives: int = 99
    """Unseen items that each held-out one is ranked against; where files name them, theirs are taken."""
    min_rating: float = 0.0
    """Ratings below do not count as interactions."""
    user_column: str | None = None
    """The column of users; by default user, user_id, userId or uid."""
    item_column: str | None = None
    """The column of items; by default item, item_id, movieId or the like."""
    rating_column: str | None = None
    """The column of ratings; by default rating, score or stars."""
    time_column: str | None = None
    """The column of times; by default timestamp, time or date."""
    user_text: str | None = None
    """The columns of the users' table that make the text; by default all but the id."""
    item_text: str | None = None
    """The columns of the items' table that make the text; by default all but the id."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the texts, where no model brings one; by default 8192."""


class Interactions(TokenizedData):
    """Interactions from MovieLens' files, the NCF protocol's, tables, or the demo.

    Columns: `user`, `item` (n,) int32; held-out splits also `rivals` (n, eval_negatives) int32, the items
    that each is ranked against, and `hidden` (n, 1), an item that full ranking leaves out; -1 is none.
    """

    Options: ClassVar[type] = InteractionOptions
    version: ClassVar[int] = 3
    cache_name: ClassVar[str] = "data.interactions.Interactions"
    demo_vocabulary_size: ClassVar[int] = 512

    def check(self) -> None:
        self._tokenizer_source()
        options = self.options
        if options.eval_negatives < 1:
            raise UserError(f"--eval-negatives {options.eval_negatives}: must be at least 1")
        path = self._data_path()
        if path is not None:
            for file in self._files(path):
                if not file.is_file():
                    raise UserError(f"--data {path}: there is no {file.name}")
        elif self.recipe.data != DEMO:
            hub.require_dataset(self.recipe.data)
            raise UserError(f"--data {self.recipe.data}: give a folder or file; hub data has no one form")

    def identity(self) -> dict[str, Any]:
        path = self._data_path()
        return {
            "data": DEMO if path is None else [[f.name, file_hash(f)] for f in self._files(path)],
            "format": self.recipe.format,
            "tokenizer": self._tokenizer_source().identity(),
            "max_length": self.recipe.max_length,
            "vocab_size": self._vocabulary_size(),
            "options": [getattr(self.options, name) for name in InteractionOptions.__slots__],
        }

    def _form(self, path: Path) -> formats.Form | None:
        """MovieLens' or the NCF protocol's; None for tables."""
        asked = self.recipe.format
        known = [*movielens.FORMS, *formats.TABLES.values()]
        if asked is not None and asked not in known:
            raise UserError(f"--format {asked}: is not one of {', '.join(known)}")
        if asked is not None or path.is_file():
            return movielens.FORMS.get(asked or "")
        return next((f for f in movielens.FORMS.values() if any(path.glob(f.pattern))), None)

    def _files(self, path: Path) -> list[Path]:
        form = self._form(path)
        return form.files(path) if form else formats.tables_in(path, self.recipe.format)

    def _found(self) -> formats.Found:
        path = self._data_path()
        if path is None:
            return demo.demo()
        if form := self._form(path):
            return form.read(path)
        o = self.options
        columns = (o.user_column, o.item_column, o.rating_column, o.time_column, o.user_text, o.item_text)
        return formats.read_tables(path, self.recipe.format, formats.Columns(*columns))

    def read(self) -> Mapping[str, Columns]:
        return self._read(self._found())[0]

    def prepare(self, folder: Path) -> dict[str, Any]:
        found = self._found()
        splits, users, items, extra = self._read(found)
        for split, columns in splits.items():
            save(folder / split, columns)
        texts, of_users, of_items = texts_of(found, users, items)
        tokenizer, special = self._open_or_train_tokenizer(
            lambda size: tokenizers.train_byte_level_bpe(texts, size)
        )
        tokens = self._tokens(tokenizer, texts, special["pad"] or 0)
        place = folder / CATALOGUE
        train = splits["train"]
        seen, had = taken([train], len(items)), taken(splits.values(), len(items))
        counts = np.bincount(np.asarray(train["item"]), minlength=len(items))
        place.mkdir()
        arrays = {"tokens": tokens.values, "offsets": tokens.offsets, "user_text": of_users}
        arrays |= {"item_text": of_items, "counts": counts.astype(np.int64), "seen": seen, "had": had}
        for name, array in arrays.items():
            np.save(place / f"{name}.npy", array)
        tokenizer.save(str(folder / "tokenizer.json"))
        titles = [found.items[name].title if name in found.items else name for name in items]
        names = {"users": users, "items": items, "titles": titles}
        (place / NAMES_FILE).write_text(json.dumps(names, ensure_ascii=False))
        notes = [*extra.pop("notes"), *_without_text(of_users, of_items)]
        return {
            **extra,
            "texts": len(texts),
            "text_tokens": len(tokens.values),
            "longest_text": int(tokens.lengths.max(initial=1)),
            "tokenizer": "tokenizer.json",
            "vocabulary": tokenizers.vocabulary_size(tokenizer),
            **special,
            "notes": notes,
        }

    def _tokens(self, tokenizer: Tokenizer, texts: list[str], pad: int) -> Ragged:
        tokenizer.enable_truncation(self.recipe.max_length)
        encoded = tokenizer.encode_batch(texts, add_special_tokens=True)
        tokenizer.no_truncation()
        kind = np.uint16 if tokenizers.vocabulary_size(tokenizer) <= 1 << 16 else np.int32
        return Ragged.from_rows([np.array(e.ids or [pad], kind) for e in encoded], pad)

    def _read(self, found: formats.Found) -> tuple[dict[str, Columns], list[str], list[str], dict[str, Any]]:
        """Columns of the splits, names of users and items, and what Facts should know."""
        tables = found.splits
        rivals = found.negatives
        by_user, users = numbered([t["user"] for t in tables.values()])
        given = [] if rivals is None else [str(n) for n in np.unique(rivals)]
        by_item, items = numbered([t["item"] for t in tables.values()], [*found.items, *given])
        notes: list[str] = []
        if self.options.min_rating > 0 and any("rating" not in t.column_names for t in tables.values()):
            raise UserError(f"--min-rating {self.options.min_rating}: {self.recipe.data} has no ratings")
        parts = {
            split: unrepeated(self._rated(pairs_of(t, u, i)), len(items), split, notes)
            for (split, t), u, i in zip(tables.items(), by_user, by_item, strict=True)
        }
        how = self.options.split or ("given" if "train" in parts else "leave-one-out")
        splits = self._split(parts, how, "time" in next(iter(tables.values())).column_names, notes)
        if len(splits["train"].user) == 0:
            raise UserError(f"--data {self.recipe.data}: no interactions are left to train on")
        notes += self._remarks(splits, len(items))
        had = taken([{"user": p.user, "item": p.item} for p in splits.values()], len(items))
        columns: dict[str, Columns] = {}
        for split, pairs in splits.items():
            held: Columns = {}
            if split != "train":
                named = rivals if split == "test" else None
                held = self._held_out(split, pairs, splits, had, items, named, notes)
            columns[split] = {"user": pairs.user, "item": pairs.item, **held}
        protocol = f"{how}, {self.options.eval_negatives if rivals is None else rivals.shape[1]} negatives"
        protocol += "" if rivals is None else " of the data"
        extra = {"users": len(users), "items": len(items), "protocol": protocol, "notes": notes}
        return columns, users, items, extra

    def _remarks(self, splits: Mapping[str, Pairs], items: int) -> Iterator[str]:
        """What given splits have that a user may not know of."""
        train = splits["train"]
        known = [np.unique(train.user), np.unique(train.item)]
        seen = taken([{"user": train.user, "item": train.item}], items)
        for split, pairs in splits.items():
            if split != "train" and len(pairs.user):
                for what, numbers, there in zip(("users", "items"), pairs, known, strict=False):
                    if new := len(np.setdiff1d(numbers, there)):
                        yield f"{split}: {new:,} of its {what} are in no training interaction"
                if same := int(np.isin(keys(pairs.user, pairs.item, items), seen).sum()):
                    yield f"{split}: {same:,} of {len(pairs.user):,} interactions are in train too"

    def _rated(self, pairs: Pairs) -> Pairs:
        return pairs.at(pairs.rating >= self.options.min_rating) if self.options.min_rating > 0 else pairs

    def _split(self, parts: dict[str, Pairs], how: str, timed: bool, notes: list[str]) -> dict[str, Pairs]:
        given = "train" in parts
        if how == "given":
            if not given:
                raise UserError(f"--split given: {self.recipe.data} has no train file")
            return parts if "valid" in parts else validated(parts, notes)
        if given:
            raise UserError(f"--split {how}: {self.recipe.data} is split already: leave it out")
        if how == "time":
            if not timed:
                raise UserError(f"--split time: {self.recipe.data} has no times (see --time-column)")
            return by_time(parts["all"])
        if not timed:
            notes.append("there are no times: a user's last interaction is the last in the file")
        return last_out(parts["all"], notes)

    def _held_out(
        self,
        split: str,
        pairs: Pairs,
        splits: Mapping[str, Pairs],
        had: np.ndarray,
        items: list[str],
        given: np.ndarray | None,
        notes: list[str],
    ) -> Columns:
        hidden = np.full((len(pairs.user), 1), NOTHING, np.int32)
        if split == "test" and len(np.unique(splits["valid"].user)) == len(splits["valid"].user):
            of_user = np.full(
                max(pairs.user.max(initial=0), splits["valid"].user.max(initial=0)) + 1, NOTHING
            )
            of_user[splits["valid"].user] = splits["valid"].item
            hidden[:, 0] = of_user[pairs.user]
        if given is not None:
            if len(given) != len(pairs.user):
                raise UserError(
                    f"--data {self.recipe.data}: some test rows are the same, or below --min-rating"
                )
            place = {name: number for number, name in enumerate(items)}
            named, where = np.unique(given, return_inverse=True)
            number = np.array([place[str(n)] for n in named], np.int32)
            return {"rivals": number[where].reshape(given.shape), "hidden": hidden}
        drawn = rivals_of(pairs.user, had, len(items), self.options.eval_negatives, RIVALS_SEED)
        if short := int((drawn == NOTHING).any(1).sum()):
            notes.append(
                f"{split}: {short} users have fewer than {self.options.eval_negatives} unseen items: theirs"
                " are ranked against those there are"
            )
        return {"rivals": drawn, "hidden": hidden}


def taken(splits: Iterable[Columns], items: int) -> np.ndarray:
    """Sorted `keys` of the pairs of splits."""
    found = [keys(np.asarray(split["user"]), np.asarray(split["item"]), items) for split in splits]
    return np.unique(np.concatenate(found))


def texts_of(
    found: formats.Found, users: list[str], items: list[str]
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Every different text once, and the number of each user's and item's; -1 for none."""
    number: dict[str, int] = {}

    def of(text: str) -> int:
        return number.setdefault(text, len(number)) if text.strip() else NOTHING

    by_user = np.array([of(found.users.get(name, "")) for name in users], np.int32)
    by_item = np.array([of(found.items[n].text) if n in found.items else NOTHING for n in items], np.int32)
    return list(number), by_user, by_item


def _without_text(users: np.ndarray, items: np.ndarray) -> list[str]:
    found = []
    for what, texts in (("users", users), ("items", items)):
        missing = int((texts == NOTHING).sum())
        if missing > 0:
            found.append(f"{missing:,} of {len(texts):,} {what} have no text: their ids alone count")
    return found
