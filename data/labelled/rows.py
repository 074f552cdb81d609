"""The rows of labelled texts: their columns, what stands in them, and the demo of Python's own library."""

from __future__ import annotations

import ast
import math
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import readers
from isobatch.data.corpora import DEMO_PACKAGES, random_order
from isobatch.data.preparation.encoding import text_hash

if TYPE_CHECKING:
    from isobatch.data.readers import LocatedRows

MAX_TEXT_CHARACTERS = 1_000_000
TEXT_COLUMNS = (
    *("sentence", "text", "sentence1", "premise", "question1", "question"),
    *("content", "comment", "review", "message", "tweet", "body", "feedback", "description"),
)
"""Usual names of a text column; the first that the data has is taken."""
PAIR_COLUMNS = {"sentence1": "sentence2", "premise": "hypothesis", "question1": "question2"}
LABEL_COLUMNS = ("label", "labels", "class", "category", "target", "sentiment", "intent", "topic", "emotion")


class ColumnNames(NamedTuple):
    """The columns to read; `pair` is None for single texts."""

    text: str
    pair: str | None
    label: str


class Example(NamedTuple):
    """One labelled text or pair of texts."""

    where: str
    """Its file and line, for error messages."""
    text: str
    pair: str | None
    """The second text of a pair."""
    label: str | None
    """The class as written; None where the row has none."""


def find_columns(data: str, available: Sequence[str], options: Any) -> ColumnNames:
    """The columns that `options`, LabelledOptions, name; else the first of the usual names that is available.

    Raises UserError where one is missing.
    """
    text, pair, label = options.text_column, options.pair_column, options.label_column
    for flag, asked in {"--text-column": text, "--pair-column": pair, "--label-column": label}.items():
        if asked is not None:
            readers.require_name(asked, available, data, flag)
    texts, classes = text or _usual(TEXT_COLUMNS, available), label or _usual(LABEL_COLUMNS, available)
    if texts is None or classes is None:
        flags = " and ".join(["--text-column"] * (texts is None) + ["--label-column"] * (classes is None))
        has = readers.name_columns(available)
        raise UserError(f"--data {data}: which column? give {flags}; it has: {has}")
    if pair is None and PAIR_COLUMNS.get(texts) in available:
        pair = PAIR_COLUMNS[texts]
    return ColumnNames(texts, pair, classes)


def _usual(names: Sequence[str], available: Sequence[str]) -> str | None:
    """The first of the usual names that is there, in letters of any size."""
    found = {name.lower(): name for name in reversed(available)}
    return next((found[name] for name in names if name in found), None)


def read_examples(rows: LocatedRows, columns: ColumnNames) -> Iterator[Example]:
    """The example in each row. Raises UserError for a text that is missing, not a string, or very long."""
    for where, row in rows:
        text = _text_field(row, columns.text, where, "--text-column")
        pair = None if columns.pair is None else _text_field(row, columns.pair, where, "--pair-column")
        yield Example(where, text, pair, _parse_label(row.get(columns.label), where, columns.label))


def _text_field(row: Mapping[str, Any], column: str, where: str, flag: str) -> str:
    text = readers.text_cell(row, column, where, flag)
    if not text.strip():
        raise UserError(f"{where}: {column} is empty: leave the row out, or choose another {flag}")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UserError(
            f"{where}: {column} has {len(text):,} characters: a quote that is never closed swallows all rows"
            " behind it; mend it, or shorten the text"
        )
    return text


def class_name(value: Any) -> str | None:
    """A label as text, whole numbers without their point; None where there is none."""
    text = str(value).strip()
    if value is None or text.lower() in ("", "nan", "null"):
        return None
    whole = re.fullmatch(r"([-+]?\d+)\.0+", text)
    return str(int(whole[1])) if whole else text


def _parse_label(value: Any, where: str, column: str) -> str | None:
    """As `class_name`.

    Raises UserError for what is no class: a list, an object, a decimal number, numbers with commas between.
    """
    text = class_name(value) or ""
    listed = re.fullmatch(r"\[.*\]|\{.*\}|\d+(,\s*\d+)+", text, re.DOTALL)
    if listed or re.fullmatch(r"(?i)[-+]?\d*\.\d+(e[-+]?\d+)?", text):
        kind = "several values" if listed else "a decimal number"
        raise UserError(
            f"{where}: column {column} holds {text[:40]}, {kind}: a text has one class of a set, a word or a"
            " whole number; several labels a text, and scores, are not offered; --label-column takes another"
        )
    return text or None


def demo_files() -> dict[str, list[Path]]:
    library = Path(os.__file__).parent
    return {package: sorted((library / package).glob("*.py")) for package in DEMO_PACKAGES}


def demo_rows() -> dict[str, Callable[[], LocatedRows]]:
    """Functions of five packages, labelled by package; every fifth is validation."""
    rows = [
        (f"{file.name} line {node.lineno}", {"text": text, "label": package})
        for package, files in demo_files().items()
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


WITHHELD_LABELS = (None, "-1")
"""Labels that mean none, as in GLUE's test splits."""
MAX_CLASSES = 1000


@dataclass(frozen=True, slots=True)
class SplitClasses:
    """What is known of a split's rows without their texts."""

    codes: np.ndarray
    """(n,) int32: the place of each row's label in `labels`."""
    hashes: np.ndarray
    """(n,) uint64, of each row's text or pair."""
    labels: tuple[str | None, ...]
    """The labels as written, in the order of their first rows; None where a row has none."""
    first: tuple[str, ...]
    """File and line of the first row of each label."""

    @classmethod
    def read(cls, examples: Iterable[Example]) -> SplitClasses:
        """Those of the examples, one after another."""
        place: dict[str | None, int] = {}
        first: list[str] = []
        codes, hashes = array("i"), array("Q")
        for where, text, pair, label in examples:
            code = place.setdefault(label, len(place))
            if code == len(first):
                first.append(where)
            codes.append(code)
            hashes.append(text_hash(text if pair is None else f"{len(text)} {text}{pair}"))
        arrays = (np.frombuffer(codes, np.int32), np.frombuffer(hashes, np.uint64))
        return cls(*arrays, tuple(place), tuple(first))

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: np.ndarray) -> SplitClasses:
        """Those of the rows where this mask is true."""
        return SplitClasses(self.codes[rows], self.hashes[rows], self.labels, self.first)

    def counts(self) -> dict[str | None, int]:
        """Label -> rows, of those labels that rows have."""
        found = np.bincount(self.codes, minlength=len(self.labels)).tolist()
        return {label: count for label, count in zip(self.labels, found, strict=True) if count}

    def where(self, label: str | None) -> str:
        """File and line of the first row with this label."""
        return self.first[self.labels.index(label)]

    def numbers(self, names: Sequence[str]) -> np.ndarray:
        """(n,) int64: the place of each row's label in `names`."""
        number = {name: n for n, name in enumerate(names)}
        of = np.array([number.get(label or "", -1) for label in self.labels], np.int64)
        return of[self.codes]


def held_out_rows(classes: SplitClasses, share: float) -> np.ndarray:
    """(n,) bool: a share of the rows of each class, drawn at random, for validation.

    Each class keeps a row for training. The draw depends on the rows alone, not on the recipe's seed: runs
    with several seeds are measured on the same rows.
    """
    order = random_order(len(classes))
    by_class = order[np.argsort(classes.codes[order], kind="stable")]
    sizes = classes.counts()
    counts = {label: math.floor(size * share) for label, size in sizes.items()}
    missing = max(1, round(len(classes) * share)) - sum(counts.values())
    for label in sorted(sizes, key=lambda label: (counts[label] - sizes[label] * share, str(label))):
        if missing > 0 and counts[label] < sizes[label] - 1:  # the largest remainders are rounded up
            counts[label], missing = counts[label] + 1, missing - 1
    held_out, start = np.zeros(len(classes), bool), 0
    for label, size in sizes.items():
        held_out[by_class[start : start + counts[label]]] = True
        start += size
    return held_out


def drop_unlabelled_test(splits: dict[str, SplitClasses]) -> list[str]:
    """Remove a test split that has no labels, in place; returns a note for the user if it did."""
    if splits.get("test") and all(label in WITHHELD_LABELS for label in splits["test"].counts()):
        del splits["test"]
        return ["the test split has no labels and is left out"]
    return []


def class_names(splits: Mapping[str, SplitClasses], columns: ColumnNames, data: str) -> list[str]:
    """The classes of the training split: in numeric order where all are whole numbers, else by name.

    Raises UserError for missing labels, fewer than two classes, more than MAX_CLASSES, and labels that only
    another split has.
    """
    for split, classes in splits.items():
        if missing := classes.counts().get(None):
            raise UserError(
                f"{classes.where(None)}: {columns.label} is empty in the {split} split, in {missing:,} of"
                f" {len(classes):,} rows: leave such rows out"
            )
    counts = [label for label in splits["train"].counts() if label is not None]
    if not 2 <= len(counts) <= MAX_CLASSES:
        few = f"is {[*counts, 'empty'][0]} in every training row: at least two classes are needed"
        many = f"has {len(counts):,} different values: at most {MAX_CLASSES} classes"
        raise UserError(
            f"--data {data}: {columns.label} {few if len(counts) < 2 else many}: --label-column takes another"
        )
    for split, classes in splits.items():
        if strange := next((label for label in classes.counts() if label not in counts), None):
            where = f"{classes.where(strange)}: the {split} split has the label {strange}"
            raise UserError(f"{where}, which no training row has")
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
