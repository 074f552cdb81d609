"""The rows of labelled texts: their columns, what stands in them, and the demo of Python's own library."""

from __future__ import annotations

import ast
import itertools
import os
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from sys import intern
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import readers
from isobatch.data.corpora import DEMO_PACKAGES, Corpus, taken
from isobatch.data.preparation.encoding import text_hash
from isobatch.data.tables.delimited import USUAL_COLUMNS, simple_name

if TYPE_CHECKING:
    from isobatch.data.labelled.kinds import LabelKind

MAX_TEXT_CHARACTERS = 1_000_000
TEXT_COLUMNS = USUAL_COLUMNS["labelled"]["text"]
"""Usual names of a text column; the first that the data has is taken."""
PAIR_COLUMNS = {"sentence1": "sentence2", "premise": "hypothesis", "question1": "question2"}
LABEL_COLUMNS = USUAL_COLUMNS["labelled"]["label"]
WORD_COLUMNS, TAG_COLUMNS = ("words", "tokens"), ("tags", "ner_tags", "labels", "label")
"""Usual names of the columns of lists, where those of texts and labels are not both there."""
FLAGS = {"0": False, "false": False, "1": True, "true": True}
"""What a column that says of one label whether a text has it may hold."""
PARTED_BY_BLANKS = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^\s,'"\[\]()]+)(\s+(?=[^\s,\])]))?""")
"""A value of a written list, and the blanks that numpy has behind it in place of a comma."""
Label = str | tuple[str, ...] | None
"""A label as read: the text of a cell, a tuple of a list, None where there is none."""


class ColumnNames(NamedTuple):
    """The columns to read; `pair` is None for single texts."""

    text: str
    pair: str | None
    label: str
    """Or several, with commas between."""
    flags: tuple[str, ...] = ()
    """The columns of which each says whether a text has the label that it is called."""


class Example(NamedTuple):
    """One labelled text, pair of texts, or list of words."""

    where: str
    """Its file and line, for error messages."""
    text: str | tuple[str, ...]
    """Empty where it, or the second, is missing."""
    pair: str | None
    """The second text of a pair."""
    label: Label


def find_columns(data: str, available: Sequence[str], options: Any) -> ColumnNames:
    """The columns that `options`, LabelledOptions, name; else the first of the usual names that is available.

    Raises UserError where one is missing.
    """
    text, pair, label = options.text_column, options.pair_column, options.label_column
    flags = tuple(label.split(",")) if label and label not in available and "," in label else ()
    asked = [("--text-column", text), ("--pair-column", pair)]
    for flag, name in [*asked, *(("--label-column", name) for name in flags or (label,))]:
        if name is not None:
            readers.require_name(name, available, data, flag)
    texts = text or usual_name(TEXT_COLUMNS, available)
    classes = label or usual_name(LABEL_COLUMNS, available)
    if options.problem == "tokens" or (options.problem == "auto" and None in (texts, classes)):
        texts = text or usual_name(WORD_COLUMNS, available) or texts
        classes = label or usual_name(TAG_COLUMNS, available) or classes
    if texts is None or classes is None:
        missing = " and ".join(["--text-column"] * (texts is None) + ["--label-column"] * (classes is None))
        has = readers.name_columns(available)
        raise UserError(f"--data {data}: which column? give {missing}; it has: {has}")
    return ColumnNames(texts, pair or usual_name(usual_pair(texts), available), classes, flags)


def usual_name(names: Sequence[str], available: Sequence[str]) -> str | None:
    """The first of the usual names that is there, however it is written: `Review Text` is review_text."""
    found = {simple_name(name): name for name in reversed(available)}
    return next((found[name] for name in map(simple_name, names) if name in found), None)


def usual_pair(text: str) -> tuple[str, ...]:
    """The usual names of the column of second texts beside that of the first."""
    return tuple(pair for first, pair in PAIR_COLUMNS.items() if first == simple_name(text))


def read_examples(rows: readers.LocatedRows, columns: ColumnNames) -> Iterator[Example]:
    """The example in each row, without a text where one is missing. Raises UserError for what is neither a
    string nor a list of words, or very long; and for a label that is an object, or not one for each word.
    """
    first = None
    for where, row in rows:
        label = _label_of(row, where, columns)
        words: Any = row.get(columns.text)
        if isinstance(label, tuple) and isinstance(words, str) and not columns.flags:
            written = _written_list(words)  # a table's cells of words and of their tags
            words = written if isinstance(written, list) and len(written) == len(label) else words
        listed = isinstance(words, list)
        text = _words(words, columns, where) if listed else _text_field(row, columns.text, where)
        pair = None if columns.pair is None else _text_field(row, columns.pair, where, "--pair-column")
        if not text or pair == "":
            yield Example(where, "", None, label)
            continue
        first = listed if first is None else first
        if listed != first or (listed and (pair or columns.flags or isinstance(label, str))):
            both = f"{columns.text} and {columns.label}"
            raise UserError(f"{where}: {both} are lists of words and their tags, in all rows or in none")
        if listed and label is not None and len(text) != len(label):
            raise UserError(f"{where}: has {len(text)} {columns.text} and {len(label)} {columns.label}")
        yield Example(where, text, pair, label)


def _words(words: Sequence[Any], columns: ColumnNames, where: str) -> tuple[str, ...]:
    if not all(isinstance(word, str) for word in words):
        why = "is no list of words: leave the row out, or choose another --text-column"
        raise UserError(f"{where}: {columns.text} {why}")
    return tuple(words)


def _text_field(row: Mapping[str, Any], column: str, where: str, flag: str = "--text-column") -> str:
    text = readers.text_cell(row, column, where, flag)
    if len(text) > MAX_TEXT_CHARACTERS:
        raise UserError(
            f"{where}: {column} has {len(text):,} characters: a quote that is never closed swallows all rows"
            " behind it; mend it, or shorten the text"
        )
    return text if text.strip() else ""


def class_name(value: Any) -> str | None:
    """A label as text, whole numbers without their point; None where there is none."""
    text = str(value).strip()
    if value is None or text.lower() in ("", "nan", "null"):
        return None
    whole = re.fullmatch(r"([-+]?\d+)\.0+", text)
    return str(int(whole[1])) if whole else text


def _label_of(row: Mapping[str, Any], where: str, columns: ColumnNames) -> Label:
    """The label of a row. Raises UserError for an object, a list of lists, and a flag that is neither."""
    cells = {name: class_name(row.get(name)) for name in columns.flags}
    for name, cell in cells.items() if any(cells.values()) else ():
        if str(cell).lower() not in FLAGS:
            raise UserError(f"{where}: column {name} holds {cell}, not 1 or 0: whether a text has that label")
    if columns.flags:
        found = tuple(name for name, cell in cells.items() if FLAGS.get(str(cell).lower()))
        return found if any(cells.values()) else None
    value = row.get(columns.label)
    value = _written_list(value) if isinstance(value, str) else value
    parts = value if isinstance(value, list) else [value]
    written = str(value).strip()
    if any(isinstance(part, dict | list) for part in parts) or written[:1] + written[-1:] == "{}":
        why = "a label is a word, a number or a list; --label-column takes another"
        raise UserError(f"{where}: column {columns.label} holds {written[:40]}: {why}")
    return tuple(intern(class_name(part) or "") for part in parts) if value is parts else class_name(value)


def _written_list(text: str) -> Any:
    """The list that a cell of a table writes as Python, JSON or numpy do, if it is one; else the text."""
    cell = text.strip()
    if cell[:1] + cell[-1:] not in ("[]", "()"):
        return text
    try:
        found = ast.literal_eval(PARTED_BY_BLANKS.sub(lambda at: at[1] + ("," if at[2] else ""), cell))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return [*found] if isinstance(found, list | tuple) else text


def demo_files() -> dict[str, list[Path]]:
    library = Path(os.__file__).parent
    return {package: sorted((library / package).glob("*.py")) for package in DEMO_PACKAGES}


def demo_rows() -> Corpus:
    """Functions of five packages, labelled by package; every fifth is validation."""
    rows = [
        (f"{file.name} line {node.lineno}", {"text": text, "label": package})
        for package, files in demo_files().items()
        for file in files
        for node, text in _function_sources(file.read_text(encoding="utf-8"))
    ]
    if len({row["label"] for _, row in rows}) < 2:
        raise UserError(f"--data demo: {Path(os.__file__).parent} holds no source: give --data PATH")
    valid = rows[::5]
    train = [row for number, row in enumerate(rows) if number % 5]
    return Corpus({"train": lambda: train, "valid": lambda: valid}, columns=("text", "label"))


def _function_sources(source: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    # As ast.get_source_segment, which splits the whole file into lines for every function.
    lines = [line.encode() for line in source.split("\n")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            *before, last = lines[node.lineno - 1 : node.end_lineno]
            yield node, b"\n".join([*before, last[: node.end_col_offset]])[node.col_offset :].decode()


MISREAD = re.compile("[\x80-\x9f]")
"""Characters that no text has: Windows-1252 has quotes and dashes there, and Latin-1 nothing."""
NO_TEXT = "\0"
"""The label of a row without a text."""
WITHHELD_LABELS = (None, "-1")
"""Labels that mean none, as in GLUE's test splits."""


@dataclass(frozen=True, slots=True)
class SplitLabels:
    """What is known of a split's rows without their texts."""

    codes: np.ndarray
    """(n,) int32: the place of each row's label in `labels`."""
    hashes: np.ndarray
    """(n,) uint64, of each row's text, pair or words."""
    labels: tuple[Label, ...]
    """The labels as written, in the order of their first rows; None where a row has none."""
    first: tuple[str, ...]
    """File and line of the first row of each label."""
    words: bool
    """Whether its texts are lists of words."""
    misread: int
    """Rows, as they were read, with MISREAD in their text."""
    names: tuple[tuple[str, ...] | None, ...] = ()
    """What each of `labels` names, when the problem is known."""

    @classmethod
    def read(cls, examples: Iterable[Example]) -> SplitLabels:
        """Those of the examples, one after another; NO_TEXT is the label of one without a text."""
        place: dict[Label, int] = {}
        first: list[str] = []
        codes, hashes, words, misread = array("i"), array("Q"), False, 0
        for where, text, pair, written in examples:
            code = place.setdefault(written if text else NO_TEXT, len(place))
            if code == len(first):
                first.append(where)
            codes.append(code)
            if isinstance(text, tuple):
                text, words = "\n".join(text), True
            whole = text if pair is None else f"{len(text)} {text}{pair}"
            hashes.append(text_hash(whole))
            misread += not whole.isascii() and bool(MISREAD.search(whole))
        arrays = (np.frombuffer(codes, np.int32), np.frombuffer(hashes, np.uint64))
        return cls(*arrays, tuple(place), tuple(first), words, misread)

    def __len__(self) -> int:
        return len(self.codes)

    def take(self, rows: np.ndarray) -> SplitLabels:
        """Those of the rows where this mask is true, with their labels alone."""
        used, codes = np.unique(self.codes[rows], return_inverse=True)
        whole = {name: getattr(self, name) for name in ("labels", "first", "names")}
        of: dict[str, Any] = {name: tuple(each[n] for n in used if each) for name, each in whole.items()}
        return replace(self, codes=codes.astype(np.int32), hashes=self.hashes[rows], **of)

    def named(self, kind: LabelKind) -> SplitLabels:
        """The same with the names in each label. Raises UserError where one is none of this kind."""
        if self.names:
            return self
        return replace(self, names=tuple(map(kind.names_in, self.labels, self.first)))

    def cells(self) -> dict[Label, int]:
        """Label as written -> rows."""
        counts = np.bincount(self.codes, minlength=len(self.labels)).tolist()
        return dict(zip(self.labels, counts, strict=True))

    def counts(self) -> Counter[str]:
        """Name -> how often rows have it."""
        found, named = Counter[str](), dict(zip(self.labels, self.names, strict=True))
        for label, rows in self.cells().items():
            for name in named[label] or ():
                found[name] += rows
        return found


def leave_out(
    splits: dict[str, SplitLabels],
    rows: dict[str, Callable[[], readers.LocatedRows]],
    lack: Callable[[SplitLabels], Iterable[bool]],
    what: str,
    more: str = "fill these cells to keep them",
) -> list[str]:
    """Take out of both the rows that lack something: a line for each split that has such.

    `lack`: whether rows do, for each label of a split; `what` they have; `more` that is said of them.
    """
    notes = []
    for split, found in splits.items():
        lacking = np.array([*lack(found)], bool)[found.codes]
        if count := int(lacking.sum()):
            first = found.first[found.codes[lacking.argmax()]]
            said = f"{split}: {count:,} of {len(found):,} rows have {what} and are left out"
            notes.append(f"{said} (the first: {first}): {more}")
            splits[split] = found.take(~lacking)
            rows[split] = partial(taken, rows[split], ~lacking)
    return notes


def contradictions(split: SplitLabels, values: np.ndarray, examples: Iterable[Example]) -> list[str]:
    """A line on the rows of a split whose text has another label in an earlier row, if any have, with the
    places in the first three texts. `values` (n, ...): the labels.
    """
    _, first, text = np.unique(split.hashes, return_index=True, return_inverse=True)
    other = np.flatnonzero((values != values[first[text]]).reshape(len(text), -1).any(1))
    if not len(other):
        return []
    where = [example.where for example in examples]
    of_texts = np.sort(other[np.unique(text[other], return_index=True)[1]])
    pairs = (f"{where[row]} and {where[first[text[row]]]}" for row in of_texts[:3])
    return [f"{len(other):,} rows have the text of an earlier row and another label: {'; '.join(pairs)}"]


def leave_out_unknown(
    splits: dict[str, SplitLabels], rows: dict[str, Callable[[], readers.LocatedRows]], learnt: list[str]
) -> list[str]:
    """As `leave_out`, of a file that is measured the rows with a label that the model has not learnt.

    Raises UserError where all have one.
    """
    counts = splits["valid"].counts().most_common()
    strange = first_names([f"{name} ({count:,})" for name, count in counts if name not in learnt])
    what, more = "a label that the model does not know", f"{strange}; it knows {first_names(learnt)}"
    known = {*learnt}
    notes = leave_out(splits, rows, lambda of: [not known >= {*(one or ())} for one in of.names], what, more)
    if not len(splits["valid"]):
        raise UserError(f"{notes[0].removeprefix('valid: ')}: --label-column takes another column")
    return notes


def learnt_names(kind: LabelKind, splits: Mapping[str, SplitLabels], data: str) -> list[str]:
    """The names to learn, of the training split: see `LabelKind.names`.

    Raises UserError for too few or too many, and for held-out labels that are none of them.
    """
    names = kind.names([*splits["train"].counts()], data)
    for split, rows in splits.items():
        for where, found in zip(rows.first, rows.names, strict=True):
            if strange := {*(found or ())} - {*names}:
                what = f"the {split} split has the label {min(strange)}, which no training row has"
                raise UserError(f"{where}: {what}")
    return names


def alike_names(labels: list[str], counts: Mapping[str, int]) -> list[str]:
    """A line on labels that look alike: they differ in case, blanks or the encoding of letters alone."""

    def look(name: str) -> str:
        return " ".join(unicodedata.normalize("NFC", name).casefold().split())

    alike = ([*names] for _, names in itertools.groupby(sorted(labels, key=look), look))
    shown = [" and ".join(f"{n!r} ({counts[n]:,})" for n in names) for names in alike if names[1:]]
    said = f"labels that differ only in case, blanks or encoding are learnt apart: {first_names(shown)}"
    return [f"{said}: if they are one, write them alike in the data"] if shown else []


def first_names(names: Sequence[str]) -> str:
    """The first eight, for a message."""
    return ", ".join(names[:8]) + ", ..." * (len(names) > 8)


def class_weights(
    asked: Any, kind: LabelKind, labels: list[str], counts: np.ndarray, rows: int
) -> np.ndarray:
    """(C,) float32: what a sample of each class counts in the loss.

    `counts` (C,): how often each is in the `rows` of training. Raises UserError for another number of them.
    """
    balanced = kind.balanced(counts, rows)
    if asked != "balanced" and len(asked) != len(labels):
        given = ",".join(f"{weight:g}" for weight in asked)
        has = f"the data has {len(labels)} classes ({first_names(labels)})"
        raise UserError(f"--class-weights {given}: {has}: give a number for each, in this order")
    return np.array(balanced if asked == "balanced" else asked, np.float32)
