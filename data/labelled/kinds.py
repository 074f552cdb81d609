"""What the labels of texts stand for: a class, a set of classes, a number, or a tag for each word.

A label as read (`Label`) is the text of a cell, a tuple where the cell is a list, None where there is none.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.corpora import random_order
from isobatch.data.readers import TAG
from isobatch.data.tables.delimited import is_number

if TYPE_CHECKING:
    from isobatch.data.labelled.rows import ColumnNames, Label, SplitLabels

MAX_CLASSES = 1000
MARKS = ("|", ";")
"""What is between the labels of a cell where they are found to be several; a comma only between numbers."""
VECTOR = "vector"
"""The form of sets that are lists of 0 and 1, one for each class."""
COLUMNS = "columns"
"""The form of sets that are columns of 0 and 1, called by the classes."""
SETS_OF_NUMBERS = re.compile(r"\d+(,\s*\d+)*")
DECIMAL = re.compile(r"(?i)[-+]?\d*\.\d+(e[-+]?\d+)?")
FEWEST_DECIMALS, FEWEST_BESIDE_FLAGS = 0.1, 0.5
"""Share of rows with decimals from which on numbers are scores, and the same where all others are 0 and 1."""


@dataclass(frozen=True, slots=True)
class LabelKind(ABC):
    """What is learnt from a label column."""

    column: str
    """The column, or columns with commas between, for messages."""
    form: str = ""
    """How a set is written: what is between its labels, VECTOR, COLUMNS, or nothing where it is a list."""
    name: ClassVar[str]
    nothing: ClassVar[str] = "is empty"
    """What is said of a cell without a label."""

    @abstractmethod
    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        """The names in a label; None where there is none. Raises UserError for what is none of this kind."""

    def names(self, found: Mapping[str, int], data: str) -> list[str]:
        """The names to learn, of those found in training with their counts. Raises UserError."""
        if not 2 <= len(found) <= MAX_CLASSES:
            few = f"is {[*found, 'empty'][0]} in every training row: at least two classes are needed"
            many = f"has {len(found):,} different values: at most {MAX_CLASSES} classes"
            said = few if len(found) < 2 else many
            raise UserError(f"--data {data}: {self.column} {said}: --label-column takes another")
        whole = all(re.fullmatch(r"-?[0-9]+", name) for name in found)
        return sorted(found, key=int) if whole else sorted(found)

    def held_out(self, split: SplitLabels, share: float) -> np.ndarray:
        """(n,) bool: a share of the rows, drawn at random, for validation: at least one, and never all.

        Each label keeps a row for training. The draw depends on the rows alone, not on the recipe's seed:
        runs with several seeds are measured on the same rows.
        """
        rows = [set(split.names[code] or ()) for code in split.codes.tolist()]
        left, held_out = Counter(name for names in rows for name in names), np.zeros(len(rows), bool)
        wanted = min(max(1, round(share * len(rows))), len(rows) - 1)
        for row in random_order(len(rows)).tolist():
            if wanted > 0 and all(left[name] > 1 for name in rows[row]):
                held_out[row], wanted = True, wanted - 1
                left.subtract(rows[row])
        return held_out

    def count(self, values: np.ndarray, size: int) -> np.ndarray:
        """(C,) int64: how often each of `size` labels is in a column's values."""
        found: np.ndarray = np.bincount(values[values >= 0], minlength=size)
        return found

    @abstractmethod
    def values(self, split: SplitLabels, names: Sequence[str]) -> np.ndarray:
        """The column `label` of a split's rows."""

    def weights(self, asked: Literal["balanced"] | tuple[float, ...], counts: np.ndarray, rows: int) -> Any:  # noqa: ARG002
        """(C,) what a label counts in the loss; `counts` (C,): of each in training, which has `rows`.

        balanced is n / (C * count) (King and Zeng 2001, as in scikit-learn), of which the mean over all is 1.
        Raises UserError where it means nothing.
        """
        there = np.maximum(counts, 1)
        return counts.sum() / (np.count_nonzero(counts) * there) if asked == "balanced" else asked

    def notes(self, splits: Mapping[str, SplitLabels]) -> list[str]:  # noqa: ARG002  of kinds that say something
        """What the user should know of the labels, one line each."""
        return []

    def describe(self, names: Sequence[str], label: np.ndarray, tokens: Sequence[str]) -> str:  # noqa: ARG002
        """A row's label for people; `tokens` are its pieces."""
        return names[int(label)]


class ClassLabels(LabelKind):
    """One class a text. `label` (n,) int64: its number."""

    name = "classes"
    __slots__ = ()

    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        listed = isinstance(label, tuple) or re.fullmatch(r"\[.*\]|\d+(,\s*\d+)+", label or "", re.DOTALL)
        if listed or DECIMAL.fullmatch(str(label)):
            kind = "several values" if listed else "a decimal number"
            instead = "multi-label learns sets of labels" if listed else "regression learns scores"
            shown = ", ".join(label) if isinstance(label, tuple) else label
            raise UserError(
                f"{where}: column {self.column} holds {str(shown)[:40]}, {kind}: a text has one class of"
                f" a set, a word or a whole number; --problem {instead}; --label-column takes another"
            )
        assert not isinstance(label, tuple)
        return None if label is None else (label,)

    def values(self, split: SplitLabels, names: Sequence[str]) -> np.ndarray:
        number = {name: n for n, name in enumerate(names)}
        of = np.array([number.get(found[0] if found else "", -1) for found in split.names], np.int64)
        return of[split.codes]

    def held_out(self, split: SplitLabels, share: float) -> np.ndarray:
        """As of a LabelKind, and a share of the rows of each class."""
        order = random_order(len(split))
        by_class = order[np.argsort(split.codes[order], kind="stable")]
        sizes = np.bincount(split.codes, minlength=len(split.labels)).tolist()
        counts = [int(size * share) for size in sizes]
        missing = max(1, round(len(split) * share)) - sum(counts)
        for n in sorted(
            range(len(sizes)), key=lambda n: (counts[n] - sizes[n] * share, str(split.labels[n]))
        ):
            if missing > 0 and counts[n] < sizes[n] - 1:  # the largest remainders are rounded up
                counts[n], missing = counts[n] + 1, missing - 1
        held_out, start = np.zeros(len(split), bool), 0
        for size, count in zip(sizes, counts, strict=True):
            held_out[by_class[start : start + count]] = True
            start += size
        return held_out


class LabelSets(LabelKind):
    """Any number of classes a text. `label` (n, C) float32: 1 where the text has the class."""

    name = "multi-label"
    __slots__ = ()

    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        if self.form == VECTOR and isinstance(label, tuple):
            return tuple(str(n) for n, flag in enumerate(label) if flag == "1")
        if label is None and self.form == COLUMNS:
            return None
        if isinstance(label, str):
            label = tuple(part.strip() for part in label.split(self.form)) if self.form else (label,)
        if "" in (label or ()):
            raise UserError(f"{where}: column {self.column} holds an empty label among others")
        return tuple(dict.fromkeys(label or ()))

    def values(self, split: SplitLabels, names: Sequence[str]) -> np.ndarray:
        number = {name: n for n, name in enumerate(names)}
        of = np.zeros((len(split.names), len(names)), np.float32)
        for row, found in zip(of, split.names, strict=True):
            row[[number[name] for name in found or ()]] = 1
        return of[split.codes]

    def count(self, values: np.ndarray, size: int) -> np.ndarray:  # noqa: ARG002
        return values.sum(0, dtype=np.float64).astype(np.int64)

    def weights(self, asked: Literal["balanced"] | tuple[float, ...], counts: np.ndarray, rows: int) -> Any:
        """(C,) what a text that has the label counts beside one that has not: BCEWithLogitsLoss's pos_weight.

        balanced is the texts without it over those with it.
        """
        return np.maximum(rows - counts, 1) / np.maximum(counts, 1) if asked == "balanced" else asked

    def describe(self, names: Sequence[str], label: np.ndarray, tokens: Sequence[str]) -> str:  # noqa: ARG002
        return ", ".join(names[n] for n in np.flatnonzero(label).tolist()) or "(none)"


class Scores(LabelKind):
    """A number a text. `label` (n,) float32."""

    name, nothing = "regression", "holds no number"
    __slots__ = ()

    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        if label is None:
            return None
        if isinstance(label, tuple) or not is_number(label) or not np.isfinite(np.float32(label)):
            shown = ", ".join(label) if isinstance(label, tuple) else label
            raise UserError(
                f"{where}: column {self.column} holds {shown[:40]}, which is no finite number (with a point"
                " before its decimals): mend it or leave the row out; --problem classes learns names"
            )
        return ()

    def names(self, found: Mapping[str, int], data: str) -> list[str]:  # noqa: ARG002
        return [self.column]

    def values(self, split: SplitLabels, names: Sequence[str]) -> np.ndarray:  # noqa: ARG002
        return np.array([float(str(label)) for label in split.labels], np.float32)[split.codes]

    def count(self, values: np.ndarray, size: int) -> np.ndarray:  # noqa: ARG002
        return np.array([len(values)])

    def weights(self, asked: Any, counts: np.ndarray, rows: int) -> Any:  # noqa: ARG002
        raise UserError("--class-weights: there are no classes in regression: leave it out")

    def describe(self, names: Sequence[str], label: np.ndarray, tokens: Sequence[str]) -> str:  # noqa: ARG002
        return f"{float(label):g}"


class WordTags(LabelKind):
    """A BIO tag for each word. `label`, beside `tokens`: its number at the word's first piece, else -100."""

    name = "tokens"
    __slots__ = ()

    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        if label is None:
            return None
        tags = [first_tag(tag) for tag in label]
        if (bad := next((n for n, tag in enumerate(tags) if not TAG.fullmatch(tag)), None)) is not None:
            holds = f"the tag {tags[bad]}" if tags[bad] else "an empty tag"
            raise UserError(
                f"{where}: word {bad + 1} has {holds} in {self.column}: tags are O, and B- or I- before the"
                " name of a type (BIO; IOB1, BIOES and BILOU are read too)"
            )
        return as_bio(tags)

    def names(self, found: Mapping[str, int], data: str) -> list[str]:
        """O, and B and I of each type, by name."""
        types = sorted({tag[1:] for tag in found if tag != "O"})
        if not types:
            raise UserError(f"--data {data}: {self.column} is O for every training word: no entity is tagged")
        return ["O", *(mark + kind for kind in types for mark in "BI")]

    def values(self, split: SplitLabels, names: Sequence[str]) -> np.ndarray:  # noqa: ARG002
        raise AssertionError("tags are of tokens")

    def notes(self, splits: Mapping[str, SplitLabels]) -> list[str]:
        found, written = list[str](), "first tags of entities are written I-: they count as B-, as in IOB1"
        for split, rows in splits.items():
            several = sum(first_tag(tag) != tag for label in rows.labels for tag in label or ())
            found += [f"{split}: of {several:,} words with several tags the first is taken"] * bool(several)
            both = zip(rows.labels, rows.names, strict=True)
            tags = (pair for label, names in both for pair in zip(label or (), names or (), strict=True))
            begun = sum(tag[0] == "I" and name[0] == "B" for tag, name in tags)
            found += [f"{split}: {begun:,} {written}"] * bool(begun)
        return found

    def describe(self, names: Sequence[str], label: np.ndarray, tokens: Sequence[str]) -> str:
        tagged = ((names[n], token) for n, token in zip(label.tolist(), tokens, strict=False) if n >= 0)
        return ", ".join(f"{tag} {token}" for tag, token in tagged if tag != "O") or "(none)"


KINDS = {kind.name: kind for kind in (ClassLabels, LabelSets, Scores, WordTags)}


def first_tag(tag: str) -> str:
    """The tag; where several annotators' are joined by commas, the first."""
    parts = tag.split(",")
    return parts[0] if all(TAG.fullmatch(part) for part in parts) else tag


def as_bio(tags: Sequence[str]) -> tuple[str, ...]:
    """The same entities in BIO (IOB2): B where one begins, I inside.

    Read as by CoNLL's conlleval: an I behind O or behind another type begins one, so IOB1 is read as well.
    """
    found, inside = [], None
    for tag in tags:
        mark, kind = tag[:1], tag[1:]
        if mark == "O":
            found.append("O")
        else:
            found.append(("B" if mark in "BSU" or kind != inside else "I") + kind)
        inside = None if mark in "OESLU" else kind
    return tuple(found)


def find_kind(asked: str, columns: ColumnNames, train: SplitLabels) -> tuple[LabelKind, list[str]]:
    """(what the training labels stand for; a note where nobody asked and it is not classes).

    Raises UserError where the labels are not of the kind that is asked for.
    """
    column, cells = columns.label, train.cells()
    if train.words != (asked == "tokens") and (asked != "auto" or (columns.flags and train.words)):
        has = "lists of words, which take a tag each" if train.words else "texts, not lists of words"
        raise UserError(f"--problem {asked}: the column {columns.text} holds {has}")
    if columns.flags and asked not in ("auto", "multi-label"):
        raise UserError(f"--problem {asked}: has one label column, not {column}")
    form = COLUMNS if columns.flags else form_of_sets(cells, asked == "multi-label")
    if asked != "auto":
        return KINDS[asked](column, form), []
    example = next((c for c in cells if isinstance(c, tuple) or (form and form in str(c))), None)
    if train.words:
        return WordTags(column), ["problem: tokens, as there is a tag for each word"]
    if columns.flags or isinstance(example, tuple):
        return LabelSets(column, form), ["problem: multi-label, as a text has a list of labels"]
    if form:
        said = f"problem: multi-label, as column {column} holds {example}"
        way = "; --problem classes takes each as one class" * (form in MARKS)
        return LabelSets(column, form), [said + way]
    if _are_scores(column, cells, train):
        return Scores(column), [f"problem: regression, as column {column} holds decimal numbers"]
    bars = next((mark for mark in MARKS if any(mark in str(c) for c in cells)), "")
    way = f"classes are taken as they stand, with {bars} inside: --problem multi-label reads them as sets"
    return ClassLabels(column), [way] * bool(bars)


def _are_scores(column: str, cells: Mapping[Label, int], train: SplitLabels) -> bool:
    """Whether all are numbers with decimals among them. Raises UserError where these are few."""
    decimals = {c: n for c, n in cells.items() if isinstance(c, str) and DECIMAL.fullmatch(c)}
    if not decimals or not all(c is None or is_number(c) for c in cells):
        return False
    others = {*cells} - {*decimals}
    least = FEWEST_BESIDE_FLAGS if others <= {"0", "1"} else FEWEST_DECIMALS
    if sum(decimals.values()) < least * len(train):
        first = next(iter(decimals))
        raise UserError(
            f"{train.where(first)}: column {column} holds {first}, and most rows whole numbers: mend it, or"
            " --problem regression takes all as scores"
        )
    return True


def form_of_sets(cells: Mapping[Label, int], asked: bool) -> str:
    """What is between the labels of a cell, VECTOR, or nothing where a cell has one or is a list.

    `asked`: whether they are known to be sets. Otherwise numbers with commas are sets unless every cell has
    one comma, as decimals have in many countries; texts with MARKS where most names that stand behind a mark
    also stand first, unlike those of a path (`sport|tennis`), and are fewer than the cells that they form.
    """
    lists = [cell for cell in cells if isinstance(cell, tuple)]
    if lists:
        flags = len({len(cell) for cell in lists}) == 1 and all({*cell} <= {"0", "1"} for cell in lists)
        return VECTOR if flags and any(len({*cell}) < len(cell) for cell in lists) else ""
    texts = [cell for cell in cells if isinstance(cell, str)]
    commas = {text.count(",") for text in texts}
    if all(map(SETS_OF_NUMBERS.fullmatch, texts)) and commas - {0} and (asked or commas != {1}):
        return ","
    for mark in (*MARKS, *([","] * asked)):
        parts = [[part.strip() for part in text.split(mark)] for text in texts]
        later = {name for part in parts for name in part[1:]}
        firsts, names = {part[0] for part in parts}, {name for part in parts for name in part}
        often = len(names) < len(parts) and 2 * len(later & firsts) >= len(later) and "" not in names
        if later and (asked or often):
            return mark
    return ""
