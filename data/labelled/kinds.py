"""What the labels of texts stand for: a class, a set of classes, a score, or a tag for each word.

A label as read (`Label`) is the text of a cell, a tuple where the cell is a list, None where there is none.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.corpora import random_order
from isobatch.data.readers import TAG, first_tag
from isobatch.data.tables.delimited import is_number

if TYPE_CHECKING:
    from isobatch.data.labelled.rows import ColumnNames, Label, SplitLabels

MAX_CLASSES = 1000
MARKS = ("|", ";")
"""What is between the labels of a cell where they are found to be several; a comma only between numbers."""
LIST, VECTOR, COLUMNS = "list", "vector", "columns"
"""Forms of sets without a mark: lists of labels, or of 0 and 1 for each class; columns with their names."""
LARGEST = float(np.finfo(np.float32).max)
SETS_OF_NUMBERS = re.compile(r"\d+(,\s*\d+)*")
DECIMAL = re.compile(r"(?i)[-+]?\d*\.\d+(e[-+]?\d+)?")
FEWEST_DECIMALS, FEWEST_BESIDE_FLAGS = 0.1, 0.5
"""Share of rows with decimals from which on numbers are scores, and the same where all others are 0 and 1."""


@dataclass(frozen=True, slots=True)
class LabelKind(ABC):
    """What is learnt from a label column."""

    column: str
    """The column, or several with commas between, for messages."""
    form: str = ""
    """How a set is written: what is between its labels, or LIST, VECTOR, COLUMNS."""
    name: ClassVar[str]

    @abstractmethod
    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        """The names in a label; None where there is none. Raises UserError for what is none of this kind."""

    def compare(self, train: SplitLabels) -> None:  # noqa: B027  for those that need it
        """Raise UserError where training labels do not go together."""

    def values(self, split: SplitLabels, names: Sequence[str]) -> np.ndarray:
        """The column `label` of a split's rows; of tags the encoder of words makes it."""
        of = [[name in (found or ()) for name in names] for found in split.names]
        return np.array(of, np.float32)[split.codes]

    def refuse(self, where: str, label: Label, why: str) -> NoReturn:
        """Raise UserError for a label."""
        shown = ", ".join(label) if isinstance(label, tuple) else str(label)
        raise UserError(f"{where}: column {self.column} holds {shown[:40]}, {why}")

    def names(self, found: Sequence[str], data: str) -> list[str]:
        """The names to learn, of those found in training. Raises UserError for too few or too many."""
        if not 2 <= len(found) <= MAX_CLASSES:
            few = f"is {[*found, 'empty'][0]} in every training row: at least two classes are needed"
            many = f"has {len(found):,} different values: at most {MAX_CLASSES} classes"
            said = few if len(found) < 2 else many
            raise UserError(f"--data {data}: {self.column} {said}: --label-column takes another")
        return sorted(found, key=int if all(re.fullmatch(r"-?[0-9]+", name) for name in found) else None)

    def held_out(self, split: SplitLabels, share: float) -> np.ndarray:
        """(n,) bool: a share of the rows, drawn at random, for validation.

        Each label keeps a row for training. The draw depends on the rows alone, not on the recipe's seed:
        runs with several seeds are measured on the same rows.
        """
        rows = [{*(split.names[code] or ())} for code in split.codes.tolist()]
        left, wanted = Counter(name for names in rows for name in names), max(1, round(share * len(rows)))
        held_out, wanted = np.zeros(len(rows), bool), min(wanted, len(rows) - 1)
        for row in random_order(len(rows)).tolist():
            if wanted > 0 and all(left[name] > 1 for name in rows[row]):
                held_out[row], wanted = True, wanted - 1
                left.subtract(rows[row])
        return held_out

    def hold_out(self, split: SplitLabels, share: float) -> np.ndarray:
        """As `held_out`, with equal texts on one side: of each text the row of the rarest label is drawn, so
        that what only it has stays with training. Where that leaves no two labels, as of a few texts, as it.
        """
        rarest = np.argsort(np.bincount(split.codes)[split.codes], kind="stable")
        chosen = np.zeros(len(split), bool)
        chosen[rarest[np.unique(split.hashes[rarest], return_index=True)[1]]] = True
        _, text = np.unique(split.hashes, return_inverse=True)
        held_out = np.zeros(len(text), bool)
        held_out[text[chosen]] = self.held_out(split.take(chosen), share)

        def labels(mask: np.ndarray) -> int:
            return len(np.unique(split.codes[mask]))

        by_text = held_out[text]
        return by_text if labels(by_text) > 1 else max(by_text, self.held_out(split, share), key=labels)

    def balanced(self, counts: np.ndarray, rows: int) -> np.ndarray:  # noqa: ARG002  for those that need it
        """(C,) weights by how often a label is in the training split of so many rows. Raises UserError.

        n / (C * count) (King and Zeng 2001, as in scikit-learn), of which the mean over all labels is 1.
        """
        return np.asarray(counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)))

    def notes(self, split: str, rows: SplitLabels) -> list[str]:  # noqa: ARG002  of kinds that say something
        """What the user should know of a split's labels."""
        return []

    def describe(self, names: Sequence[str], label: np.ndarray, tokens: Sequence[str]) -> str:  # noqa: ARG002
        """A row's label for people; `tokens` are its pieces."""
        return names[int(label)]


class ClassLabels(LabelKind):
    """One class a text. `label` (n,) int64: its number."""

    name = "classes"

    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        if isinstance(label, tuple) or re.fullmatch(r"(?s)\[.*\]|\d+(,\s*\d+)+", label or ""):
            why = "a text has one class (sets: --problem multi-label; decimals have a point)"
            self.refuse(where, label, f"several values: {why}")
        if DECIMAL.fullmatch(label or ""):
            self.refuse(where, label, "a decimal number: a class is a word (scores: --problem regression)")
        return None if label is None else (label,)

    def values(self, split: SplitLabels, names: Sequence[str]) -> np.ndarray:
        of = [names.index(found[0]) if found and found[0] in names else -1 for found in split.names]
        return np.array(of, np.int64)[split.codes]

    def held_out(self, split: SplitLabels, share: float) -> np.ndarray:
        """As of a LabelKind, and a share of the rows of each class."""
        order = random_order(len(split))
        by_class = order[np.argsort(split.codes[order], kind="stable")]
        sizes, names = np.bincount(split.codes, minlength=len(split.labels)).tolist(), split.labels
        counts = [int(size * share) for size in sizes]
        missing = max(1, round(len(split) * share)) - sum(counts)
        for n in sorted(range(len(sizes)), key=lambda n: (counts[n] - sizes[n] * share, str(names[n]))):
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

    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        if label is None and self.form == COLUMNS:
            return None
        written = label
        if isinstance(label, str):
            label = parts_of(label, self.form) if len(self.form) == 1 else (label.strip(),)
        elif self.form == VECTOR:
            label = tuple(str(n) for n, flag in enumerate(label or ()) if flag == "1")
        if "" in (label or ()):
            self.refuse(where, written, "with an empty label among others")
        if any(map(DECIMAL.fullmatch, label or ())):
            self.refuse(where, written, "a decimal number: a label is a word (scores: --problem regression)")
        return tuple(dict.fromkeys(label or ()))

    def compare(self, train: SplitLabels) -> None:
        """Lists of 0 and 1 are as long as the first that holds any."""
        lists = [(len(cell), cell) for cell in train.cells() if self.form == VECTOR and cell]
        for width, cell in lists:
            if width != lists[0][0]:
                where, why = train.first[train.labels.index(cell)], f"{width} numbers, others {lists[0][0]}"
                self.refuse(where, cell, f"{why}: give a 0 or a 1 for each label")

    def balanced(self, counts: np.ndarray, rows: int) -> np.ndarray:
        """(C,) texts without a label over those with it: BCEWithLogitsLoss's pos_weight."""
        return np.asarray(np.maximum(rows - counts, 1) / counts)

    def describe(self, names: Sequence[str], label: np.ndarray, tokens: Sequence[str]) -> str:  # noqa: ARG002
        return ", ".join(names[n] for n in np.flatnonzero(label).tolist()) or "(none)"


class Scores(LabelKind):
    """A number a text. `label` (n,) float32."""

    name = "regression"

    def compare(self, train: SplitLabels) -> None:
        """There are several of them."""
        if len(train.cells()) == 1:
            why = "as every training row: --label-column takes another"
            self.refuse(train.first[0], train.labels[0], why)

    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        if label is None:
            return None
        if not is_number(label) or not abs(float(str(label))) <= LARGEST:
            self.refuse(where, label, "no finite number with a point: leave the row out, or choose --problem")
        return ()

    def names(self, found: Sequence[str], data: str) -> list[str]:  # noqa: ARG002  there are none
        return [self.column]

    def values(self, split: SplitLabels, names: Sequence[str]) -> np.ndarray:  # noqa: ARG002
        return np.array([float(str(label)) for label in split.labels], np.float32)[split.codes]

    def balanced(self, counts: np.ndarray, rows: int) -> np.ndarray:  # noqa: ARG002
        raise UserError("--class-weights: there are no classes in regression: leave it out")

    def describe(self, names: Sequence[str], label: np.ndarray, tokens: Sequence[str]) -> str:  # noqa: ARG002
        return f"{float(label):g}"


class WordTags(LabelKind):
    """A BIO tag for each word. `label`, beside `tokens`: its number at the word's first piece, else -100."""

    name = "tokens"

    def names_in(self, label: Label, where: str) -> tuple[str, ...] | None:
        tags = [first_tag(tag) for tag in label or ()]
        for number, tag in enumerate(tags, 1):
            if not TAG.fullmatch(tag):
                self.refuse(where, tag or "an empty tag", f"of word {number}: tags are O, B-TYPE, I-TYPE")
        return None if label is None else as_bio(tags)

    def names(self, found: Sequence[str], data: str) -> list[str]:
        """O, and B and I of each type, by name."""
        types = sorted({tag[1:] for tag in found if tag != "O"})
        if not types:
            raise UserError(f"--data {data}: {self.column} is O for every training word: no entity is tagged")
        return ["O", *(mark + kind for kind in types for mark in "BI")]

    def notes(self, split: str, rows: SplitLabels) -> list[str]:
        several = sum(first_tag(tag) != tag for label in rows.labels for tag in label or ())
        return [f"{split}: of {several:,} words with several tags the first is taken"] * bool(several)

    def describe(self, names: Sequence[str], label: np.ndarray, tokens: Sequence[str]) -> str:
        tagged = [f"{names[n]} {tokens[place]}" for place, n in enumerate(label.tolist()) if n > 0]  # 0 is O
        return ", ".join(tagged) or "(none)"


KINDS = {kind.name: kind for kind in (ClassLabels, LabelSets, Scores, WordTags)}


def parts_of(text: str, mark: str) -> tuple[str, ...]:
    """The labels of a cell with a mark between them, perhaps behind the last one too."""
    inside = text.strip().removesuffix(mark).strip()
    return tuple(map(str.strip, inside.split(mark))) if inside else ()


def as_bio(tags: Iterable[str]) -> tuple[str, ...]:
    """The same entities in BIO (IOB2): B where one begins, I inside.

    Read as by CoNLL's conlleval: an I behind O or behind another type begins one, so IOB1 is read as well.
    """
    found, inside = list[str](), None
    for tag in tags:
        mark, kind = tag[:1], tag[1:]
        found.append("O" if mark == "O" else ("B" if mark in "BSU" or kind != inside else "I") + kind)
        inside = None if mark in "OESLU" else kind
    return tuple(found)


def find_kind(asked: str, columns: ColumnNames, train: SplitLabels) -> tuple[LabelKind, list[str]]:
    """(what the training labels stand for; a note where nobody asked and it is not classes).

    Raises UserError where the labels are not of the kind that is asked for.
    """
    column, cells = columns.label, train.cells()
    form = COLUMNS if columns.flags else form_of_sets(cells, asked == "multi-label")
    fits = {"tokens": train.words, "multi-label": not train.words}
    if asked != "auto" and not fits.get(asked, not (train.words or columns.flags)):
        has = f"{'lists of words' if train.words else 'texts'} in {columns.text}"
        raise UserError(f"--problem {asked}: the data has {has}, and its labels in {column}")
    if asked != "auto":
        return KINDS[asked](column, form), []
    if train.words:
        return WordTags(column), ["problem: tokens, as there is a tag for each word"]
    if form:
        way = "; --problem classes takes each cell as one" * (form in MARKS)
        return LabelSets(column, form), [f"problem: multi-label, as a text has several labels{way}"]
    if _are_scores(column, train):
        return Scores(column), [f"problem: regression, as there are decimals in column {column}"]
    if not form_of_sets(cells, False, (",",)):
        return ClassLabels(column), []
    one = next(cell for cell in cells if "," in str(cell))
    look = f"each cell is one class, and {one} looks like several: --problem multi-label parts them"
    return ClassLabels(column), [f"problem: classes; {look}"]


def _are_scores(column: str, train: SplitLabels) -> bool:
    """Whether all are numbers with decimals among them. Raises UserError where these are few."""
    cells = train.cells()
    decimals = {c: n for c, n in cells.items() if isinstance(c, str) and DECIMAL.fullmatch(c)}
    if not decimals or not all(c is None or is_number(c) for c in cells):
        return False
    least = FEWEST_BESIDE_FLAGS if {*cells} - {*decimals} <= {"0", "1"} else FEWEST_DECIMALS
    if sum(decimals.values()) < least * len(train):
        where = train.first[train.labels.index(few := next(iter(decimals)))]
        Scores(column).refuse(where, few, "beside whole numbers: mend it, or --problem regression")
    return True


def form_of_sets(cells: Mapping[Label, int], asked: bool, marks: Sequence[str] = MARKS) -> str:
    """What is between the labels of a cell, LIST or VECTOR; nothing where a cell is no set.

    `asked`: whether they are known to be sets. Otherwise numbers with commas are sets unless every cell has
    one comma, as decimals have in many countries; texts with `marks` where most names behind a mark also
    stand first, unlike those of a path (`sport|tennis`), and are fewer than the cells that they form.
    """
    if lists := [cell for cell in cells if isinstance(cell, tuple)]:
        repeats = any(len({*cell}) < len(cell) for cell in lists)
        return VECTOR if repeats and {flag for cell in lists for flag in cell} <= {"0", "1"} else LIST
    texts = [cell for cell in cells if isinstance(cell, str)]
    commas = {text.count(",") for text in texts}
    if all(map(SETS_OF_NUMBERS.fullmatch, texts)) and commas - {0} and (asked or commas != {1}):
        return ","
    for mark in (*marks, *([","] * asked)):
        parts = [parts_of(text, mark) for text in texts]
        firsts, later = ({name for part in parts for name in part[at]} for at in (slice(1), slice(1, None)))
        often = len(firsts | later) < len(parts) and 2 * len(later & firsts) >= len(later)
        if later and (asked or (often and "" not in firsts | later)):
            return mark
    return LIST if asked else ""
