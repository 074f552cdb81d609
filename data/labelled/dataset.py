"""Labelled texts: single texts or pairs, as token ids with special tokens, and the class of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import AboveZero, HeldOutShare
from isobatch.data import corpora, readers, tokenizers
from isobatch.data.base import WEIGHT, Ragged
from isobatch.data.corpora import DEMO, TrainingRows
from isobatch.data.labelled.rows import (
    ColumnNames,
    Example,
    SplitClasses,
    class_names,
    class_weights,
    demo_files,
    demo_rows,
    drop_unlabelled_test,
    find_columns,
    held_out_rows,
    read_examples,
)
from isobatch.data.preparation.encoding import EncodedShard, ShardEncoder, encode_whole
from isobatch.data.tokenized import TokenizedData

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from isobatch.core.facts import Facts
    from isobatch.data.readers import LocatedRows
    from isobatch.data.tokenized import Encoded

CLASS_WEIGHT = f"class{WEIGHT}"
"""The column of a training sample's weight in the loss, by its class; there with --class-weights."""
HELD_OUT_SHARE = 0.1
"""Part of each class that is validation where there is no such split and --valid is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledOptions:
    """The fields of labelled texts."""

    text_column: str | None = None
    """The column that holds the text; by default the first of the usual names (sentence, text, ...)."""
    pair_column: str | None = None
    """The column of a second text, for pairs; by default sentence2, hypothesis or question2."""
    label_column: str | None = None
    """The column that holds the class; by default label, class, category, target, sentiment, intent, ..."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the data, where no model brings one; by default 8192."""
    data_config: str | None = None
    """The configuration of a hub data set that has several, such as sst2 of glue."""
    class_weights: Literal["balanced"] | tuple[AboveZero, ...] | None = None
    """What a sample of each class counts in the training loss: balanced (samples / (classes x samples of the
    class), of the whole training split), or a number for each class, in the order of their names."""

    valid: HeldOutShare | str | None = None
    """Where the data has no validation split: a file that is it, or the share of the rows of each class to
    draw for it at random, the same for every seed; by default 0.1."""


@dataclass(frozen=True, kw_only=True)
class LabelledEncoder(ShardEncoder):
    """Tokenizes texts, or pairs of texts, each given as JSON, cut to `max_length` tokens.

    A shard has `tokens` (all,), for pairs `types` of the same shape, and `lengths` (rows,). Its facts: the
    number of rows that are `cut`.
    """

    dtype: type
    pairs: bool
    max_length: int

    def __call__(self, texts: list[str]) -> EncodedShard:
        rows: list[Any] = [tuple(json.loads(text)) for text in texts] if self.pairs else texts
        self.tokenizer.enable_truncation(self.max_length, strategy="longest_first")
        found = self.tokenizer.encode_batch(rows, add_special_tokens=True)
        self.tokenizer.no_truncation()
        arrays = {"tokens": np.concatenate([np.array(one.ids, self.dtype) for one in found])}
        if self.pairs:
            arrays["types"] = np.concatenate([np.array(one.type_ids, np.uint8) for one in found])
        arrays["lengths"] = np.array([len(one) for one in found], np.uint32)
        return EncodedShard(arrays, {"cut": sum(bool(one.overflowing) for one in found)})


class Labelled(TokenizedData):
    """Labelled texts from a folder, a file, a hub id, or the demo.

    Columns: `tokens` (n, up to max_length) with the tokenizer's special tokens, `types` of the same shape
    for pairs (0 for the first text, 1 for the second), and `label` (n,) int64, the number of the class.
    With --class-weights the training split has CLASS_WEIGHT (n,) float32 as well.
    The demo classifies functions of Python's standard library by the package they come from.
    """

    Options: ClassVar[type] = LabelledOptions
    version: ClassVar[int] = 2
    cache_name: ClassVar[str] = "data.labelled.Labelled"
    demo_vocabulary_size: ClassVar[int] = 2048
    assumed: ClassVar[Mapping[str, Any]] = {"labels": ["0", "1"], "pad": 0}

    def check(self) -> None:
        size = self.options.vocab_size
        if size is not None and size < 300:
            raise UserError(f"--vocab-size {size}: must be at least 300: characters and special tokens")
        splits = self._check_tables("labels: give tsv, csv, jsonl, json or parquet")
        if splits:
            find_columns(self.recipe.data, readers.column_names(splits["train"]), self.options)

    def demo_files(self) -> list[Path]:
        return [file for files in demo_files().values() for file in files]

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:
        labels, texts = facts.extra["labels"], super().describe_rows(facts, batch)
        return [f"{labels[n]}: {text}" for n, text in zip(batch["label"].tolist(), texts, strict=True)]

    def encode_splits(self) -> Encoded:
        """(columns per split, the tokenizer, what Facts should know: labels, their counts, notes)."""
        rows, notes = self._rows_per_split()
        first = next(iter(rows["train"]()), None)
        if first is None:
            raise UserError(f"--data {self.recipe.data}: the train split is empty")
        columns = find_columns(self.recipe.data, [str(k) for k in first[1]], self.options)
        if {columns.text, columns.label} - {"text", "sentence", "label"}:
            notes.append(f"texts are those of the column {columns.text}, classes those of {columns.label}")
        if unread := [str(name) for name in first[1] if name not in columns]:
            notes.append(f"not read: {', '.join(name or 'a column without a name' for name in unread[:8])}")
        classes, found_notes = self._read_classes(rows, columns)
        notes += found_notes
        if fixed := self.known is not None:
            del classes["train"]
        labels = self._known_labels(classes) if fixed else class_names(classes, columns, self.recipe.data)
        tokenizer, special = self._open_tokenizer(read_examples(rows["train"](), columns))
        pairs, longest = columns.pair is not None, self.recipe.max_length
        dtype = tokenizers.token_dtype(tokenizer)
        encoder = LabelledEncoder(tokenizer=tokenizer, dtype=dtype, pairs=pairs, max_length=longest)
        found: dict[str, Any] = {}
        for split, known in classes.items():
            examples = read_examples(rows[split](), columns)
            encoded, cut = self._encode_split(split, examples, encoder, special["pad"] or 0)
            found[split] = {**encoded, "label": known.numbers(labels)}
            if cut:
                notes.append(f"{split}: {cut} of {len(known)} texts are cut to {longest} tokens")
        counts = np.bincount(next(iter(found.values()))["label"], minlength=len(labels))
        weights = class_weights(self.options.class_weights, labels, counts)
        if weights is not None and not fixed:
            found["train"][CLASS_WEIGHT] = weights[found["train"]["label"]]
        extra = {
            **self._tokenizer_facts(tokenizer, special),
            "labels": labels,
            "label_counts": counts.tolist(),
            **({} if weights is None else {"class_weights": weights.tolist()}),
            "notes": notes,
        }
        return found, tokenizer, extra

    def _known_labels(self, classes: Mapping[str, SplitClasses]) -> list[str]:
        """The classes of the run. Raises UserError for another one in the data."""
        assert self.known is not None
        labels: list[str] = self.known.extra["labels"]
        for found in classes.values():
            if strange := [label for label in found.counts() if label not in labels]:
                known = ", ".join(labels[:8]) + ", ..." * (len(labels) > 8)
                where = f"{found.where(strange[0])}: the label {strange[0] or 'is empty, and'}"
                raise UserError(f"{where} is none of the run's: {known}")
        return labels

    def _read_classes(
        self, rows: dict[str, Callable[[], LocatedRows]], columns: ColumnNames
    ) -> tuple[dict[str, SplitClasses], list[str]]:
        """(classes of each split; notes). A validation split is taken from training, in `rows` too."""
        classes = {s: SplitClasses.read(read_examples(read(), columns)) for s, read in rows.items()}
        if self._data_path() is None:  # of a hub data set the splits are known now
            corpora.check_valid(self.options.valid, classes, self.recipe.data)
        notes, share = [], corpora.share_of(self.options.valid) or HELD_OUT_SHARE
        if "valid" not in classes:
            drawn = held_out_rows(classes["train"], share)
            whole, read = classes["train"], rows["train"]
            for split, mask in (("train", ~drawn), ("valid", drawn)):
                classes[split], rows[split] = whole.take(mask), partial(corpora.taken, read, mask)
            notes.append(
                f"there is no validation split: {100 * share:g} % of the training rows of each class are it,"
                " drawn at random (--valid)"
            )
        if empty := next((split for split, found in classes.items() if not len(found)), None):
            raise UserError(
                f"--data {self.recipe.data}: the {empty} split holds no rows: give it some (without a file of"
                " its own validation is a share of the training rows)"
            )
        notes += drop_unlabelled_test(classes)
        known = TrainingRows()
        for split in sorted(classes, key=lambda split: split != "train"):
            notes += known.compare(split, classes[split].hashes)
        return classes, notes

    def _rows_per_split(self) -> tuple[dict[str, Callable[[], LocatedRows]], list[str]]:
        data = self.recipe.data
        if data == DEMO:
            return demo_rows(), []
        if parts := self._files():
            notes = readers.table_notes(parts)
            return {split: partial(readers.read_rows, part) for split, part in parts.items()}, notes
        splits = corpora.hub_splits(data, self.options.data_config)
        return {s: partial(corpora.read_hub_rows, data, rows) for s, rows in splits.items()}, []

    def _open_tokenizer(self, examples: Iterable[Example]) -> tuple[Tokenizer, dict[str, int | None]]:
        """The tokenizer, which may be trained on the examples, and the ids of its special tokens."""
        texts = (text for e in examples for text in (e.text, e.pair) if text)
        tokenizer, special = self._open_or_train_tokenizer(lambda: texts, lowercase=True)
        tokenizers.ensure_special_tokens(tokenizer)
        found = [i for role in ("pad", "eos", "unk") if (i := special[role]) is not None]
        return tokenizer, {**special, "pad": [*found, 0][0]}

    def _encode_split(
        self, split: str, examples: Iterable[Example], encoder: LabelledEncoder, pad: int
    ) -> tuple[dict[str, Ragged], int]:
        """(`tokens`, and `types` of pairs; the rows of which something is cut off)."""
        texts = (json.dumps([e.text, e.pair]) if encoder.pairs else e.text for e in examples)
        found, facts = encode_whole(encoder, split, texts, self.workshop)
        lengths = found.pop("lengths")
        columns = {n: Ragged.of_lengths(v, lengths, pad * (n == "tokens")) for n, v in found.items()}
        return columns, sum(one["cut"] for one in facts)
