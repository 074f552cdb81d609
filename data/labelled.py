"""Labelled texts, or pairs of texts, as token ids with special tokens and a class each."""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import hub, readers, tokenizers
from isobatch.data.base import Column, Columns, Ragged, save
from isobatch.data.corpora import DEMO, DEMO_PACKAGES, named_rows
from isobatch.data.readers import Rows
from isobatch.data.tokenized import Tokenized

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEXTS = ("sentence", "text", "sentence1", "premise", "question1", "question")
"""Usual names of a text column; the first that is there is taken."""
PAIRS = {"sentence1": "sentence2", "premise": "hypothesis", "question1": "question2"}
LABELS = ("label", "labels", "class", "category", "target")
WITHHELD = (None, "-1")
"""What GLUE's test splits have in place of labels."""
MOST_CLASSES = 1000
LONGEST_TEXT = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledOptions:
    """The fields of labelled texts."""

    text_column: str | None = None
    """The column that holds the text; by default the first of the usual names (sentence, text, ...)."""
    pair_column: str | None = None
    """The column of a second text, for pairs; by default sentence2, hypothesis or question2."""
    label_column: str | None = None
    """The column that holds the class; by default label, labels, class, category or target."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the data, where no model brings one; by default 8192."""
    data_config: str | None = None
    """The configuration of a hub data set that has several, such as sst2 of glue."""


class Example(NamedTuple):
    """One row: a text, perhaps a second one, its class as written (None where a row has none)."""

    where: str
    text: str
    pair: str | None
    label: str | None


Splits = Mapping[str, Callable[[], Rows]]


class Names(NamedTuple):
    """The columns to read."""

    text: str
    pair: str | None
    label: str


class Labelled(Tokenized):
    """Labelled texts from a folder, a file, a hub id, or the demo.

    Columns: `tokens` (n, up to max_length) with the tokenizer's special tokens, `types` of the same shape
    for pairs (0 for the first text, 1 for the second), and `label` (n,) int64, the number of the class.
    The demo: which package of Python's own standard library a function comes from.
    """

    Options: ClassVar[type] = LabelledOptions
    version: ClassVar[int] = 2
    cache_name: ClassVar[str] = "data.labelled.Labelled"
    demo_vocabulary: ClassVar[int] = 2048

    def check(self) -> None:
        size = self.options.vocab_size
        if size is not None and size < 300:
            raise UserError(f"--vocab-size {size}: must be at least 300: characters and special tokens")
        self._place()
        path = self._path()
        if path is not None:
            for part in readers.find(path, self.recipe.format).values():
                if part.is_stream:
                    raise UserError(
                        f"--data {path}: a .txt file has no labels: give tsv, csv, jsonl, json or parquet"
                    )
            self._names(readers.columns(readers.find(path, self.recipe.format)["train"]))
        elif self.recipe.data != DEMO:
            hub.require_dataset(self.recipe.data)

    def _names(self, there: Sequence[str]) -> Names:
        """The columns among those there are: the ones asked for, else the first of the usual names."""
        options = self.options
        return find_names(
            self.recipe.data, there, options.text_column, options.pair_column, options.label_column
        )

    def identity(self) -> dict[str, Any]:
        return {
            "data": self._content(),
            "format": self.recipe.format,
            "tokenizer": self._place().identity(),
            "max_length": self.recipe.max_length,
            "columns": [self.options.text_column, self.options.pair_column, self.options.label_column],
            "vocab_size": self._vocabulary_size(),
        }

    def _content(self) -> Any:
        if self.recipe.data == DEMO:
            return [tokenizers.file_hash(file) for files in _demo_files().values() for file in files]
        if (path := self._path()) is None:
            return [self.recipe.data, self.options.data_config]
        return readers.content(readers.find(path, self.recipe.format))

    def read(self) -> Mapping[str, Columns]:
        return self._read()[0]

    def prepare(self, folder: Path) -> dict[str, Any]:
        splits, tokenizer, extra = self._read()
        for split, columns in splits.items():
            save(folder / split, columns)
        tokenizer.save(str(folder / "tokenizer.json"))
        return extra

    def _read(self) -> tuple[dict[str, Columns], Tokenizer, dict[str, Any]]:
        sources, notes = self._splits()
        first = next(iter(sources["train"]()), None)
        if first is None:
            raise UserError(f"--data {self.recipe.data}: the train split is empty")
        names = self._names([str(k) for k in first[1]])
        splits = {split: list(read_examples(rows(), names)) for split, rows in sources.items()}
        notes += without_withheld(splits)
        labels = labels_of(splits, names, self.recipe.data)
        tokenizer, special = self._opened(splits["train"])
        found: dict[str, Columns] = {}
        for split, examples in splits.items():
            found[split], cut = self._columns(examples, labels, tokenizer, special["pad"] or 0)
            if cut:
                notes.append(
                    f"{split}: {cut} of {len(examples)} texts are cut to {self.recipe.max_length} tokens"
                )
        counts = np.bincount(np.asarray(found["train"]["label"]), minlength=len(labels))
        return (
            found,
            tokenizer,
            {
                "tokenizer": "tokenizer.json",
                "vocabulary": tokenizers.size(tokenizer),
                **special,
                "labels": labels,
                "label_counts": counts.tolist(),
                "majority": {s: _largest_share(c["label"]) for s, c in found.items()},
                "notes": notes,
            },
        )

    def _splits(self) -> tuple[dict[str, Callable[[], Rows]], list[str]]:
        """Rows per split, readable again and again; where none is for validation, every twentieth is."""
        if self.recipe.data == DEMO:
            return _demo(), []
        return splits_of(self.recipe.data, self._path(), self.recipe.format, self.options.data_config)

    def _opened(self, examples: list[Example]) -> tuple[Tokenizer, dict[str, int | None]]:
        texts = (text for e in examples for text in (e.text, e.pair) if text)
        tokenizer, special = self._tokenizer(lambda size: tokenizers.train_lowercase(texts, size))
        tokenizers.require_template(tokenizer)
        return tokenizer, special

    def _columns(
        self, examples: list[Example], labels: list[str], tokenizer: Tokenizer, pad: int
    ) -> tuple[dict[str, Column], int]:
        """The columns of a split, and how many texts were too long."""
        tokenizer.enable_truncation(self.recipe.max_length, strategy="longest_first")
        pairs = examples[0].pair is not None if examples else False
        given = [(e.text, e.pair) if pairs else e.text for e in examples]
        encoded = tokenizer.encode_batch(given, add_special_tokens=True)
        tokenizer.no_truncation()
        kind = np.uint16 if tokenizers.size(tokenizer) <= 1 << 16 else np.int32
        columns: dict[str, Column] = {
            "tokens": Ragged.from_rows([np.array(e.ids, kind) for e in encoded], pad)
        }
        if pairs:
            columns["types"] = Ragged.from_rows([np.array(e.type_ids, np.uint8) for e in encoded])
        number = {label: n for n, label in enumerate(labels)}
        columns["label"] = np.array([number[e.label or ""] for e in examples], np.int64)
        return columns, sum(bool(e.overflowing) for e in encoded)


def find_names(
    data: str,
    there: Sequence[str],
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
) -> Names:
    """The columns asked for, else the first of the usual names."""
    found = _column("--text-column", text, TEXTS, there, data)
    classes = _column("--label-column", label, LABELS, there, data)
    if pair is not None:
        pair = _column("--pair-column", pair, (), there, data)
    elif PAIRS.get(found) in there:
        pair = PAIRS[found]
    return Names(found, pair, classes)


def splits_of(
    data: str, path: Path | None, form: str | None, config: str | None
) -> tuple[dict[str, Callable[[], Rows]], list[str]]:
    """Rows per split of a path or hub id; where none is for validation, every twentieth is."""
    if path is None:
        found = _of_hub(data, config)
    else:
        parts = readers.find(path, form)
        found = {split: partial(readers.rows, part) for split, part in parts.items()}
    if "valid" in found:
        return found, []
    rows = list(found["train"]())
    held = {number for number in range(len(rows)) if number % readers.HELD_OUT == readers.HELD_OUT - 1}
    found["train"] = lambda: [row for number, row in enumerate(rows) if number not in held]
    found["valid"] = lambda: [row for number, row in enumerate(rows) if number in held]
    return found, ["there is no validation split: every twentieth row of the training data is it"]


def without_withheld(splits: dict[str, list[Example]]) -> list[str]:
    """Take out a test split whose labels nobody knows; a note where there was one."""
    if splits.get("test") and all(e.label in WITHHELD for e in splits["test"]):
        del splits["test"]
        return ["the test split has no labels and is left out"]
    return []


def _column(flag: str, asked: str | None, usual: tuple[str, ...], there: Sequence[str], data: str) -> str:
    found = (
        asked if asked in there else next((n for n in usual if n in there), None) if asked is None else None
    )
    if found is None:
        has = f"it has: {', '.join(there[:20]) or 'no columns'}"
        if asked is None:
            raise UserError(f"--data {data}: which column? {flag} says; {has}")
        raise UserError(f"{flag} {asked}: {data} has no such column{readers.nearest(asked, there)}; {has}")
    return found


def read_examples(rows: Rows, names: Names) -> Iterator[Example]:
    for where, row in rows:
        text = _text(row, names.text, where, "--text-column")
        pair = None if names.pair is None else _text(row, names.pair, where, "--pair-column")
        yield Example(where, text, pair, _label(row.get(names.label)))


def _text(row: Mapping[str, Any], column: str, where: str, flag: str) -> str:
    text = row.get(column)
    if text is not None and not isinstance(text, str):
        raise UserError(f"{where}: {column} holds {type(text).__name__}, not text: choose another {flag}")
    if not text or not text.strip():
        raise UserError(f"{where}: {column} is empty: leave the row out, or choose another {flag}")
    if len(text) > LONGEST_TEXT:
        raise UserError(
            f"{where}: {column} has {len(text):,} characters: a quote that is never closed swallows all rows"
            " behind it; mend it, or shorten the text"
        )
    return text


def _label(value: Any) -> str | None:
    """As written; None where there is none."""
    if value is None or value == "":
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def labels_of(splits: Mapping[str, list[Example]], names: Names, data: str) -> list[str]:
    """The classes in order: by number where all are whole numbers, else by name."""
    for split, examples in splits.items():
        if blank := next((e for e in examples if e.label is None), None):
            raise UserError(f"{blank.where}: {names.label} is empty in the {split} split: leave the row out")
    counts = Counter(e.label for e in splits["train"] if e.label is not None)
    if len(counts) < 2:
        raise UserError(
            f"--data {data}: {names.label} is {next(iter(counts), 'empty')} in every training row:"
            " at least two classes are needed"
        )
    if len(counts) > MOST_CLASSES:
        raise UserError(
            f"--data {data}: {names.label} has {len(counts):,} different values: at most {MOST_CLASSES}"
            " classes; choose another --label-column"
        )
    for split, examples in splits.items():
        if strange := next((e for e in examples if e.label not in counts), None):
            raise UserError(
                f"{strange.where}: the {split} split has the label {strange.label}, which no training row has"
            )
    whole = all(re.fullmatch(r"-?[0-9]+", label) for label in counts)
    return sorted(counts, key=int) if whole else sorted(counts)


def _largest_share(labels: Any) -> float:
    return round(float(np.bincount(np.asarray(labels)).max() / len(labels)), 6)


def _of_hub(name: str, config: str | None) -> dict[str, Callable[[], Rows]]:
    found = {
        readers.SPLITS[split]: rows
        for split, rows in hub.load_dataset(name, config).items()
        if split in readers.SPLITS
    }
    if "train" not in found:
        raise UserError(f"--data {name}: has no train split")
    return {split: partial(named_rows, name, rows) for split, rows in found.items()}


def _demo_files() -> dict[str, list[Path]]:
    library = Path(os.__file__).parent
    return {package: sorted((library / package).glob("*.py")) for package in DEMO_PACKAGES}


def _demo() -> dict[str, Callable[[], Rows]]:
    """Functions of five packages; every fifth is for validation."""
    rows = [
        (f"{file.name} line {node.lineno}", {"text": text, "label": package})
        for package, files in _demo_files().items()
        for file in files
        for node, text in _functions(file.read_text(encoding="utf-8"))
    ]
    if len({row["label"] for _, row in rows}) < 2:
        raise UserError(f"--data demo: {Path(os.__file__).parent} holds no source: give --data PATH")
    return {
        "train": lambda: [row for number, row in enumerate(rows) if number % 5],
        "valid": lambda: [row for number, row in enumerate(rows) if number % 5 == 0],
    }


def _functions(source: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_source_segment(source, node)):
            yield node, text
