"""The contract of data: prepare arrays once, then fetch any samples by number.

A kind of data implements `read`, which returns columns per split. Prepared columns lie on disk as .npy
files and are memory-mapped: processes share the pages, and a corpus may be larger than RAM.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.flags import NoOptions
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import doing
from isobatch.data import digests
from isobatch.data.preparation.encoding import Workshop
from isobatch.data.preparation.spooled_array import chunks_of

WEIGHT = ".weight"
TEST = "test"
QUANTILES = 65
MEASURED_ROWS = 1 << 20
SMALL_FILE_BYTES = 4096
HASHED_BYTES = 1 << 28
"""Larger files of a user's own data are known by size and time of change: a hash takes a second per GB."""
MEASURES = ("index", "length", "row_length")
"""What `fetch` adds to the columns."""
NUMBERS = "biuf"
"""numpy's kinds that a tensor can hold: bool, signed, unsigned, floating."""


class NoSamplesError(UserError):
    """Rows hold nothing to learn from."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Rows of different lengths, end to end. `offsets` (n + 1,) int64 are their borders in `values`."""

    values: np.ndarray
    offsets: np.ndarray
    pad: int = 0
    """What fills short rows of a batch."""

    @classmethod
    def of_lengths(cls, values: np.ndarray, lengths: Any, pad: int = 0) -> Ragged:
        """Rows of these lengths (n,), whose values lie end to end."""
        return cls(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pad)

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], pad: int = 0) -> Ragged:
        values = np.concatenate(rows) if rows else np.empty(0, np.int32)
        return cls.of_lengths(values, [len(row) for row in rows], pad)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def lengths_of(self, indices: np.ndarray) -> np.ndarray:
        """(len(indices),) int64."""
        return np.asarray(self.offsets[indices + 1] - self.offsets[indices])

    def __getitem__(self, rows: np.ndarray) -> Ragged:
        """The rows where this mask (n,) is true."""
        return Ragged.of_lengths(self.values[np.repeat(rows, self.lengths)], self.lengths[rows], self.pad)

    def rows(self, indices: np.ndarray, pad_to: int = 0) -> np.ndarray:
        """(len(indices), longest) padded on the right; at least `pad_to` wide."""
        starts, lengths = self.offsets[indices], self.lengths_of(indices)
        width = int(lengths.max(initial=1))
        if (lengths == width).all() and width >= pad_to and not (starts % width).any():
            blocks = self.values[: len(self.values) // width * width].reshape(-1, width)
            return np.take(blocks, starts // width, axis=0)
        width = max(width, pad_to)
        columns = np.arange(width)
        inside = columns < lengths[:, None]
        places = np.where(inside, starts[:, None] + columns, 0)
        found = np.where(inside, self.values[places] if len(self.values) else 0, self.pad)
        return found.astype(self.values.dtype)


Column = np.ndarray | Ragged
Columns = Mapping[str, Column]


def is_text(column: Column) -> TypeGuard[np.ndarray]:
    """Whether it is for people, as no tensor can hold it."""
    return isinstance(column, np.ndarray) and column.dtype.kind == "U"


def count_rows(columns: Columns) -> int:
    """Raises UserError where the columns have different numbers of rows."""
    if len(sizes := {len(column) for column in columns.values()}) != 1:
        shown = ", ".join(f"{name}: {len(column)}" for name, column in columns.items())
        raise UserError(f"the columns of a split must have one length, not {shown}")
    return sizes.pop()


class Source(ABC):
    """Where samples come from. `fetch` is the whole contract; the engine decides which, when and where."""

    weights: Mapping[str, np.ndarray]
    """Unit -> (n,) weight of each sample in that unit, known before it is fetched."""
    parts: tuple[tuple[int, float], ...] = ()
    """(samples, share) of each set where several lie end to end: an epoch takes each by its share."""
    groups: np.ndarray | None = None
    """(groups,) int64: samples of each group of neighbours that is read as a whole, for --order shards; they
    add up to all samples."""
    read_ahead: int = 0
    """Samples before the loop of which `expect` should hear."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """(len(indices),) int64: tokens of these samples, without fetching them."""

    def check(self, indices: np.ndarray) -> None:  # noqa: B027  without files there are no digests
        """Compare what these samples are read from with its digests; `fetch` does so itself.

        Raises TrainingError where it was changed after it was prepared.
        """

    def expect(self, indices: np.ndarray) -> None:  # noqa: B027  sources here need no notice
        """These samples are fetched soon: what is slow to get may be got now, in threads."""

    def keep_at_most(self, size: int) -> None:  # noqa: B027  sources here keep nothing
        """How many bytes of what was slow to get may be kept on this machine's disk. Raises UserError."""

    @abstractmethod
    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        """The named arrays of these samples, one row each, in this order, `pad_to` wide or wider."""


class ArraySource(Source):
    """Samples from columns in memory or memory-mapped; one vectorised gather per column."""

    def __init__(self, columns: Columns, files: Mapping[str, digests.PreparedFile] | None = None) -> None:
        """`files`: prepared files by name, of which those of the columns are checked as they are fetched."""
        self.columns = dict(columns)
        self._files = files or {}
        self.count = count_rows(columns)
        self._measured = next((c for c in self.columns.values() if isinstance(c, Ragged)), None)
        """The column whose rows' lengths are the samples'."""
        weights = {k.removesuffix(WEIGHT): c for k, c in self.columns.items() if k.endswith(WEIGHT)}
        self.weights = {k: np.asarray(c) for k, c in weights.items() if not isinstance(c, Ragged)}

    def __len__(self) -> int:
        return self.count

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        if self._measured is None:
            return np.ones(len(indices), np.int64)
        return self._measured.lengths_of(indices)

    @classmethod
    def open(cls, folder: Path) -> ArraySource:
        """The samples of a prepared split, whose bytes are checked before they are first used."""
        files = [f for f in digests.prepared_files(folder.parent).values() if f.path.suffix == ".npy"]
        return cls(load(folder), {f.path.name: f for f in files if f.path.parent == folder})

    def check(self, indices: np.ndarray) -> None:
        if not any(file.unchecked.any() for file in self._files.values()):
            return
        for name, column in self.columns.items():
            if isinstance(column, Ragged):
                self._check_rows(f"{name}-offsets.npy", column.offsets, indices, indices + 2)
                starts, stops = column.offsets[indices], column.offsets[indices + 1]
                self._check_rows(f"{name}-values.npy", column.values, starts, stops)
            else:
                self._check_rows(f"{name}.npy", column, indices, indices + 1)

    def _check_rows(self, name: str, array: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> None:
        if (file := self._files.get(name)) is not None:
            header, row = file.size - array.nbytes, array.strides[0]
            file.check(header + starts * row, header + stops * row)

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        self.check(indices)
        batch = {
            name: c.rows(indices, pad_to) if isinstance(c, Ragged) else np.take(c, indices, axis=0)
            for name, c in self.columns.items()
        }
        return {**batch, "index": indices, "length": self.lengths(indices)}


def _what_lies_at(place: str) -> dict[str, Any]:
    """The hash of a file; of a large one, and of the files of a folder, sizes and times of change."""
    path = Path(place).expanduser()
    if path.is_file() and path.stat().st_size <= HASHED_BYTES:
        with path.open("rb") as stream:
            return {"content": hashlib.file_digest(stream, "sha256").hexdigest()}
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    facts = [(str(one.relative_to(path)), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    return {"files": hashlib.sha256(json.dumps(facts).encode()).hexdigest()} if facts else {}


class Data(ABC):
    """One kind of data. `read` is all that a small one needs."""

    Options: ClassVar[type] = NoOptions
    """A frozen dataclass of this kind's recipe fields; each becomes a flag."""
    version: ClassVar[int] = 1
    """Raise it when the prepared form changes: old caches are then left alone."""
    has_groups: ClassVar[bool] = False
    """Whether its sources have `groups`, so that --order shards means something."""
    cache_name: ClassVar[str] = ""
    """Names this kind of data in the keys of the cache, wherever its class moves; by default its place."""
    assumed: ClassVar[Mapping[str, Any]] = {}
    """What a plan without the data (`plan --assume-length`) finds in `Facts.extra`, beside the vocabulary."""
    workshop: Workshop = Workshop()
    """The processes that `prepare` may start, and where it may keep what they have done."""

    def __init__(self, recipe: Recipe, options: Any) -> None:
        self.recipe = recipe
        self.options = options

    def check(self) -> None:  # noqa: B027  for those that need it
        """Raise UserError with one line if the data cannot be had; cheap, before anything heavy."""

    def identity(self) -> dict[str, Any]:
        """All that the prepared arrays depend on, as JSON: settings, and hashes of the files' content.

        By default --data, what lies there, and the seed; not other files, nor the data's own flags.
        """
        return {"data": self.recipe.data, "seed": self.recipe.seed, **_what_lies_at(self.recipe.data)}

    @abstractmethod
    def read(self) -> Mapping[str, Columns] | Iterable[tuple[str, Columns]]:
        """Columns per split: `train` always, `valid` and `test` where there are such.

        Or yield (split, columns), blocks of some thousand rows: each is written before the next is asked for,
        so that all together may be larger than memory.
        """

    def read_rows(self) -> Columns:
        """All samples of --data, in order, for `predict --file` and `serve`; columns that only training needs
        may lack. Columns of text (numpy's str) are written beside the answers.

        By default refused: what `read` returns may be shuffled, divided into splits, or made here.
        """
        raise UserError(
            f"--file {self.recipe.data}: {type(self).__name__} has no method read_rows for new samples: add"
            " it, or predict held-out ones with --split valid"
        )

    def count_samples(self, length: int) -> int | None:  # noqa: ARG002
        """Training samples of `length` tokens in --data, by its files alone; None where it has none."""
        return None

    def prepare_test(self, folder: Path, facts: Facts) -> Mapping[str, Any]:  # noqa: ARG002  for kinds with names
        """Write the samples of --data as `folder`/test, with the tokens, labels and ids that a run of `facts`
        knows; for `evaluate --test`. Returns the sizes of the split as facts have them. Raises UserError.
        """
        save(folder / TEST, {k: column for k, column in self.read_rows().items() if not is_text(column)})
        return {}

    def describe_rows(self, facts: Facts, batch: Mapping[str, np.ndarray]) -> list[str]:  # noqa: ARG002
        """A line on each of some rows that `fetch` returned, for people."""
        shown = {k: v for k, v in batch.items() if k not in MEASURES and not k.endswith(WEIGHT)}
        rows = len(next(iter(batch.values())))
        return [
            "  ".join(f"{name} {np.array2string(column[row], threshold=8)}" for name, column in shown.items())
            for row in range(rows)
        ]

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared arrays into `folder`; returns what Facts should know beside counts, lengths."""
        found, rows = self.read(), 0
        for block in found.items() if isinstance(found, Mapping) else found:
            if not isinstance(block, tuple) or len(block) != 2:
                raise UserError("read() yields no block: yield (split, columns), as in yield 'train', {...}")
            rows += count_rows(block[1])
            doing(f"preparing the data: {rows:,} samples")
            save(folder / block[0], block[1], behind=(folder / block[0]).exists())
        return {}

    def open(self, folder: Path, split: str) -> Source:
        """The samples of a prepared split."""
        return ArraySource.open(folder / split)


def save(folder: Path, columns: Columns, behind: bool = False) -> None:
    """Write columns as .npy files with an index of their sizes.

    `behind`: as further rows of those that are there. Raises UserError where these have other columns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before, index = load(folder) if behind else {}, dict[str, Any]()
    if before and (now := _row_types(columns)) != (was := _row_types(before)):
        raise UserError(f"{folder.name}: its blocks must have the same columns, not {now} behind {was}")
    for name, column in columns.items():
        arrays: dict[str, Any] = {f"{name}.npy": column}
        if isinstance(column, Ragged):
            arrays = {f"{name}-values.npy": column.values, f"{name}-offsets.npy": column.offsets}
            if isinstance(known := before.get(name), Ragged):
                arrays[f"{name}-offsets.npy"] = column.offsets[1:] + len(known.values)
            if column.values.ndim != 1:
                raise UserError(
                    f"column {name}: the rows of a Ragged are lists of numbers, not arrays (its values have"
                    f" shape {column.values.shape}): flatten them, or give each its own column"
                )
        for file, array in arrays.items():
            if array.dtype.kind not in NUMBERS:
                raise UserError(f"column {name} holds {array.dtype}: encode it as numbers")
            save_array(folder / file, array, behind)
        files = {file: (folder / file).stat().st_size for file in arrays}
        index[name] = {"files": files, "pad": column.pad if isinstance(column, Ragged) else None}
    (folder / "index.json").write_text(json.dumps(index))


def _row_types(columns: Columns) -> str:
    values = {k: (c.values, "Ragged ") if isinstance(c, Ragged) else (c, "") for k, c in columns.items()}
    return ", ".join(f"{k} {kind}{one.dtype} {one.shape[1:]}" for k, (one, kind) in sorted(values.items()))


def save_array(file: Path, array: np.ndarray, behind: bool = False) -> None:
    """Write what np.save writes; of a mapped array only a part is resident at a time.

    `behind`: as further rows of the array that is there.
    """
    rows = len(_open_array(file, file.stat().st_size)) if behind else 0
    with file.open("r+b" if behind else "wb") as stream:
        header = np.lib.format.header_data_from_array_1_0(np.empty((0, *array.shape[1:]), array.dtype))
        # numpy leaves room in the header for any number of rows.
        header["shape"] = (rows + len(array), *array.shape[1:])
        np.lib.format.write_array_header_1_0(stream, header)
        stream.seek(0, os.SEEK_END)
        for part in chunks_of(array):
            stream.write(np.ascontiguousarray(part).tobytes())


def load(folder: Path) -> dict[str, Column]:
    """Memory-map columns; a missing or truncated file is named."""
    columns: dict[str, Column] = {}
    for name, entry in json.loads((folder / "index.json").read_text()).items():
        values, *offsets = (_open_array(folder / file, size) for file, size in entry["files"].items())
        columns[name] = Ragged(values, np.asarray(offsets[0]), entry["pad"]) if offsets else values
    return columns


def in_train(test: Path, train: Path, facts: Facts) -> np.ndarray:
    """(n,) bool: whether each sample of the prepared `test` is one of `train`, by its tokens where there are
    such, else by all but weights and what it has of `other` samples; none where the columns differ. Of
    documents that are joined into blocks: whether each document is. `facts`: of either.
    """
    columns, known = load(test), load(train)
    both = columns.keys() & known.keys()
    names = {"tokens"} & both or {n for n in known if not n.endswith(WEIGHT) and not n.startswith("other")}
    if not names <= both or "length" in names:  # of data in a store the tokens are not there
        return np.zeros(count_rows(columns), bool)
    is_running = facts.extra.keys() & {"prompt", "form"} == {"prompt"}  # text, joined into blocks
    end = facts.extra["eos"] if is_running else None
    tested, of_train = (zip(*(_row_bytes(of[n], end) for n in names), strict=True) for of in (columns, known))
    rows = [*tested]
    again = {*rows}.intersection(of_train)  # training data is passed over once, and none of it is kept
    return np.array([row in again for row in rows], bool)


def _row_bytes(column: Column, end: int | None) -> Iterator[bytes]:
    """The bytes of each row; of text in blocks of each document, as far as there are such, by its `end`."""
    if isinstance(column, Ragged):
        ends: Any = [] if end is None else np.flatnonzero(column.values == end) + 1
        offsets = np.append(0, ends) if len(ends) else column.offsets
        return (column.values[a:b].tobytes() for a, b in itertools.pairwise(offsets.tolist()))
    return (row.tobytes() for row in np.asarray(column))


def _open_array(file: Path, size: int) -> np.ndarray:
    actual = file.stat().st_size if file.exists() else 0
    if actual != size:
        raise UserError(
            f"prepared file {file} has {actual} bytes in place of {size}: delete"
            f" {file.parent.parent} and run again"
        )
    # An empty array cannot be mapped, and a small one need not be.
    return np.load(file, mmap_mode="r" if size > SMALL_FILE_BYTES else None)


def fingerprint(folder: Path) -> str:
    """Sixteen hex digits over the bytes of every prepared array under `folder`."""
    if not folder.is_dir():
        raise UserError(f"there is no prepared data in {folder}")
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.rglob("*.npy")):
        digest.update(str(file.relative_to(folder)).encode())
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def length_quantiles(source: Source) -> tuple[int, ...]:
    """The lengths at evenly spaced ranks, shortest to longest: all that a plan needs of a million samples."""
    counts = np.zeros(1, np.int64)
    for start in range(0, len(source), MEASURED_ROWS):
        lengths = source.lengths(np.arange(start, min(start + MEASURED_ROWS, len(source))))
        found = np.bincount(lengths, minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    # As np.quantile(lengths, ..., method="nearest"): a rank halfway between two is the even one of them.
    ranks = np.rint((len(source) - 1) * np.linspace(0, 1, QUANTILES)).astype(np.int64)
    return tuple(int(v) for v in np.searchsorted(np.cumsum(counts), ranks, side="right"))
