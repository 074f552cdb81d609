"""The rows of labelled texts: from files, a hub data set, or Python's standard library."""

from __future__ import annotations

import ast
import itertools
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import UserError
from isobatch.data import held_out, hub, readers
from isobatch.data.corpora import DEMO_PACKAGES, read_hub_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np

    from isobatch.data.labelled.columns import ColumnNames
    from isobatch.data.readers import LocatedRows

MAX_TEXT_CHARACTERS = 1_000_000


class Example(NamedTuple):
    """One labelled text or pair of texts."""

    where: str
    """Its file and line, for error messages."""
    text: str
    pair: str | None
    """The second text of a pair."""
    label: str | None
    """The class as written; None where the row has none."""


def rows_per_split(
    data: str, path: Path | None, file_format: str | None, options: Any, valid: float | str | None
) -> tuple[dict[str, Callable[[], LocatedRows]], list[str]]:
    """(split -> a function that reads its rows, notes) of a path or hub id.

    Where there is no validation split, every twentieth training row goes into one, or the share of --valid.
    """
    found = given_rows(data, path, file_format, options, valid)
    if "valid" in found:
        return found, []
    if share := held_out.share_of(valid):
        drawn = held_out.drawn_rows(sum(1 for _ in found["train"]()), share)
        found["train"], found["valid"] = (
            partial(_chosen_rows, found["train"], mask) for mask in (~drawn, drawn)
        )
        return found, [held_out.note(share)]
    found["train"], found["valid"] = (
        partial(_every_row, found["train"], readers.VALIDATION_ONE_IN, wanted) for wanted in (False, True)
    )
    return found, ["there is no validation split: every twentieth row of the training data is it"]


def _every_row(rows: Callable[[], LocatedRows], count: int, wanted: bool) -> LocatedRows:
    """Each last of `count` rows, or all others where those are not wanted."""
    return (row for number, row in enumerate(rows(), 1) if (number % count == 0) == wanted)


def _chosen_rows(rows: Callable[[], LocatedRows], chosen: np.ndarray) -> LocatedRows:
    return itertools.compress(rows(), chosen.tobytes())


def given_rows(
    data: str, path: Path | None, file_format: str | None, options: Any, valid: float | str | None
) -> dict[str, Callable[[], LocatedRows]]:
    """Split -> a function that reads its rows, of the splits that a path or hub id has."""
    if path is None:
        return _hub_rows(data, options.data_config)
    parts = held_out.find_splits(path, file_format, valid, options)
    return {split: partial(readers.read_rows, part) for split, part in parts.items()}


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


def _hub_rows(name: str, config: str | None) -> dict[str, Callable[[], LocatedRows]]:
    found = {
        readers.SPLITS[split]: rows
        for split, rows in hub.load_dataset(name, config).items()
        if split in readers.SPLITS
    }
    if "train" not in found:
        raise UserError(f"--data {name}: has no train split")
    return {split: partial(read_hub_rows, name, rows) for split, rows in found.items()}


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
