"""Labelled texts: single texts or pairs, as token ids with special tokens, and the class of each."""

from __future__ import annotations

import ast
import itertools
import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.flags import ADDED_LATER
from isobatch.core.number_ranges import AboveZero, HeldOutShare
from isobatch.data import hub, readers, tokenizers
from isobatch.data.base import WEIGHT, Column, Ragged, TextQuery, load
from isobatch.data.corpora import DEMO, DEMO_PACKAGES, overlap_notes, read_hub_rows
from isobatch.data.tokenized import EncodedSplits, within_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tokenizers import Tokenizer

    from isobatch.core.facts import Facts
    from isobatch.data.readers import LocatedRows

TEXT_COLUMNS = (
    *("sentence", "text", "sentence1", "premise", "question1", "question"),
    *("content", "comment", "review", "message", "tweet", "body", "feedback", "description"),
)
"""Usual names of a text column; the first that the data has is taken."""
PAIR_COLUMNS = {"sentence1": "sentence2", "premise": "hypothesis", "question1": "question2"}
LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "sentiment", "intent", "topic", "emotion")
WITHHELD_LABELS = (None, "-1")
"""Labels that mean none, as in GLUE's test splits."""
CLASS_WEIGHT = f"class{WEIGHT}"
"""The column of a training sample's weight in the loss, by its class; there with --class-weights."""
HELD_OUT_SHARE, HELD_OUT_SEED = 0.1, 20
"""Part of each class that is validation where there is no such split and --valid is not given; its draw."""
MAX_CLASSES = 1000
MIN_IDENTIFIERS, SAMPLED_ROWS = 50, 1000
"""From so many rows on, a class for each is an identifier; rows in which fewer values are looked for."""
MAX_TEXT_CHARACTERS = 1_000_000


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
    class_weights: Literal["balanced"] | tuple[AboveZero, ...] | None = field(
        default=None, metadata=ADDED_LATER
    )
    """What a sample of each class counts in the training loss: balanced (samples / (classes x samples of the
    class), of the whole training split), or a number for each class, in the order of their names."""

    valid: HeldOutShare | None = field(default=None, metadata=ADDED_LATER)
    """Share of the training rows of each class to validate on, drawn at random and the same for every seed,
    where the data has no validation split; by default 0.1."""


class Example(NamedTuple):
    """One labelled text or pair of texts."""

    where: str
    """Its file and line, for error messages."""
    text: str
    pair: str | None
    """The second text of a pair."""
    label: str | None
    """The class as written; None where the row has none."""


class ColumnNames(NamedTuple):
    """The columns to read; `pair` is None for single texts."""

    text: str
    pair: str | None
    label: str


class Labelled(EncodedSplits):
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

    def check(self) -> None:
        size = self.options.vocab_size
        if size is not None and size < 300:
            raise UserError(f"--vocab-size {size}: must be at least 300: characters and special tokens")
        self._tokenizer_source()
        path = self._data_path()
        if path is not None:
            for part in readers.find_splits(path, self.recipe.format).values():
                if part.is_stream:
                    raise UserError(
                        f"--data {path}: a .txt file has no labels: give tsv, csv, jsonl, json or parquet"
                    )
            self._find_columns(readers.column_names(readers.find_splits(path, self.recipe.format)["train"]))
            self._check_share(readers.find_splits(path, self.recipe.format))
        elif self.recipe.data == DEMO:
            self._check_share(("train", "valid"))
        else:
            hub.require_dataset(self.recipe.data)

    def _find_columns(self, available: Sequence[str]) -> ColumnNames:
        options = self.options
        return find_columns(
            self.recipe.data, available, options.text_column, options.pair_column, options.label_column
        )

    def _check_share(self, splits: Iterable[str]) -> None:
        if self.options.valid is not None and "valid" in splits:
            raise UserError(
                f"--valid {self.options.valid:g}: {self.recipe.data} has a validation split: leave it out"
            )

    def _held_out_share(self) -> float | None:
        """The part of each class that is validation where there is no such split; None by rules 1."""
        return self.options.valid or (HELD_OUT_SHARE if self.recipe.rules >= 2 else None)

    def identity(self) -> dict[str, Any]:
        return {
            "data": self._content_identity(),
            "format": self.recipe.format,
            "tokenizer": self._tokenizer_source().identity(),
            "max_length": self.recipe.max_length,
            "columns": [self.options.text_column, self.options.pair_column, self.options.label_column],
            "vocab_size": self._vocabulary_size(),
            **({"class_weights": self.options.class_weights} if self.options.class_weights else {}),
            **self._split_identity(),
        }

    def _split_identity(self) -> dict[str, Any]:
        """The share that is held out, unless it is known that the data has a validation split."""
        path, share = self._data_path(), self._held_out_share()
        if self.recipe.data == DEMO or share is None:
            return {}
        if path is not None and "valid" in readers.find_splits(path, self.recipe.format):
            return {}
        return {"valid": [share, HELD_OUT_SEED]}

    def demo_files(self) -> list[Path]:
        return [file for files in _demo_files().values() for file in files]

    def text_query(self, facts: Facts, split: str, text: str) -> TextQuery:
        """Single texts are whole rows; of pairs either text is looked for within the row."""
        tokenizer = self.prepared_tokenizer(facts)
        if "types" in load(Path(facts.folder) / split):
            return TextQuery({"tokens": within_text(tokenizer, text)})
        tokenizer.enable_truncation(self.recipe.max_length, strategy="longest_first")
        encoded = tokenizer.encode(text, add_special_tokens=True)
        note = f"the text is cut to {self.recipe.max_length} tokens, as the rows are"
        return TextQuery(
            {"tokens": [np.array(encoded.ids)]}, whole=True, note=note if encoded.overflowing else ""
        )

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:
        labels, texts = facts.extra["labels"], super().describe_rows(facts, batch)
        return [
            f"{labels[number]}: {text}" for number, text in zip(batch["label"].tolist(), texts, strict=True)
        ]

    def encode_splits(self) -> tuple[dict[str, dict[str, Column]], Tokenizer, dict[str, Any]]:
        """(columns per split, the tokenizer, what Facts should know: labels, their counts, notes)."""
        row_readers, notes = self._rows_per_split()
        first = next(iter(row_readers["train"]()), None)
        if first is None:
            raise UserError(f"--data {self.recipe.data}: the train split is empty")
        columns = self._find_columns([str(k) for k in first[1]])
        if {columns.text, columns.label} - {"text", "sentence", "label"}:
            notes.append(f"texts are those of the column {columns.text}, classes those of {columns.label}")
        splits = {split: list(read_examples(rows(), columns)) for split, rows in row_readers.items()}
        refuse_identifiers(splits["train"], columns.label, row_readers["train"](), self.recipe.data)
        notes += self._hold_out(splits)
        if empty := next((split for split, examples in splits.items() if not examples), None):
            raise UserError(
                f"--data {self.recipe.data}: the {empty} split holds no rows: give it some (without a file of"
                " its own validation is a share of the training rows)"
            )
        notes += drop_unlabelled_test(splits)
        known = {(e.text, e.pair) for e in splits["train"]}
        for split in (s for s in splits if s != "train"):
            same = sum((e.text, e.pair) in known for e in splits[split])
            notes += overlap_notes(split, same, len(splits[split]))
        labels = class_names(splits, columns, self.recipe.data)
        tokenizer, special = self._open_tokenizer(splits["train"])
        found: dict[str, dict[str, Column]] = {}
        for split, examples in splits.items():
            found[split], cut = self._encode_split(examples, labels, tokenizer, special["pad"] or 0)
            if cut:
                notes.append(
                    f"{split}: {cut} of {len(examples)} texts are cut to {self.recipe.max_length} tokens"
                )
        counts = np.bincount(np.asarray(found["train"]["label"]), minlength=len(labels))
        weights = class_weights(self.options.class_weights, labels, counts)
        if weights is not None:
            found["train"][CLASS_WEIGHT] = weights[np.asarray(found["train"]["label"])]
        return (
            found,
            tokenizer,
            {
                "tokenizer": "tokenizer.json",
                "vocabulary": tokenizers.vocabulary_size(tokenizer),
                **special,
                "labels": labels,
                "label_counts": counts.tolist(),
                **({} if weights is None else {"class_weights": weights.tolist()}),
                "majority": {s: _majority_share(c["label"]) for s, c in found.items()},
                "notes": notes,
            },
        )

    def _hold_out(self, splits: dict[str, list[Example]]) -> list[str]:
        """Take the validation rows from the training rows where there are none; a line that says so."""
        self._check_share(splits)
        share = self._held_out_share()
        if "valid" in splits or not share:
            return []
        splits["train"], splits["valid"] = hold_out_by_class(splits["train"], share)
        return [
            f"there is no validation split: {100 * share:g} % of the training rows of each class are it,"
            " drawn at random (--valid)"
        ]

    def _rows_per_split(self) -> tuple[dict[str, Callable[[], LocatedRows]], list[str]]:
        if self.recipe.data == DEMO:
            return _demo_rows(), []
        where = (self.recipe.data, self._data_path(), self.recipe.format, self.options.data_config)
        return rows_per_split(*where) if self._held_out_share() is None else (_given_rows(*where), [])

    def _open_tokenizer(self, examples: list[Example]) -> tuple[Tokenizer, dict[str, int | None]]:
        """The tokenizer, which may be trained on the examples, and the ids of its special tokens."""
        texts = (text for e in examples for text in (e.text, e.pair) if text)
        tokenizer, special = self._open_or_train_tokenizer(
            lambda size: tokenizers.train_lowercase_bpe(texts, size)
        )
        tokenizers.ensure_special_tokens(tokenizer)
        return tokenizer, special

    def _encode_split(
        self, examples: list[Example], labels: list[str], tokenizer: Tokenizer, pad: int
    ) -> tuple[dict[str, Column], int]:
        """The columns of a split, and the number of texts that were truncated."""
        tokenizer.enable_truncation(self.recipe.max_length, strategy="longest_first")
        pairs = examples[0].pair is not None if examples else False
        given = [(e.text, e.pair) if pairs else e.text for e in examples]
        encoded = tokenizer.encode_batch(given, add_special_tokens=True)
        tokenizer.no_truncation()
        dtype = np.uint16 if tokenizers.vocabulary_size(tokenizer) <= 1 << 16 else np.int32
        columns: dict[str, Column] = {
            "tokens": Ragged.from_rows([np.array(e.ids, dtype) for e in encoded], pad)
        }
        if pairs:
            columns["types"] = Ragged.from_rows([np.array(e.type_ids, np.uint8) for e in encoded])
        number = {label: n for n, label in enumerate(labels)}
        columns["label"] = np.array([number[e.label or ""] for e in examples], np.int64)
        return columns, sum(bool(e.overflowing) for e in encoded)


def find_columns(
    data: str,
    available: Sequence[str],
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
) -> ColumnNames:
    """The columns asked for, else the first of the usual names among those available.

    Raises UserError where one is missing.
    """
    wanted = {"--text-column": (text, TEXT_COLUMNS), "--label-column": (label, LABEL_COLUMNS)}
    if pair is not None:
        wanted["--pair-column"] = (pair, ())
    found = {flag: _find_column(asked, usual, available) for flag, (asked, usual) in wanted.items()}
    if missing := {flag: wanted[flag][0] for flag, name in found.items() if name is None}:
        raise UserError(_missing_columns(missing, available, data))
    texts, classes = str(found["--text-column"]), str(found["--label-column"])
    if pair is None and PAIR_COLUMNS.get(texts) in available:
        pair = PAIR_COLUMNS[texts]
    return ColumnNames(texts, pair, classes)


def rows_per_split(
    data: str, path: Path | None, file_format: str | None, config: str | None
) -> tuple[dict[str, Callable[[], LocatedRows]], list[str]]:
    """(split -> a function that reads its rows, notes) of a path or hub id.

    Where there is no validation split, every twentieth training row goes into one.
    """
    found = _given_rows(data, path, file_format, config)
    if "valid" in found:
        return found, []
    rows = list(found["train"]())
    held_out = {
        number
        for number in range(len(rows))
        if number % readers.VALIDATION_ONE_IN == readers.VALIDATION_ONE_IN - 1
    }
    found["train"] = lambda: [row for number, row in enumerate(rows) if number not in held_out]
    found["valid"] = lambda: [row for number, row in enumerate(rows) if number in held_out]
    return found, ["there is no validation split: every twentieth row of the training data is it"]


def _given_rows(
    data: str, path: Path | None, file_format: str | None, config: str | None
) -> dict[str, Callable[[], LocatedRows]]:
    """Split -> a function that reads its rows, of the splits that a path or hub id has."""
    if path is None:
        return _hub_rows(data, config)
    parts = readers.find_splits(path, file_format)
    return {split: partial(readers.read_rows, part) for split, part in parts.items()}


def hold_out_by_class(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """(training, validation): a share of each class, drawn at random; both in the order of the rows.

    Each class keeps a row for training. The draw depends on the rows alone, not on the recipe's seed: runs
    with several seeds are measured on the same rows.
    """
    # Raw numbers, sorted: those are the same in every version of numpy, a Generator's permutation may change.
    order = np.argsort(np.random.PCG64(HELD_OUT_SEED).random_raw(len(examples)), kind="stable")
    by_class: dict[str | None, list[int]] = {}
    for number in order.tolist():
        by_class.setdefault(examples[number].label, []).append(number)
    counts = _share_out({label: len(numbers) for label, numbers in by_class.items()}, share)
    held_out = {number for label, numbers in by_class.items() for number in numbers[: counts[label]]}
    train = [example for number, example in enumerate(examples) if number not in held_out]
    return train, [examples[number] for number in sorted(held_out)]


def _share_out(sizes: Mapping[str | None, int], share: float) -> dict[str | None, int]:
    """How many of each class are held out: the largest remainders are rounded up, at least 1 in all."""
    counts = {label: math.floor(size * share) for label, size in sizes.items()}
    missing = max(1, round(sum(sizes.values()) * share)) - sum(counts.values())
    for label in sorted(sizes, key=lambda label: (counts[label] - sizes[label] * share, str(label))):
        if missing > 0 and counts[label] < sizes[label] - 1:
            counts[label], missing = counts[label] + 1, missing - 1
    return counts


def drop_unlabelled_test(splits: dict[str, list[Example]]) -> list[str]:
    """Remove a test split that has no labels, in place; returns a note for the user if it did."""
    if splits.get("test") and all(e.label in WITHHELD_LABELS for e in splits["test"]):
        del splits["test"]
        return ["the test split has no labels and is left out"]
    return []


def _find_column(asked: str | None, usual: tuple[str, ...], available: Sequence[str]) -> str | None:
    """The column asked for, else the first of the usual names; None where it is not there."""
    return next((name for name in (usual if asked is None else (asked,)) if name in available), None)


def _missing_columns(missing: Mapping[str, str | None], available: Sequence[str], data: str) -> str:
    """One line on all columns that are not there. `missing`: flag -> the name asked for, if one was."""
    said = [
        f"{flag} {asked}: {data} has no such column{readers.did_you_mean(asked, available)}"
        for flag, asked in missing.items()
        if asked is not None
    ]
    if open_flags := [flag for flag, asked in missing.items() if asked is None]:
        question = "which column? {} says" if len(open_flags) == 1 else "which columns? {} say"
        said.append(f"--data {data}: {question.format(' and '.join(open_flags))}")
    return "; ".join([*said, f"it has: {', '.join(available[:20]) or 'no columns'}"])


def refuse_identifiers(examples: Sequence[Example], column: str, rows: LocatedRows, data: str) -> None:
    """Raise UserError where every training row has a class of its own. `rows`: those of the examples."""
    if len(examples) < MIN_IDENTIFIERS or len({e.label for e in examples}) < len(examples):
        return
    values: dict[str, set[str]] = {}
    for _, row in itertools.islice(rows, SAMPLED_ROWS):
        for name, value in row.items():
            values.setdefault(str(name), set()).add(str(value))
    labels = [name for name, found in values.items() if 1 < len(found) <= MIN_IDENTIFIERS]
    hint = f"; labels may be in: {', '.join(labels)}" if labels else ""
    count = len(examples)
    raise UserError(
        f"--data {data}: {count:,} classes for {count:,} rows: is `{column}` an identifier? Choose another"
        f" --label-column{hint}"
    )


def read_examples(rows: LocatedRows, columns: ColumnNames) -> Iterator[Example]:
    """The example in each row. Raises UserError for a text that is missing, not a string, or very long."""
    for where, row in rows:
        text = _text_field(row, columns.text, where, "--text-column")
        pair = None if columns.pair is None else _text_field(row, columns.pair, where, "--pair-column")
        yield Example(where, text, pair, _parse_label(row.get(columns.label)))


def _text_field(row: Mapping[str, Any], column: str, where: str, flag: str) -> str:
    text = row.get(column)
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where}: {column} holds {type(text).__name__}, not text: choose another {flag}")
    if not text or not text.strip():
        raise UserError(f"{where}: {column} is empty: leave the row out, or choose another {flag}")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UserError(
            f"{where}: {column} has {len(text):,} characters: a quote that is never closed swallows all rows"
            " behind it; mend it, or shorten the text"
        )
    return text


def _parse_label(value: Any) -> str | None:
    """The label as text, whole floats without their point; None where there is none."""
    if value is None or value == "":
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def class_names(splits: Mapping[str, list[Example]], columns: ColumnNames, data: str) -> list[str]:
    """The classes of the training split: in numeric order where all are whole numbers, else by name.

    Raises UserError for missing labels, fewer than two classes, more than MAX_CLASSES, and labels that only
    another split has.
    """
    for split, examples in splits.items():
        if blank := next((e for e in examples if e.label is None), None):
            raise UserError(
                f"{blank.where}: {columns.label} is empty in the {split} split: leave the row out"
            )
    counts = Counter(e.label for e in splits["train"] if e.label is not None)
    if len(counts) < 2:
        raise UserError(
            f"--data {data}: {columns.label} is {next(iter(counts), 'empty')} in every training row:"
            " at least two classes are needed"
        )
    if len(counts) > MAX_CLASSES:
        raise UserError(
            f"--data {data}: {columns.label} has {len(counts):,} different values: at most {MAX_CLASSES}"
            " classes; choose another --label-column"
        )
    for split, examples in splits.items():
        if strange := next((e for e in examples if e.label not in counts), None):
            raise UserError(
                f"{strange.where}: the {split} split has the label {strange.label}, which no training row has"
            )
    whole = all(re.fullmatch(r"-?[0-9]+", label) for label in counts)
    return sorted(counts, key=int) if whole else sorted(counts)


def class_weights(
    asked: Literal["balanced"] | tuple[float, ...] | None, labels: Sequence[str], counts: np.ndarray
) -> np.ndarray | None:
    """(C,) float32: what a sample of each class counts in the loss; None where all count the same.

    `counts` (C,): training samples of each class. balanced is n / (C * count) (King and Zeng 2001, as in
    scikit-learn), of which the mean over all samples is 1. Raises UserError for another number of weights.
    """
    if asked is None:
        return None
    if asked == "balanced":
        return (counts.sum() / (len(counts) * counts)).astype(np.float32)
    if len(asked) != len(labels):
        raise UserError(
            f"--class-weights {','.join(f'{weight:g}' for weight in asked)}: the data has {len(labels)}"
            f" classes ({', '.join(labels[:8])}{', ...' if len(labels) > 8 else ''}): give a number for"
            " each, in this order"
        )
    return np.array(asked, np.float32)


def _majority_share(labels: Any) -> float:
    """The share of the largest class: the accuracy of always answering it."""
    return round(float(np.bincount(np.asarray(labels)).max() / len(labels)), 6)


def _hub_rows(name: str, config: str | None) -> dict[str, Callable[[], LocatedRows]]:
    found = {
        readers.SPLITS[split]: rows
        for split, rows in hub.load_dataset(name, config).items()
        if split in readers.SPLITS
    }
    if "train" not in found:
        raise UserError(f"--data {name}: has no train split")
    return {split: partial(read_hub_rows, name, rows) for split, rows in found.items()}


def _demo_files() -> dict[str, list[Path]]:
    library = Path(os.__file__).parent
    return {package: sorted((library / package).glob("*.py")) for package in DEMO_PACKAGES}


def _demo_rows() -> dict[str, Callable[[], LocatedRows]]:
    """Functions of five packages, labelled by package; every fifth is validation."""
    rows = [
        (f"{file.name} line {node.lineno}", {"text": text, "label": package})
        for package, files in _demo_files().items()
        for file in files
        for node, text in _function_sources(file.read_text(encoding="utf-8"))
    ]
    if len({row["label"] for _, row in rows}) < 2:
        raise UserError(f"--data demo: {Path(os.__file__).parent} holds no source: give --data PATH")
    return {
        "train": lambda: [row for number, row in enumerate(rows) if number % 5],
        "valid": lambda: [row for number, row in enumerate(rows) if number % 5 == 0],
    }


def _function_sources(source: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    # As ast.get_source_segment, which splits the whole file into lines for every function.
    lines = [line.encode() for line in source.split("\n")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            *before, last = lines[node.lineno - 1 : node.end_lineno]
            text = b"\n".join([*before, last[: node.end_col_offset]])[node.col_offset :]
            yield node, text.decode()
