"""Interactions of users with items: numbered, without repeats, split; the texts of both are tokenized.

A sample is a pair (user, item). The texts and names of users and items, the counts of items, and the pairs
of each user lie in the folder `catalogue` beside the splits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import hub, tokenizers
from isobatch.data.base import Columns, Ragged, TextQuery, save
from isobatch.data.corpora import DEMO
from isobatch.data.interactions import demo, formats, movielens
from isobatch.data.interactions.splits import (
    MISSING,
    InteractionArrays,
    count_tied_users,
    draw_eval_negatives,
    drop_repeats,
    hold_out_validation,
    interaction_arrays,
    pair_keys,
    split_by_time,
    split_leave_one_out,
)
from isobatch.data.interactions.tables import number_ids
from isobatch.data.preparation.file_digests import file_hash
from isobatch.data.tokenized import TokenizedData

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from tokenizers import Tokenizer

    from isobatch.core.facts import Facts

CATALOGUE, NAMES_FILE = "catalogue", "names.json"
"""Folder beside the splits, and its file of ids and titles (read by models/recommendation/catalogue.py)."""
EVAL_NEGATIVES_SEED = 0
"""Fixed: runs with different seeds rank against the same items, so that their metrics can be compared."""


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
    """Interactions from MovieLens' files, files of the NCF paper's protocol, tables, or the demo.

    Columns: `user`, `item` (n,) int32. Held-out splits also have `rivals` (n, eval_negatives) int32, the
    negatives that each item is ranked against, and `hidden` (n, 1) int32, an item that full ranking leaves
    out: in test, the user's validation item. -1 stands for none.
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
            **({"rules": self.recipe.rules} if self.recipe.rules > 1 else {}),
        }

    def _folder_format(self, path: Path) -> formats.FolderFormat | None:
        """MovieLens' or the NCF protocol's; None for tables. Raises UserError for an unknown --format."""
        asked = self.recipe.format
        known = [*movielens.FORMATS, *formats.TABLE_FORMATS.values()]
        if asked is not None and asked not in known:
            raise UserError(f"--format {asked}: is not one of {', '.join(known)}")
        if asked is not None or path.is_file():
            return movielens.FORMATS.get(asked or "")
        return next((f for f in movielens.FORMATS.values() if any(path.glob(f.pattern))), None)

    def _files(self, path: Path) -> list[Path]:
        folder_format = self._folder_format(path)
        return folder_format.files(path) if folder_format else formats.find_tables(path, self.recipe.format)

    def _load(self) -> formats.RawInteractions:
        """The interactions as they are in the files, or the demo."""
        path = self._data_path()
        if path is None:
            return demo.demo_interactions()
        if folder_format := self._folder_format(path):
            return folder_format.read(path)
        o = self.options
        columns = (o.user_column, o.item_column, o.rating_column, o.time_column, o.user_text, o.item_text)
        return formats.read_tables(path, self.recipe.format, formats.TableColumns(*columns))

    def read(self) -> Mapping[str, Columns]:
        return self._build_splits(self._load())[0]

    def prepare(self, folder: Path) -> dict[str, Any]:
        raw = self._load()
        splits, users, items, extra = self._build_splits(raw)
        for split, columns in splits.items():
            save(folder / split, columns)
        texts, of_users, of_items = unique_texts(raw, users, items)
        tokenizer, special = self._open_or_train_tokenizer(
            lambda size: tokenizers.train_byte_level_bpe(texts, size)
        )
        tokens = self._encode_texts(tokenizer, texts, special["pad"] or 0)
        catalogue = folder / CATALOGUE
        train = splits["train"]
        seen, all_pairs = unique_pair_keys([train], len(items)), unique_pair_keys(splits.values(), len(items))
        counts = np.bincount(np.asarray(train["item"]), minlength=len(items))
        catalogue.mkdir()
        arrays = {"tokens": tokens.values, "offsets": tokens.offsets, "user_text": of_users}
        arrays |= {"item_text": of_items, "counts": counts.astype(np.int64), "seen": seen, "had": all_pairs}
        for name, array in arrays.items():
            np.save(catalogue / f"{name}.npy", array)
        tokenizer.save(str(folder / "tokenizer.json"))
        titles = [raw.items[name].title if name in raw.items else name for name in items]
        names = {"users": users, "items": items, "titles": titles}
        (catalogue / NAMES_FILE).write_text(json.dumps(names, ensure_ascii=False))
        notes = [*extra.pop("notes"), *_missing_text_notes(of_users, of_items)]
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

    def text_query(self, facts: Facts, split: str, text: str) -> TextQuery:  # noqa: ARG002
        """The interactions of a user, or of a user and an item, by the ids that the data has: USER[,ITEM]."""
        names = self._names(facts)
        given = [text.strip()] if text.strip() in names["users"] else [w.strip() for w in text.rsplit(",", 1)]
        equal = {}
        for column, kind, name in zip(("user", "item"), ("users", "items"), given, strict=False):
            if name not in names[kind]:
                raise UserError(
                    f"--text {text}: there is no {column} {name}: rows are interactions, so give USER or"
                    " USER,ITEM by their ids in the data"
                )
            equal[column] = names[kind].index(name)
        return TextQuery({}, equal, whole=len(equal) == 2)

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:
        names = self._names(facts)
        pairs = zip(batch["user"].tolist(), batch["item"].tolist(), strict=True)
        return [f"user {names['users'][u]}, item {names['titles'][i]}" for u, i in pairs]

    def _names(self, facts: Facts) -> dict[str, list[str]]:
        """Ids of `users` and `items` by number, and `titles` of the items."""
        text = (Path(facts.folder) / CATALOGUE / NAMES_FILE).read_text()
        found: dict[str, list[str]] = json.loads(text)
        return found

    def _encode_texts(self, tokenizer: Tokenizer, texts: list[str], pad: int) -> Ragged:
        tokenizer.enable_truncation(self.recipe.max_length)
        encoded = tokenizer.encode_batch(texts, add_special_tokens=True)
        tokenizer.no_truncation()
        dtype = np.uint16 if tokenizers.vocabulary_size(tokenizer) <= 1 << 16 else np.int32
        return Ragged.from_rows([np.array(e.ids or [pad], dtype) for e in encoded], pad)

    def _build_splits(
        self, raw: formats.RawInteractions
    ) -> tuple[dict[str, Columns], list[str], list[str], dict[str, Any]]:
        """(columns per split, ids of users, ids of items, what Facts should know)."""
        tables = raw.splits
        negatives = raw.negatives
        by_user, users = number_ids([t["user"] for t in tables.values()])
        given = [] if negatives is None else [str(n) for n in np.unique(negatives)]
        by_item, items = number_ids([t["item"] for t in tables.values()], [*raw.items, *given])
        notes: list[str] = []
        if self.options.min_rating > 0 and any("rating" not in t.column_names for t in tables.values()):
            raise UserError(f"--min-rating {self.options.min_rating}: {self.recipe.data} has no ratings")
        parts = {
            split: drop_repeats(self._drop_low_ratings(interaction_arrays(t, u, i)), len(items), split, notes)
            for (split, t), u, i in zip(tables.items(), by_user, by_item, strict=True)
        }
        method = self.options.split or ("given" if "train" in parts else "leave-one-out")
        splits = self._split(parts, method, "time" in next(iter(tables.values())).column_names, notes)
        if len(splits["train"].user) == 0:
            raise UserError(f"--data {self.recipe.data}: no interactions are left to train on")
        notes += self._split_notes(splits, len(items))
        all_pairs = unique_pair_keys([{"user": p.user, "item": p.item} for p in splits.values()], len(items))
        columns: dict[str, Columns] = {}
        for split, pairs in splits.items():
            held: Columns = {}
            if split != "train":
                named = negatives if split == "test" else None
                held = self._held_out_columns(split, pairs, splits, all_pairs, items, named, notes)
            columns[split] = {"user": pairs.user, "item": pairs.item, **held}
        protocol = (
            f"{method}, {self.options.eval_negatives if negatives is None else negatives.shape[1]} negatives"
        )
        protocol += "" if negatives is None else " of the data"
        extra = {"users": len(users), "items": len(items), "protocol": protocol, "notes": notes}
        return columns, users, items, extra

    def _split_notes(self, splits: Mapping[str, InteractionArrays], items: int) -> Iterator[str]:
        """Notes on held-out users and items that training lacks, and on pairs that are in training too."""
        train = splits["train"]
        known = [np.unique(train.user), np.unique(train.item)]
        seen = unique_pair_keys([{"user": train.user, "item": train.item}], items)
        for split, pairs in splits.items():
            if split != "train" and len(pairs.user):
                for what, numbers, there in zip(("users", "items"), pairs, known, strict=False):
                    if new := len(np.setdiff1d(numbers, there)):
                        yield f"{split}: {new:,} of its {what} are in no training interaction"
                if same := int(np.isin(pair_keys(pairs.user, pairs.item, items), seen).sum()):
                    yield f"{split}: {same:,} of {len(pairs.user):,} interactions are in train too"

    def _drop_low_ratings(self, pairs: InteractionArrays) -> InteractionArrays:
        return pairs.take(pairs.rating >= self.options.min_rating) if self.options.min_rating > 0 else pairs

    def _split(
        self, parts: dict[str, InteractionArrays], method: str, has_times: bool, notes: list[str]
    ) -> dict[str, InteractionArrays]:
        given, by_id = "train" in parts, has_times and self.recipe.rules >= 2
        if method == "given":
            if not given:
                raise UserError(f"--split given: {self.recipe.data} has no train file")
            return parts if "valid" in parts else hold_out_validation(parts, notes)
        if given:
            raise UserError(f"--split {method}: {self.recipe.data} is split already: leave it out")
        if method == "time":
            if not has_times:
                raise UserError(f"--split time: {self.recipe.data} has no times (see --time-column)")
            return split_by_time(parts["all"], by_id)
        if not has_times:
            notes.append("there are no times: a user's last interaction is the last in the file")
        elif tied := count_tied_users(parts["all"]):
            users = len(np.unique(parts["all"].user))
            first = "the larger item id" if by_id else "the later in the file"
            notes.append(
                f"{tied:,} of {users:,} users have last interactions at one time: {first} is the last"
            )
        return split_leave_one_out(parts["all"], notes, parts["all"].item if by_id else None)

    def _held_out_columns(
        self,
        split: str,
        pairs: InteractionArrays,
        splits: Mapping[str, InteractionArrays],
        all_pairs: np.ndarray,
        items: list[str],
        given: np.ndarray | None,
        notes: list[str],
    ) -> Columns:
        """The columns `rivals` and `hidden` of a held-out split. `given`: negatives that the data names."""
        hidden = np.full((len(pairs.user), 1), MISSING, np.int32)
        if split == "test" and len(np.unique(splits["valid"].user)) == len(splits["valid"].user):
            of_user = np.full(
                max(pairs.user.max(initial=0), splits["valid"].user.max(initial=0)) + 1, MISSING
            )
            of_user[splits["valid"].user] = splits["valid"].item
            hidden[:, 0] = of_user[pairs.user]
        if given is not None:
            if len(given) != len(pairs.user):
                raise UserError(
                    f"--data {self.recipe.data}: some test rows are the same, or below --min-rating"
                )
            index = {name: number for number, name in enumerate(items)}
            named, where = np.unique(given, return_inverse=True)
            number = np.array([index[str(n)] for n in named], np.int32)
            return {"rivals": number[where].reshape(given.shape), "hidden": hidden}
        drawn = draw_eval_negatives(
            pairs.user, all_pairs, len(items), self.options.eval_negatives, EVAL_NEGATIVES_SEED
        )
        if short := int((drawn == MISSING).any(1).sum()):
            notes.append(
                f"{split}: {short} users have fewer than {self.options.eval_negatives} unseen items: theirs"
                " are ranked against those there are"
            )
        return {"rivals": drawn, "hidden": hidden}


def unique_pair_keys(splits: Iterable[Columns], items: int) -> np.ndarray:
    """The `pair_keys` of all pairs of the splits, sorted, each once."""
    found = [pair_keys(np.asarray(split["user"]), np.asarray(split["item"]), items) for split in splits]
    return np.unique(np.concatenate(found))


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


def _missing_text_notes(users: np.ndarray, items: np.ndarray) -> list[str]:
    found = []
    for what, texts in (("users", users), ("items", items)):
        missing = int((texts == MISSING).sum())
        if missing > 0:
            found.append(f"{missing:,} of {len(texts):,} {what} have no text: their ids alone count")
    return found
