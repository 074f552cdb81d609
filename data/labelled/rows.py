"""The rows of labelled texts: their columns, what stands in them, and the demo of Python's own library."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import UserError
from isobatch.data import readers
from isobatch.data.corpora import DEMO_PACKAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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
    for flag, asked in {"--text-column": text, "--pair-column": pair, "--label-column": label}.items():
        if asked is not None:
            readers.require_name(asked, available, data, flag)
    found = text or _usual(TEXT_COLUMNS, available), label or _usual(LABEL_COLUMNS, available)
    flags = ("--text-column", "--label-column")
    if missing := [flag for flag, name in zip(flags, found, strict=True) if name is None]:
        question = "which column? {} says" if len(missing) == 1 else "which columns? {} say"
        asked, has = question.format(" and ".join(missing)), readers.name_columns(available)
        raise UserError(f"--data {data}: {asked}; it has: {has}")
    texts, classes = map(str, found)
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
