"""Labelled texts: single texts, pairs or lists of words, as token ids with special tokens; their labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import AboveZero, HeldOutShare
from isobatch.data import corpora, readers, tokenizers
from isobatch.data.base import WEIGHT, Ragged
from isobatch.data.corpora import DEMO, TrainingRows
from isobatch.data.labelled.kinds import KINDS, LabelKind, WordTags, find_kind
from isobatch.data.labelled.rows import (
    ColumnNames,
    Example,
    SplitLabels,
    demo_files,
    demo_rows,
    drop_unlabelled_test,
    find_columns,
    learnt_names,
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
"""The column of a training sample's weight in the loss, by its class or tags; there with --class-weights."""
LABELLED_WORDS = f"word{WEIGHT}"
"""The column of how many words of a sample have a label, where words are labelled."""
NO_LABEL = -100
"""The label of a token that is no first piece of a word, as transformers and CrossEntropyLoss have it."""
HELD_OUT_SHARE = 0.1
"""Part of each class that is validation where there is no such split and --valid is not given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledOptions:
    """The fields of labelled texts."""

    text_column: str | None = None
    """The column that holds the text, or a list of words; by default the first of the usual names (sentence,
    text, ..., words, tokens)."""
    pair_column: str | None = None
    """The column of a second text, for pairs; by default sentence2, hypothesis or question2."""
    label_column: str | None = None
    """The column that holds the label; by default label, class, category, target, sentiment, intent, ...,
    score, tags; or several with commas between, each 1 where a text has the label that it is called."""
    problem: Literal["auto", "classes", "multi-label", "regression", "tokens"] = "auto"
    """What the labels are: one class a text, any number of them, a score, or a BIO tag for each word. auto
    decides by what the training rows hold, and says what it took."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the data, where no model brings one; by default 8192."""
    data_config: str | None = None
    """The configuration of a hub data set that has several, such as sst2 of glue."""
    class_weights: Literal["balanced"] | tuple[AboveZero, ...] | None = None
    """What a sample of each class counts in the training loss: balanced (samples / (classes x samples of the
    class), of the whole training split), or a number for each class, in the order of their names. Of
    multi-label what a text with the label counts beside one without: balanced is texts without / with."""

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


@dataclass(frozen=True, kw_only=True)
class WordEncoder(ShardEncoder):
    """Tokenizes lists of words with a number for each, as JSON, cut to `max_length` tokens.

    A shard has `tokens` and `label` (all,), a word's number at its first piece and NO_LABEL elsewhere, and
    `lengths` (rows,). Its facts: rows that are `cut`, words that are `lost` by it, words `without_pieces`.
    """

    dtype: type
    max_length: int

    def __call__(self, texts: list[str]) -> EncodedShard:
        rows = [json.loads(text) for text in texts]
        self.tokenizer.enable_truncation(self.max_length)
        found = self.tokenizer.encode_batch([words for words, _ in rows], is_pretokenized=True)
        self.tokenizer.no_truncation()
        labels, lost, without = [], 0, 0
        for one, (words, numbers) in zip(found, rows, strict=True):
            ids = enumerate(reversed(one.word_ids), 1)
            place = {
                word: -i for i, word in ids if word is not None
            }  # the first of a word's pieces, from the end
            labels.append(label := np.full(len(one), NO_LABEL, np.int64))
            label[[*place.values()]] = [numbers[word] for word in place]
            reached = max(place, default=-1) + 1 if one.overflowing else len(words)
            lost, without = lost + len(words) - reached, without + reached - len(place)
        arrays = {"tokens": np.concatenate([np.array(one.ids, self.dtype) for one in found])}
        arrays |= {
            "label": np.concatenate(labels),
            "lengths": np.array([len(one) for one in found], np.uint32),
        }
        cut = sum(bool(one.overflowing) for one in found)
        return EncodedShard(arrays, {"cut": cut, "lost": lost, "without_pieces": without})


class Labelled(TokenizedData):
    """Labelled texts from a folder, a file, a hub id, or the demo.

    Columns: `tokens` (n, up to max_length) with the tokenizer's special tokens, `types` of the same shape
    for pairs (0 for the first text, 1 for the second), and `label`, by the problem: (n,) int64, the number of
    the class; multi-label (n, C) float32 of 0 and 1; regression (n,) float32; tokens as `tokens`, the number
    of a word's BIO tag at its first piece and NO_LABEL elsewhere, with LABELLED_WORDS (n,) float32.
    With --class-weights the training split of classes and tokens has CLASS_WEIGHT (n,) float32 as well.
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

    def _files(self) -> dict[str, readers.SplitFiles]:
        return {split: readers.as_conll(part) for split, part in super()._files().items()}

    def demo_files(self) -> list[Path]:
        return [file for files in demo_files().values() for file in files]

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:
        problem, names = KINDS[facts.extra.get("problem", "classes")](""), facts.extra["labels"]
        tokenizer = self.prepared_tokenizer(facts)
        pieces = ([tokenizer.id_to_token(i) or "" for i in row.tolist()] for row in batch["tokens"])
        rows = zip(batch["label"], pieces, super().describe_rows(facts, batch), strict=True)
        return [f"{problem.describe(names, label, tokens)}: {text}" for label, tokens, text in rows]

    def encode_splits(self) -> Encoded:
        """(columns per split, the tokenizer, what Facts should know: labels, their counts, notes)."""
        rows, notes = self._rows_per_split()
        first = next(iter(rows["train"]()), None)
        if first is None:
            raise UserError(f"--data {self.recipe.data}: the train split is empty")
        columns = find_columns(self.recipe.data, [str(k) for k in first[1]], self.options)
        usual = (
            {"text", "sentence", "label"}
            if isinstance(first[1].get(columns.text), str)
            else {"words", "tags"}
        )
        if {columns.text, columns.label} - usual:
            notes.append(f"texts are those of the column {columns.text}, classes those of {columns.label}")
        if unread := [str(name) for name in first[1] if name not in (*columns, *columns.flags)]:
            notes.append(f"not read: {', '.join(name or 'a column without a name' for name in unread[:8])}")
        problem, splits, found_notes = self._read_labels(rows, columns)
        notes += found_notes
        if fixed := self.known is not None:
            del splits["train"]
        labels = self._known_labels(splits) if fixed else learnt_names(problem, splits, self.recipe.data)
        if not fixed and (rare := [str(name) for name, n in splits["train"].counts().items() if n == 1]):
            notes.append(
                f"labels that a single training row has: {', '.join(rare[:8])}{', ...' * (len(rare) > 8)}"
            )
        tokenizer, special = self._open_tokenizer(read_examples(rows["train"](), columns))
        if isinstance(problem, WordTags):
            tokenizer = tokenizers.with_space_before(tokenizer)
        encoder: ShardEncoder = self._encoder(tokenizer, problem, columns)
        found: dict[str, Any] = {}
        for split, known in splits.items():
            examples = _as_json(read_examples(rows[split](), columns), problem, known, labels)
            found[split], said = self._encode_split(split, examples, encoder, special["pad"] or 0)
            if not isinstance(problem, WordTags):
                found[split]["label"] = problem.values(known, labels)
            notes += [f"{split}: {what}" for what in said]
        extra = {**self._tokenizer_facts(tokenizer, special), "labels": labels}
        if problem.name != "classes":
            extra |= {"problem": problem.name, "label_form": problem.form}
        extra |= self._count(found, problem, labels, None if fixed else "train")
        return found, tokenizer, {**extra, "notes": notes}

    def _count(
        self, found: dict[str, Any], problem: LabelKind, labels: list[str], train: str | None
    ) -> dict[str, Any]:
        """The facts of the labels' counts and weights; adds the columns of weights to the splits."""
        label = next(iter(found.values()))["label"]
        values = label.values if isinstance(label, Ragged) else label
        counts = problem.count(values, len(labels))
        facts = {"label_counts": counts.tolist()}
        if isinstance(label, Ragged):
            for columns in found.values():
                columns[LABELLED_WORDS] = _sums(columns["label"], np.ones(len(labels), np.float32))
        if (asked := self.options.class_weights) is None:
            return facts
        if isinstance(asked, tuple) and len(asked) != len(labels) and problem.name != "regression":
            raise UserError(
                f"--class-weights {','.join(f'{weight:g}' for weight in asked)}: the data has {len(labels)}"
                f" classes ({', '.join(labels[:8])}{', ...' if len(labels) > 8 else ''}): give a number for"
                " each, in this order"
            )
        weights = np.array(problem.weights(asked, counts, len(label)), np.float32)
        if train and values.dtype == np.int64:
            found[train][CLASS_WEIGHT] = (
                _sums(label, weights) if isinstance(label, Ragged) else weights[values]
            )
        return {**facts, "class_weights": weights.tolist()}

    def _known_labels(self, splits: Mapping[str, SplitLabels]) -> list[str]:
        """The labels of the run. Raises UserError for another one in the data."""
        assert self.known is not None
        labels: list[str] = self.known.extra["labels"]
        for found in splits.values():
            if strange := [label for label in found.counts() if label not in labels]:
                known = ", ".join(labels[:8]) + ", ..." * (len(labels) > 8)
                where = f"{found.where(strange[0])}: the label {strange[0] or 'is empty, and'}"
                raise UserError(f"{where} is none of the run's: {known}")
        return labels

    def _read_labels(
        self, rows: dict[str, Callable[[], LocatedRows]], columns: ColumnNames
    ) -> tuple[LabelKind, dict[str, SplitLabels], list[str]]:
        """(what is learnt; labels of each split; notes). A validation split is taken from training, in `rows`
        too.
        """
        splits = {s: SplitLabels.read(read_examples(read(), columns)) for s, read in rows.items()}
        if self._data_path() is None:  # of a hub data set the splits are known now
            corpora.check_valid(self.options.valid, splits, self.recipe.data)
        known = None if self.known is None else self.known.extra
        asked = self.options.problem if known is None else known.get("problem", "classes")
        problem, notes = find_kind(asked, columns, splits["train"])
        if known is not None:
            problem = replace(problem, form=known.get("label_form", problem.form))
        share = corpora.share_of(self.options.valid) or HELD_OUT_SHARE
        if "valid" not in splits:
            whole, read = splits["train"].named(problem), rows["train"]
            drawn = problem.held_out(whole, share)
            for split, mask in (("train", ~drawn), ("valid", drawn)):
                splits[split], rows[split] = whole.take(mask), partial(corpora.taken, read, mask)
            each = " of each class" * (problem.name == "classes")
            notes.append(
                f"there is no validation split: {100 * share:g} % of the training rows{each} are it,"
                " drawn at random (--valid)"
            )
        if empty := next((split for split, found in splits.items() if not len(found)), None):
            raise UserError(
                f"--data {self.recipe.data}: the {empty} split holds no rows: give it some (without a file of"
                " its own validation is a share of the training rows)"
            )
        notes += drop_unlabelled_test(splits)
        splits = {split: found.named(problem) for split, found in splits.items()}
        notes += problem.notes(splits)
        training = TrainingRows()
        for split in sorted(splits, key=lambda split: split != "train"):
            notes += training.compare(split, splits[split].hashes)
        return problem, splits, notes

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
        texts = (text for e in examples for text in (*_texts(e), e.pair) if text)
        tokenizer, special = self._open_or_train_tokenizer(lambda: texts, lowercase=True)
        tokenizers.ensure_special_tokens(tokenizer)
        found = [i for role in ("pad", "eos", "unk") if (i := special[role]) is not None]
        return tokenizer, {**special, "pad": [*found, 0][0]}

    def _encoder(self, tokenizer: Tokenizer, problem: LabelKind, columns: ColumnNames) -> ShardEncoder:
        shared: Any = {"dtype": tokenizers.token_dtype(tokenizer), "max_length": self.recipe.max_length}
        if isinstance(problem, WordTags):
            return WordEncoder(tokenizer=tokenizer, **shared)
        return LabelledEncoder(tokenizer=tokenizer, pairs=columns.pair is not None, **shared)

    def _encode_split(
        self, split: str, texts: Iterable[str], encoder: ShardEncoder, pad: int
    ) -> tuple[dict[str, Any], list[str]]:
        """(`tokens`, `types` of pairs, `label` of words; what is cut off or without a label)."""
        found, facts = encode_whole(encoder, split, texts, self.workshop)
        lengths = found.pop("lengths")
        pads = {"tokens": pad, "label": NO_LABEL}
        columns = {n: Ragged.of_lengths(v, lengths, pads.get(n, 0)) for n, v in found.items()}
        cut, lost, without = (sum(one.get(n, 0) for one in facts) for n in ("cut", "lost", "without_pieces"))
        of, words = (
            f"{cut} of {len(lengths)} texts are cut to {self.recipe.max_length} tokens",
            f"{lost:,} words",
        )
        notes = [of + f": {words} of them are not learnt" * (lost > 0)] * bool(cut)
        notes += [f"{without:,} words have no pieces in the tokenizer, and no label"] * bool(without)
        return columns, notes


def _texts(example: Example) -> tuple[str, ...]:
    return (example.text,) if isinstance(example.text, str) else example.text


def _as_json(
    examples: Iterable[Example], problem: LabelKind, known: SplitLabels, labels: list[str]
) -> Iterator[str]:
    """What an encoder gets of each row."""
    number = {name: n for n, name in enumerate(labels)}
    for example, code in zip(examples, known.codes, strict=True):
        if isinstance(problem, WordTags):
            yield json.dumps([example.text, [number[tag] for tag in known.names[code] or ()]])
        else:
            yield str(example.text) if example.pair is None else json.dumps([example.text, example.pair])


def _sums(label: Ragged, weights: np.ndarray) -> np.ndarray:
    """(n,) float32: the sum over a row's labels, those that are none left out, of their weights (C,)."""
    each = np.where(label.values >= 0, weights[np.maximum(label.values, 0)], 0)
    total = np.concatenate([[0.0], np.cumsum(each, dtype=np.float64)])
    return (total[label.offsets[1:]] - total[label.offsets[:-1]]).astype(np.float32)
