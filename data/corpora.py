"""Corpora: the texts, or the rows, of each split, from files, a hub data set, or the demo."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from isobatch.core import hub_cache
from isobatch.core.errors import NotHereError, UserError, explain_errors, nearest_file
from isobatch.core.extras import need
from isobatch.data import readers
from isobatch.data.readers import SplitFiles

T = TypeVar("T")


def require_dataset(name: str) -> None:
    """Raise UserError unless the data set `name` is in the cache of `datasets` or of the hub, or that can be
    reached.
    """
    if not hub_cache.is_id(name) or Path(name).suffix in readers.FORMATS:
        raise NotHereError(f"--data {name}: there is no such file or folder{nearest_file(name)}")
    cache = Path(os.environ.get("HF_DATASETS_CACHE", hub_cache.cache_home() / "datasets")).expanduser()
    is_prepared = (cache / name.replace("/", "___").lower()).is_dir()
    if not is_prepared and hub_cache.snapshot("datasets", name) is None:
        hub_cache.require_hub("--data", name)


def load_dataset(name: str, config: str | None) -> Any:
    """Split -> `datasets.Dataset`. Without a network it comes from the caches.

    Raises UserError with one line where it cannot be had.
    """
    need("datasets", f"--data {name}: hub data")
    import datasets
    import huggingface_hub.constants

    folder = None
    if not hub_cache.is_reachable():
        folder = hub_cache.snapshot("datasets", name)
        # Otherwise `datasets` asks for every file over the network, with retries, before it uses the cache.
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    with explain_errors(f"--data {name}", Exception):  # network, missing configuration, gated
        return datasets.load_dataset(str(folder or name), config)


SEED = 20
"""Of the draw, whatever the seed of the recipe: runs with several are measured on the same rows."""


def random_order(count: int) -> np.ndarray:
    """(count,) row numbers in an order that is the same everywhere.

    Raw numbers, sorted: those are the same in every version of numpy, a Generator's permutation may change.
    """
    return np.argsort(np.random.PCG64(SEED).random_raw(count), kind="stable")


def drawn_rows(count: int, share: float | None) -> np.ndarray:
    """(count,) bool: the last twentieth of the rows, or a share drawn at random; of several never all."""
    if share is None:
        return np.arange(count) >= count - max(1, count // readers.VALIDATION_ONE_IN)
    found = np.zeros(count, bool)
    found[random_order(count)[: min(max(1, round(share * count)), max(1, count - 1))]] = True
    return found


def hold_out(part: SplitFiles, share: float | None = None) -> tuple[SplitFiles, SplitFiles]:
    """(train, validation) of running text: the last twentieth, or a `share`, is validation.

    A single file is cut at the end of a line; of several the last one is validation. Raises UserError for a
    share of several.
    """
    replace = partial(dataclasses.replace, part)
    if len(part.files) > 1:
        if share is not None:
            raise UserError(f"--valid {share:g}: of several .txt files the last is held out: leave it out")
        return replace(files=part.files[:-1]), replace(files=part.files[-1:])
    border = _split_offset(part.files[0], share or 1 / readers.VALIDATION_ONE_IN)
    return replace(stop=border), replace(start=border)


def _split_offset(file: Path, share: float) -> int:
    """The byte at which the last `share` of a file begins, never inside a character.

    The first line's end at or after that place; else the last line's end before; else the last space; else
    the place.
    """
    with readers.open_utf8(file) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(size - int(size * share) - 1)
        stream.readline(readers.MAX_LINE_BYTES)
        if stream.tell() < size:
            return stream.tell()
        stream.seek(max(0, size - readers.MAX_LINE_BYTES))
        tail = stream.read().rstrip()
    place = len(tail) - int(len(tail) * share)
    cut = tail.rfind(b"\n") + 1 or tail.rfind(b" ") + 1 or place
    while cut < len(tail) and tail[cut] & 0xC0 == 0x80:  # inside a character
        cut += 1
    return max(0, size - readers.MAX_LINE_BYTES) + cut


def held_out_note(share: float | None, is_stream: bool = False) -> str:
    """A line for the user on what was held out; `is_stream`: whether it is running text."""
    what = "the last 5 % of the training data is it"
    if share is not None:
        where = "the text is it" if is_stream else "the rows are it, drawn at random"
        what = f"{'the last ' * is_stream}{100 * share:g} % of {where} (--valid)"
    return f"there is no validation split: {what}"


def share_of(valid: float | str | None) -> float | None:
    """The share that --valid names; None where it names a file or is not given."""
    return valid if isinstance(valid, float) else None


def find_splits(path: Path, file_format: str | None, options: Any) -> dict[str, SplitFiles]:
    """As `readers.find_splits`, with the file of --valid. Raises UserError where --valid cannot be had."""
    splits, valid = readers.find_splits(path, file_format, options), getattr(options, "valid", None)
    check_valid(valid, splits, str(path))
    if not isinstance(valid, str):
        return splits
    file = Path(valid).expanduser()
    if not os.path.isfile(file):  # noqa: PTH113 - Path.is_file raises PermissionError
        near = nearest_file(file)
        raise UserError(f"--valid {valid}: is neither a file{near} nor a share above 0 and at most 0.9")
    found = readers.find_splits(file, file_format, options)["train"]
    if found.is_stream != splits["train"].is_stream:
        raise UserError(f"--valid {valid}: has other rows than --data {path}: give both in one format")
    return {**splits, "valid": found}


def check_valid(valid: float | str | None, splits: Mapping[str, object] | tuple[str, ...], data: str) -> None:
    """Raise UserError for a --valid where there is a validation split."""
    if valid is not None and "valid" in splits:
        typed = valid if isinstance(valid, str) else f"{valid:g}"
        raise UserError(f"--valid {typed}: {data} has a validation split: leave it out")


DEMO = "demo"
DEMO_PACKAGES = ("email", "http", "json", "logging", "urllib")
DEMO_LARGEST_FILE = 32_000
IN_TRAIN = "rows are in train too: leave them out of one of the two"


@dataclass(frozen=True, slots=True)
class Corpus:
    """The texts, or the rows, of each split."""

    splits: Mapping[str, Callable[[], Iterable[Any]]]
    """Split -> a function that reads its texts, or LocatedRows, from the beginning, at every call."""
    is_stream: bool = False
    """Whether the texts are chunks of one text; otherwise each is a document."""
    notes: tuple[str, ...] = ()
    """What the user should know, one line each."""
    columns: tuple[str, ...] = ()
    """Of rows the names of the columns, of training."""
    count: int = 0
    """How many training rows a hub data set has."""
    column: str | None = None
    """Of rows the column of the texts, where they are read as such."""


class TrainingRows:
    """What the training rows are, by hashes: rows of the other splits that are among them are noted."""

    def __init__(self) -> None:
        self.hashes = np.empty(0, np.uint64)

    def compare(self, split: str, hashes: np.ndarray) -> list[str]:
        """A note of held-out rows (n,) that are in train too, if any are; those of `train` come first."""
        if split == "train":
            self.hashes = np.unique(hashes)
            return []
        same = int(np.isin(hashes, self.hashes).sum())
        return [f"{split}: {same:,} of {len(hashes):,} {IN_TRAIN}"] if same else []


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


def _texts_of_files(files: Iterable[Path]) -> Iterator[str]:
    return (file.read_text(encoding="utf-8") for file in files)


def demo_corpus(read: Callable[[list[Path]], Iterable[Any]] = _texts_of_files, step: int = 1) -> Corpus:
    """What `read` gives of one in `step` of `demo_files`, by default each as a document; every tenth of these
    is validation.
    """
    files = demo_files()[::step]
    valid = files[9::10]
    parts = {"train": [file for file in files if file not in valid], "valid": valid}
    return Corpus({split: partial(read, part) for split, part in parts.items()})


def corpus_from_files(files: dict[str, SplitFiles], share: float | None = None) -> Corpus:
    """All the text of the txt files that `readers.find_splits` found.

    `share`: the part of the training data that is validation, where nothing else is.
    """
    files, notes = with_validation(files, share)
    return Corpus({split: partial(readers.read_stream, part) for split, part in files.items()}, True, notes)


def with_validation(
    files: dict[str, SplitFiles], share: float | None = None
) -> tuple[dict[str, SplitFiles], tuple[str, ...]]:
    """The txt files with a validation split, and a note for the user where it is taken from training."""
    if "valid" in files:
        return files, ()
    train, valid = hold_out(files["train"], share)
    return {**files, "train": train, "valid": valid}, (held_out_note(share, is_stream=True),)


def all_rows(name: str, files: Mapping[str, SplitFiles], config: str | None) -> Corpus:
    """The rows of these files, which `readers.find_splits` found; without some those of the hub data set
    `name`. Raises UserError, also where there is no train split.
    """
    if files:
        read = {split: partial(readers.read_rows, part) for split, part in files.items()}
        columns, notes = readers.column_names(files["train"]), readers.table_notes(files)
        return Corpus(read, notes=tuple(notes), columns=tuple(columns))
    found = load_dataset(name, config)
    splits = {readers.SPLITS[split]: rows for split, rows in found.items() if split in readers.SPLITS}
    if "train" not in splits:
        raise UserError(f"--data {name}: has no train split; it has: {', '.join(found)}")
    read = {split: partial(read_hub_rows, name, rows) for split, rows in splits.items()}
    return Corpus(read, columns=tuple(splits["train"].column_names), count=len(splits["train"]))


def open_rows(
    name: str, files: Mapping[str, SplitFiles], config: str | None, share: float | None = None
) -> Corpus:
    """The same with a validation split, and a note of it; `share` as of `corpus_from_files`."""
    rows = all_rows(name, files, config)
    if "valid" in rows.splits:
        return rows
    if (count := readers.count_rows(files["train"]) if files else rows.count) < 2:
        raise UserError(f"--data {name}: holds {'one row' if count else 'no rows'}, and validation takes one")
    drawn, read = drawn_rows(count, share), rows.splits["train"]
    splits = dict(rows.splits) | {"train": partial(taken, read, ~drawn), "valid": partial(taken, read, drawn)}
    return dataclasses.replace(rows, splits=splits, notes=(held_out_note(share), *rows.notes))


def taken(read: Callable[[], Iterable[T]], kept: np.ndarray) -> Iterator[T]:
    """What is read where the mask (n,) is true."""
    return itertools.compress(read(), kept.tobytes())


def read_hub_rows(name: str, rows: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(where, row) of a split's rows; class labels are given by name, as far as the data set has names."""
    features = [rows.features[column] for column in rows.column_names]
    names = [getattr(getattr(one, "feature", one), "names", None) for one in features]
    cells = (cell for batch in rows.iter(batch_size=1000) for cell in zip(*batch.values(), strict=True))
    for number, cell in enumerate(cells):
        named = map(readers.class_named, cell, names)
        yield f"{name} row {number}", dict(zip(rows.column_names, named, strict=True))
