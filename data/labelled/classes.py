"""The classes of a split, read once: a number and a hash a row, whatever the texts are."""

from __future__ import annotations

import itertools
import math
import re
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.held_out import random_order
from isobatch.data.preparation.encoding import text_hash

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from isobatch.data.labelled.rows import ColumnNames, Example
    from isobatch.data.readers import LocatedRows

WITHHELD_LABELS = (None, "-1")
"""Labels that mean none, as in GLUE's test splits."""
MAX_CLASSES = 1000
MIN_IDENTIFIERS, SAMPLED_ROWS = 50, 1000
"""From so many rows on, a class for each is an identifier; rows in which fewer values are looked for."""


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
        found: np.ndarray = of[self.codes]
        return found

    def shared_with(self, other: SplitClasses) -> int:
        """Rows whose text the other split has too."""
        return int(np.isin(self.hashes, other.hashes).sum())


def held_out_rows(classes: SplitClasses, share: float) -> np.ndarray:
    """(n,) bool: a share of the rows of each class, drawn at random, for validation.

    Each class keeps a row for training. The draw depends on the rows alone, not on the recipe's seed: runs
    with several seeds are measured on the same rows.
    """
    order = random_order(len(classes))
    by_class = order[np.argsort(classes.codes[order], kind="stable")]
    sizes = classes.counts()
    held_out, start = np.zeros(len(classes), bool), 0
    counts = _share_out(sizes, share)
    for label, size in sizes.items():
        held_out[by_class[start : start + counts[label]]] = True
        start += size
    return held_out


def _share_out(sizes: Mapping[str | None, int], share: float) -> dict[str | None, int]:
    """How many of each class are held out: the largest remainders are rounded up, at least 1 in all."""
    counts = {label: math.floor(size * share) for label, size in sizes.items()}
    missing = max(1, round(sum(sizes.values()) * share)) - sum(counts.values())
    for label in sorted(sizes, key=lambda label: (counts[label] - sizes[label] * share, str(label))):
        if missing > 0 and counts[label] < sizes[label] - 1:
            counts[label], missing = counts[label] + 1, missing - 1
    return counts


def drop_unlabelled_test(splits: dict[str, SplitClasses]) -> list[str]:
    """Remove a test split that has no labels, in place; returns a note for the user if it did."""
    if splits.get("test") and all(label in WITHHELD_LABELS for label in splits["test"].counts()):
        del splits["test"]
        return ["the test split has no labels and is left out"]
    return []


def refuse_identifiers(classes: SplitClasses, column: str, rows: LocatedRows, data: str) -> None:
    """Raise UserError where every training row has a class of its own. `rows`: those of the split."""
    if len(classes) < MIN_IDENTIFIERS or len(classes.labels) < len(classes):
        return
    values: dict[str, set[str]] = {}
    for _, row in itertools.islice(rows, SAMPLED_ROWS):
        for name, value in row.items():
            values.setdefault(str(name), set()).add(str(value))
    labels = [name for name, found in values.items() if 1 < len(found) <= MIN_IDENTIFIERS]
    hint = f"; labels may be in: {', '.join(labels)}" if labels else ""
    count = len(classes)
    raise UserError(
        f"--data {data}: {count:,} classes for {count:,} rows: is `{column}` an identifier? Choose another"
        f" --label-column{hint}"
    )


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
    counts = Counter({label: count for label, count in splits["train"].counts().items() if label is not None})
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
    for split, classes in splits.items():
        if strange := next((label for label in classes.counts() if label not in counts), None):
            raise UserError(
                f"{classes.where(strange)}: the {split} split has the label {strange}, which no training row"
                " has"
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
