"""Labelled texts: single texts, pairs or lists of words, as token ids with special tokens; their labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from isobatch.data.labelled import rows as reading
from isobatch.data.labelled.kinds import KINDS, LabelKind, WordTags, find_kind
from isobatch.data.preparation.encoding import EncodedShard, ShardEncoder, encode_whole
from isobatch.data.tokenized import Encoded, TokenizedData, path_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from isobatch.core.facts import Facts
    from isobatch.data.labelled.rows import Example, SplitLabels
    from isobatch.data.readers import LocatedRows

Rows = dict[str, Callable[[], "LocatedRows"]]
CLASS_WEIGHT = f"class{WEIGHT}"
"""The column of a training sample's weight in the loss, by its class or tags; there with --class-weights."""
LABELLED_WORDS = f"word{WEIGHT}"
"""The column of how many words of a sample have a label, where words are labelled."""
NO_LABEL = -100
"""The label of a token that is no first piece of a word, as transformers and CrossEntropyLoss have it."""
UNPROVEN = 0.01
"""The chance at which answers show no precision, as a classifier's calibration has it."""
SUREST = 0.9
"""The largest part of the rows, the surest, that its tests begin with."""
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
    """Tokenizes texts; or, as JSON, pairs of texts or words with a number each; cut to `max_length` tokens.

    A shard has `tokens` (all,), for pairs `types` and for words `label` of the same shape, a word's number at
    its first piece and NO_LABEL elsewhere; and `lengths` (rows,). Its facts: the number of rows that are
    `cut`, and of words without a label, `unlabelled`.
    """

    pairs: bool
    words: bool
    max_length: int

    def __call__(self, texts: list[str]) -> EncodedShard:
        rows: list[Any] = [tuple(json.loads(text)) for text in texts] if self.pairs or self.words else texts
        given = [words for words, _ in rows] if self.words else rows
        self.tokenizer.enable_truncation(self.max_length, strategy="longest_first")
        found = self.tokenizer.encode_batch(given, is_pretokenized=self.words, add_special_tokens=True)
        self.tokenizer.no_truncation()
        arrays = {"tokens": np.concatenate([np.array(one.ids, self.dtype) for one in found])}
        if self.pairs:
            arrays["types"] = np.concatenate([np.array(one.type_ids, np.uint8) for one in found])
        facts = {"cut": sum(bool(one.overflowing) for one in found)}
        if self.words:
            labels = [_at_first_pieces(one.word_ids, row[1]) for one, row in zip(found, rows, strict=True)]
            arrays["label"] = np.concatenate(labels)
            facts["unlabelled"] = sum(map(len, given)) - int((arrays["label"] != NO_LABEL).sum())
        arrays["lengths"] = np.array([len(one) for one in found], np.uint32)
        return EncodedShard(arrays, facts)


def _at_first_pieces(words: list[int | None], numbers: list[int]) -> np.ndarray:
    """(tokens,) int64: the number of each token's word if it is the word's first, else NO_LABEL."""
    pairs = zip(words, [None, *words], strict=False)
    return np.array([NO_LABEL if w is None or w == before else numbers[w] for w, before in pairs], np.int64)


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
    version: ClassVar[int] = 5
    cache_name: ClassVar[str] = "data.labelled.Labelled"
    demo_vocabulary_size: ClassVar[int] = 2048
    fewest_tokens: ClassVar[tuple[int, str]] = (300, "characters and special tokens")
    assumed: ClassVar[Mapping[str, Any]] = {"labels": ["0", "1"], "pad": 0}

    def check(self) -> None:
        self._check_vocabulary_size()
        splits = self._check_tables("labels: give tsv, csv, jsonl, json, parquet or conll")
        if splits:
            reading.find_columns(self.recipe.data, readers.column_names(splits["train"]), self.options)

    def _files(self) -> dict[str, readers.SplitFiles]:
        return {split: readers.as_conll(part) for split, part in super()._files().items()}

    def demo_files(self) -> list[Path]:
        return [file for files in reading.demo_files().values() for file in files]

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:
        kind, names = KINDS[facts.extra.get("problem", "classes")](""), facts.extra["labels"]
        tokenizer = self.prepared_tokenizer(facts)
        pieces = ([tokenizer.id_to_token(i) or "" for i in row.tolist()] for row in batch["tokens"])
        rows = zip(batch["label"], pieces, super().describe_rows(facts, batch), strict=True)
        return [f"{kind.describe(names, label, tokens)}: {text}" for label, tokens, text in rows]

    def written(self) -> list[dict[str, Any]]:
        """`text`, `pair` where there is one, and `label` of each training sample, as the data has them."""
        rows, columns, kind, splits, _ = self._read_labels()
        names = reading.learnt_names(kind, splits, self.recipe.data)
        labels = (kind.describe(names, one, ()) for one in kind.values(splits["train"], names))
        examples = zip(reading.read_examples(rows["train"](), columns), labels, strict=True)
        return [
            {k: v for k, v in (("text", one.text), ("pair", one.pair), ("label", label)) if v is not None}
            for one, label in examples
        ]

    def rows_of(self, split: str) -> LocatedRows:
        """The samples of a split as rows of the data, with all of their columns. Raises UserError."""
        rows, _, _, splits, _ = self._read_labels()
        if split not in splits:
            raise UserError(f"--split {split}: the data has {', '.join(splits)}")
        return rows[split]()

    def _open_rows(self) -> tuple[Rows, reading.ColumnNames, list[str]]:
        """(the rows of each split; the columns to read; notes). Raises UserError."""
        data, config = self.recipe.data, self.options.data_config
        corpus = reading.demo_rows() if data == DEMO else corpora.all_rows(data, self._files(), config)
        columns, notes = reading.find_columns(data, corpus.columns, self.options), [*corpus.notes]
        if {columns.text, columns.label} - {"text", "sentence", "label", "words", "tags"}:
            notes.append(f"texts are those of the column {columns.text}, labels those of {columns.label}")
        if unread := [name for name in corpus.columns if name not in (*columns, *columns.flags)]:
            notes.append(f"not read: {', '.join(name or 'a column without a name' for name in unread[:8])}")
        return {**corpus.splits}, columns, notes

    def encode_splits(self) -> Encoded:
        """(columns per split, the tokenizer, what Facts should know: labels, their counts, notes)."""
        rows, columns, kind, splits, notes = self._read_labels()
        counts, rows_of_train, held = splits["train"].counts(), len(splits["train"]), len(splits["valid"])
        fixed = self.known and self.known.extra["labels"]
        labels = fixed or reading.learnt_names(kind, splits, self.recipe.data)
        if fixed:
            del splits["train"]
            notes += reading.leave_out_unknown(splits, rows, labels)
        notes[:0] = [] if fixed else reading.alike_names(labels, counts)
        if rare := [str(name) for name in labels if counts[name] == 1 and not fixed]:
            notes.append(f"labels of one training row each: {reading.first_names(rare)}")
        tokenizer, special = self._open_tokenizer(reading.read_examples(rows["train"](), columns))
        if (words := isinstance(kind, WordTags)) and not fixed:  # the run's own does so already
            tokenizers.prepend_space(tokenizer)
        pairs, longest = columns.pair is not None, self.recipe.max_length
        dtype = tokenizers.token_dtype(tokenizer)
        encoder = LabelledEncoder(
            tokenizer=tokenizer, dtype=dtype, pairs=pairs, words=words, max_length=longest
        )
        found: dict[str, Any] = {}
        for split, known in splits.items():
            texts = _texts(reading.read_examples(rows[split](), columns), known, labels)
            arrays, of_shards = encode_whole(encoder, split, texts, self.workshop)
            lengths, facts = arrays.pop("lengths"), sum(map(Counter, of_shards), Counter[str]())
            pads = {"tokens": special["pad"] or 0, "types": 0, "label": NO_LABEL}
            encoded: dict[str, Any] = {n: Ragged.of_lengths(v, lengths, pads[n]) for n, v in arrays.items()}
            values, examples = kind.values(known, labels), reading.read_examples(rows[split](), columns)
            found[split] = encoded if words else {**encoded, "label": values}
            notes += [f"{split}: {note}" for note in reading.contradictions(known, values, examples)]
            if words:
                encoded[LABELLED_WORDS] = _sums(encoded["label"], np.ones(len(labels), np.float32))
            if facts["cut"]:
                notes.append(f"{split}: {facts['cut']} of {len(known)} texts are cut to {longest} tokens")
            if facts["unlabelled"]:
                why = "cut off, or without pieces in the tokenizer"
                notes.append(f"{split}: {facts['unlabelled']:,} words have no label: {why}")
        of_train = np.array([counts[name] for name in labels] if counts else [rows_of_train])
        extra = {
            **self._tokenizer_facts(tokenizer, special),
            **({} if kind.name == "classes" else {"problem": kind.name}),
            **{"labels": labels, "label_counts": of_train.tolist(), "notes": notes},
            **({"splits": {"valid": {"unknown": held - len(splits["valid"])}}} if fixed else {}),
        }
        if (asked := self.options.class_weights) is not None and not fixed:
            weights = reading.class_weights(asked, kind, labels, of_train, rows_of_train)
            extra["class_weights"] = weights.tolist()
            if kind.name != "multi-label":
                label = found["train"]["label"]
                found["train"][CLASS_WEIGHT] = _sums(label, weights) if words else weights[label]
        return found, tokenizer, extra

    def _read_labels(self) -> tuple[Rows, reading.ColumnNames, LabelKind, dict[str, SplitLabels], list[str]]:
        """(the rows of each split, of validation too; the columns; what labels are; those of each split;
        notes). Raises UserError.
        """
        rows, columns, said = self._open_rows()
        splits = {
            s: reading.SplitLabels.read(reading.read_examples(read(), columns)) for s, read in rows.items()
        }
        if path_of(self.recipe.data) is None:  # of a hub data set the splits are known now
            corpora.check_valid(self.options.valid, splits, self.recipe.data)
        empty = reading.leave_out(
            splits, rows, lambda of: [one == reading.NO_TEXT for one in of.labels], f"no {columns.text}"
        )
        if splits.get("test") and {*splits["test"].labels} <= {*reading.WITHHELD_LABELS}:
            del splits["test"]
            empty.append("the test split has no labels and is left out")
        known = {"problem": self.options.problem} if self.known is None else self.known.extra
        kind, notes = find_kind(known.get("problem", "classes"), columns, splits["train"])
        why = "rows hold U+0080 to U+009F: Windows-1252 was read as Latin-1: save it anew from its source"
        notes += [f"{split}: {found.misread:,} {why}" for split, found in splits.items() if found.misread]
        notes += empty + reading.leave_out(
            splits, rows, lambda of: [n is None for n in of.named(kind).names], f"no {columns.label}"
        )
        if self.known is None:
            kind.compare(splits["train"])
        share = corpora.share_of(self.options.valid) or HELD_OUT_SHARE
        if not (given := "valid" in splits):
            whole, read = splits["train"].named(kind), rows["train"]
            drawn = kind.hold_out(whole, share)
            for split, mask in (("train", ~drawn), ("valid", drawn)):
                splits[split], rows[split] = whole.take(mask), partial(corpora.taken, read, mask)
            notes.append(corpora.held_out_note(share))
            again = len(whole) - len(np.unique(whole.hashes))
            if again and not np.isin(whole.hashes[drawn], whole.hashes[~drawn]).any():
                notes.append(f"equal texts are on one side of the draw: {again:,} rows repeat one")
        if none := next((split for split, found in splits.items() if not len(found)), None):
            raise UserError(
                f"--data {self.recipe.data}: the {none} split holds no rows with {columns.text} and"
                f" {columns.label}: give it some (without a file of its own validation is a share of the"
                " training rows)"
            )
        splits = {split: found.named(kind) for split, found in splits.items()}
        training = TrainingRows()
        for split in sorted(splits, key=lambda split: split != "train"):
            same = training.compare(split, splits[split].hashes)
            notes += [*kind.notes(split, splits[split]), *same]
            if same and given and self.known is None:
                notes.append("without that file a share of training that shares no text is drawn (--valid)")
        most = UNPROVEN ** (1 / (1 + int(SUREST * len(splits["valid"]))))
        if kind.name == "classes" and self.known is None and most < 0.99:
            shown = f"rows, were all answered right, show a precision of {int(100 * most) / 100} at most"
            more = "a longer validation file" if given or share >= 0.3 else "--valid 0.3"
            notes.append(f"valid: {len(splits['valid']):,} {shown} (predict --precision): {more} shows more")
        return rows, columns, kind, splits, said + notes

    def _open_tokenizer(self, examples: Iterable[Example]) -> tuple[Tokenizer, dict[str, int | None]]:
        """The tokenizer, which may be trained on the examples, and the ids of its special tokens."""
        each = ((e.text, e.pair) if isinstance(e.text, str) else e.text for e in examples)
        texts = (text for parts in each for text in parts if text)
        tokenizer, special = self._open_or_train_tokenizer(lambda: texts, lowercase=True)
        tokenizers.ensure_special_tokens(tokenizer)
        found = [i for role in ("pad", "eos", "unk") if (i := special[role]) is not None]
        return tokenizer, {**special, "pad": [*found, 0][0]}


def _texts(examples: Iterable[Example], known: reading.SplitLabels, labels: list[str]) -> Iterator[str]:
    """What the encoder gets of each row."""
    for example, code in zip(examples, known.codes, strict=True):
        if isinstance(example.text, str):
            yield example.text if example.pair is None else json.dumps([example.text, example.pair])
        else:
            yield json.dumps([example.text, [labels.index(tag) for tag in known.names[code] or ()]])


def _sums(label: Ragged, weights: np.ndarray) -> np.ndarray:
    """(n,) float32: the sum of the weights (C,) of a row's labels."""
    each = np.where(label.values >= 0, weights[label.values.clip(0)], 0)
    total = np.concatenate([[0.0], np.cumsum(each, dtype=np.float64)])
    return np.asarray(np.diff(total[label.offsets]), np.float32)
