"""Where a corpus comes from: files, the hub, or the demo. Each answers with texts, or rows, per split."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isobatch.core.errors import UserError
from isobatch.data import hub, readers
from isobatch.data.readers import Rows

DEMO = "demo"
DEMO_PACKAGES = ("email", "http", "json", "logging", "urllib")
DEMO_LARGEST_FILE = 32_000
HELD_OUT = "there is no validation split: the last 5 % of the training text is it"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts per split, readable again and again. A stream is one text in pieces; otherwise documents."""

    splits: Mapping[str, Callable[[], Iterable[str]]]
    is_stream: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows per split, readable again and again."""

    splits: Mapping[str, Callable[[], Rows]]
    columns: tuple[str, ...]
    """The names of the training rows' columns."""
    notes: tuple[str, ...] = ()


def demo_files() -> list[Path]:
    """Source files of the running interpreter's standard library, about 2 MB, in a fixed order."""
    library = Path(os.__file__).parent
    folders = [library, *(library / name for name in DEMO_PACKAGES)]
    files = [f for folder in folders for f in sorted(folder.glob("*.py"))]
    small = [f for f in files if not f.name.startswith("_") and f.stat().st_size <= DEMO_LARGEST_FILE]
    if len(small) < 10:
        raise UserError(f"--data demo: {library} holds no source of the standard library: give --data PATH")
    return small


def demo() -> Corpus:
    """Every tenth file is for validation."""
    files = demo_files()
    valid = files[9::10]
    train = [f for f in files if f not in valid]
    return Corpus({"train": partial(_whole, train), "valid": partial(_whole, valid)})


def _whole(files: list[Path]) -> Iterator[str]:
    return (f.read_text(encoding="utf-8") for f in files)


def of_files(parts: dict[str, readers.Part], column: str) -> Corpus:
    """A corpus of files found by `readers.find`."""
    parts, notes = _with_valid(parts)
    splits = {split: partial(readers.texts, part, column) for split, part in parts.items()}
    return Corpus(splits, parts["train"].is_stream, notes)


def table_of_files(parts: dict[str, readers.Part]) -> Table:
    """The rows of files found by `readers.find`."""
    columns = tuple(readers.columns(parts["train"]))
    parts, notes = _with_valid(parts)
    return Table({split: partial(readers.rows, part) for split, part in parts.items()}, columns, notes)


def _with_valid(parts: dict[str, readers.Part]) -> tuple[dict[str, readers.Part], tuple[str, ...]]:
    if "valid" in parts:
        return parts, ()
    train, valid = readers.hold_out(parts["train"])
    return {**parts, "train": train, "valid": valid}, (HELD_OUT,)


def of_hub(name: str, config: str | None, column: str) -> Corpus:
    """A hub data set with a text column, fetched through `datasets` or opened from its cache."""
    splits, notes = _hub_splits(name, config)
    if column not in (names := splits["train"].column_names):
        raise UserError(f"--text-column {column}: {name} has no such column; it has: {', '.join(names)}")
    return Corpus({split: partial(_column, rows, column) for split, rows in splits.items()}, notes=notes)


def table_of_hub(name: str, config: str | None) -> Table:
    """The rows of a hub data set."""
    splits, notes = _hub_splits(name, config)
    rows: dict[str, Callable[[], Rows]] = {k: partial(named_rows, name, found) for k, found in splits.items()}
    return Table(rows, tuple(splits["train"].column_names), notes)


def _hub_splits(name: str, config: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    found = hub.load_dataset(name, config)
    splits = {readers.SPLITS[split]: rows for split, rows in found.items() if split in readers.SPLITS}
    if "train" not in splits:
        raise UserError(f"--data {name}: has no train split; it has: {', '.join(found)}")
    if "valid" in splits:
        return splits, ()
    rows = splits["train"]
    border = len(rows) - max(1, len(rows) // readers.HELD_OUT)
    splits["train"], splits["valid"] = rows.select(range(border)), rows.select(range(border, len(rows)))
    return splits, (HELD_OUT,)


def named_rows(name: str, rows: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows with their classes' names in place of numbers, where the data set says them."""
    classes = {k: f.names for k, f in rows.features.items() if hasattr(f, "names")}
    for number, row in enumerate(rows):
        named = {
            k: names[row[k]] if row[k] is not None and row[k] >= 0 else None for k, names in classes.items()
        }
        yield f"{name} row {number}", {**row, **named}


def _column(rows: Any, column: str) -> Iterator[str]:
    for batch in rows.select_columns([column]).iter(batch_size=1000):
        yield from (text for text in batch[column] if text and text.strip())
