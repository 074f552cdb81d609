"""Corpora: the texts, or the rows, of each split, from files, a hub data set, or the demo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import held_out, hub, readers
from isobatch.data.readers import LocatedRows

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = "demo"
DEMO_PACKAGES = ("email", "http", "json", "logging", "urllib")
DEMO_LARGEST_FILE = 32_000


@dataclass(frozen=True, slots=True)
class Corpus:
    """The texts of each split."""

    splits: Mapping[str, Callable[[], Iterable[Any]]]
    """Split -> a function that reads its texts from the beginning, at every call."""
    is_stream: bool = False
    """Whether the texts are chunks of one text; otherwise each is a document."""
    notes: tuple[str, ...] = ()
    """What the user should know, one line each."""
    column: str | None = None
    """The column of the texts, where `splits` read rows as those of a RowCorpus."""


@dataclass(frozen=True, slots=True)
class RowCorpus:
    """The rows of each split."""

    splits: Mapping[str, Callable[[], LocatedRows]]
    """Split -> a function that reads its rows from the beginning, at every call."""
    columns: tuple[str, ...]
    """The names of the training rows' columns."""
    notes: tuple[str, ...] = ()
    """What the user should know; where validation `is_held_out` of training, the first note says so."""
    is_held_out: bool = False


def overlap_notes(split: str, same: int, count: int) -> list[str]:
    """A note of held-out rows that are in train as well; nothing where there are none."""
    return [f"{split}: {same:,} of {count:,} rows are in train too"] if same else []


def demo_files() -> list[Path]:
    """Source files of the running Python's standard library, about 2 MB, in a fixed order.

    Raises UserError where Python has no source files.
    """
    library = Path(os.__file__).parent
    folders = [library, *(library / name for name in DEMO_PACKAGES)]
    files = [f for folder in folders for f in sorted(folder.glob("*.py"))]
    small = [f for f in files if not f.name.startswith("_") and f.stat().st_size <= DEMO_LARGEST_FILE]
    if len(small) < 10:
        raise UserError(f"--data demo: {library} holds no source of the standard library: give --data PATH")
    return small


def demo_corpus() -> Corpus:
    """The demo: each file of `demo_files` is a document; every tenth is validation."""
    files = demo_files()
    valid = files[9::10]
    train = [f for f in files if f not in valid]
    return Corpus({"train": partial(_read_files, train), "valid": partial(_read_files, valid)})


def _read_files(files: list[Path]) -> Iterator[str]:
    return (f.read_text(encoding="utf-8") for f in files)


def corpus_from_files(files: dict[str, readers.SplitFiles], share: float | None = None) -> Corpus:
    """All the text of the txt files that `readers.find_splits` found.

    `share`: the part of the training data that is validation, where nothing else is.
    """
    files, notes = with_validation(files, share)
    return Corpus({split: partial(readers.read_stream, part) for split, part in files.items()}, True, notes)


def rows_from_files(files: dict[str, readers.SplitFiles], share: float | None = None) -> RowCorpus:
    """The rows of files that `readers.find_splits` found; `share` as of `corpus_from_files`."""
    parts, notes = with_validation(files, share)
    rows = {split: partial(readers.read_rows, part) for split, part in parts.items()}
    return RowCorpus(rows, tuple(readers.column_names(files["train"])), notes, "valid" not in files)


def with_validation(
    files: dict[str, readers.SplitFiles], share: float | None = None
) -> tuple[dict[str, readers.SplitFiles], tuple[str, ...]]:
    """The files with a validation split, and a note for the user where it is taken from training."""
    notes = tuple(readers.table_notes(files))
    if "valid" in files:
        return files, notes
    train, valid = held_out.hold_out(files["train"], share)
    return {**files, "train": train, "valid": valid}, (held_out.note(share, train.is_stream), *notes)


def hub_splits(name: str, config: str | None) -> dict[str, Any]:
    """Split -> `datasets.Dataset`. Raises UserError where there is no train split."""
    found = hub.load_dataset(name, config)
    splits = {readers.SPLITS[split]: rows for split, rows in found.items() if split in readers.SPLITS}
    if "train" not in splits:
        raise UserError(f"--data {name}: has no train split; it has: {', '.join(found)}")
    return splits


def rows_from_hub(name: str, config: str | None, share: float | None = None) -> RowCorpus:
    """The rows of a hub data set, with a validation split; `share` as of `corpus_from_files`."""
    splits = hub_splits(name, config)
    columns, is_held_out = tuple(splits["train"].column_names), "valid" not in splits
    if is_held_out:
        rows, every = splits["train"], np.arange(len(splits["train"]))
        border = len(rows) - max(1, len(rows) // readers.VALIDATION_ONE_IN)
        drawn = every >= border if share is None else held_out.drawn_rows(len(rows), share)
        splits |= {"train": rows.select(every[~drawn]), "valid": rows.select(every[drawn])}
    read = {split: partial(read_hub_rows, name, rows) for split, rows in splits.items()}
    return RowCorpus(read, columns, (held_out.note(share),) if is_held_out else (), is_held_out)


def read_hub_rows(name: str, rows: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) of a split's rows; class labels are given by name, as far as the data set has names."""
    classes = {k: f.names for k, f in rows.features.items() if hasattr(f, "names")}
    batches = (dict(batch) for batch in rows.iter(batch_size=1000))
    cells = (cell for batch in batches for cell in zip(*batch.values(), strict=True))
    for number, row in enumerate(dict(zip(rows.column_names, cell, strict=True)) for cell in cells):
        named = {
            k: names[row[k]] if row[k] is not None and row[k] >= 0 else None for k, names in classes.items()
        }
        yield f"{name} row {number}", {**row, **named}
