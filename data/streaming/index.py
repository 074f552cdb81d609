"""The index of data in a store: made once, from every row; shards that are indexed are not read again.

Each shard's part is kept by itself, under a name that says what it was made from, so that an index goes on
where it was stopped, and data that grew costs its new shards.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isobatch.core.atomic_files import explain_write_errors
from isobatch.core.errors import UserError
from isobatch.core.package import cache_folder
from isobatch.core.terminal import doing
from isobatch.data import readers
from isobatch.data.base import WEIGHT, Column, Ragged, load, save
from isobatch.data.streaming.groups import (
    GROUPS_FILE,
    GroupCache,
    GroupPlace,
    GroupTable,
    cache_name,
    group_digest,
    save_whole,
    short_hash,
)
from isobatch.data.streaming.shards import Extent, Rows, shard_of
from isobatch.data.streaming.source import LENGTH, TextGroupEncoder
from isobatch.data.streaming.store import Store, StoredObject, name_of
from isobatch.data.text.row_fields import FIELD, LEFT_OUT, RowCounts

THREADS = 16
"""Shards that are read at a time; they tokenize on all cores between them."""
LARGE_BYTES = 8 << 20
"""Groups of more are read one at a time: a byte in the file takes some 16 of memory until it is tokenized."""
PARTS_VERSION = 2
"""Raise it when what is kept of a shard is written differently: older parts are then made anew."""
MOST_HELD_OUT = 10_000
"""Rows that are validation where there is no such split: of a terabyte a twentieth would never be read."""


@dataclass(slots=True)
class IndexedGroup:
    """A group of rows, and what is known of its samples."""

    place: GroupPlace
    rows: int
    digest: bytes
    sizes: dict[str, int]
    columns: dict[str, np.ndarray]
    """LENGTH and weights, (samples,) each."""

    @property
    def samples(self) -> int:
        return len(self.columns[LENGTH]) if self.columns else 0


def load_part(folder: Path, shard: int) -> list[IndexedGroup]:
    """What `IndexBuilder` has kept of a shard."""
    columns, first = {name: np.asarray(column) for name, column in load(folder).items()}, 0
    groups = []
    for start, end, rows, samples, digest, sizes in json.loads((folder / GROUPS_FILE).read_text()):
        own = {name: column[first : first + samples] for name, column in columns.items()}
        place = GroupPlace(shard, Extent(start, end))
        groups.append(IndexedGroup(place, rows, bytes.fromhex(digest), sizes, own))
        first += samples
    return groups


def _joined(groups: list[IndexedGroup]) -> dict[str, Column]:
    kept = [group.columns for group in groups if group.samples]
    return {name: np.concatenate([one[name] for one in kept]) for name in kept[0]} if kept else {}


def divide(objects: list[StoredObject]) -> dict[str, list[int]]:
    """Split -> numbers of its objects, by the words in their names; train where there are none.

    Raises UserError where nothing is left to train on.
    """
    splits: dict[str, list[int]] = {"train": []}
    for number, one in enumerate(objects):
        splits.setdefault(readers.split_named(name_of(one.address)) or "train", []).append(number)
    if not splits["train"]:
        raise UserError(f"--data: all objects are held out by their names, as {objects[0].address}")
    return splits


class IndexBuilder:
    """Indexes shards in threads, and writes the index of every split."""

    def __init__(self, objects: list[StoredObject], encoder: TextGroupEncoder, cache: GroupCache) -> None:
        self.objects, self.encoder, self.cache = objects, encoder, cache
        self.encoding, self.store = encoder.identity(), Store()
        self.folder = cache_folder() / "shards"
        self._kept, self._large = 0, threading.Lock()

    def build(
        self, folder: Path, splits: Mapping[str, list[int]]
    ) -> tuple[dict[str, dict[str, int]], list[str]]:
        """Write the index of every split into `folder`.

        Returns (split -> sums of what the encoder counts, notes). Raises UserError.
        """
        parts = self.index_all()
        found: dict[str, dict[str, int]] = {}
        notes: list[str] = []
        groups = {split: [group for n in numbers for group in parts[n]] for split, numbers in splits.items()}
        if "valid" not in groups:
            held_out = self.hold_out(groups)
            notes.append(f"there is no validation split: the last {held_out:,} rows are it")
        total = RowCounts()
        for split, members in groups.items():
            kept = [group for group in members if group.samples]
            if not kept:
                raise UserError(f"--data {self.encoder.name}: the {split} split has nothing to learn from")
            save(folder / split, _joined(kept))
            self.table(kept).write(folder / split)
            sizes: Counter[str] = Counter()
            for group in members:
                sizes.update(group.sizes)
            noted = RowCounts({n: count for n, count in sizes.items() if n.startswith((LEFT_OUT, FIELD))})
            found[split] = {name: count for name, count in sizes.items() if name not in noted}
            notes += noted.notes(split, 0)
            total.update(noted)
        return found, [*notes, *total.field_notes()]

    def index_all(self) -> list[list[IndexedGroup]]:
        """The groups of every shard."""
        numbers = range(len(self.objects))
        with explain_write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            pool = ThreadPoolExecutor(THREADS, "index")
            try:
                for done, _ in enumerate(pool.map(self._keep, numbers), 1):
                    doing("indexing", done, len(numbers))
            finally:
                pool.shutdown(cancel_futures=True)
        return [load_part(self.part_of(number), number) for number in numbers]

    def part_of(self, number: int) -> Path:
        """The folder in which a shard's part is kept."""
        one = self.objects[number]
        return self.folder / short_hash(PARTS_VERSION, self.encoding, one.address, one.size, one.version)

    def _keep(self, number: int) -> None:
        one, folder = self.objects[number], self.part_of(number)
        if not (folder / "index.json").exists():
            shard = shard_of(self.store, one, self.encoder.columns)
            is_large = shard.largest_group() > LARGE_BYTES
            with self._large if is_large else contextlib.nullcontext():
                found = [self.indexed(GroupPlace(number, extent), rows) for extent, rows in shard.groups()]
            self.store.require_unchanged(one)
            column = self.encoder.column
            lost = f"{LEFT_OUT}no column `{column}`"
            if found and all(group.sizes.get(lost) == group.rows for group in found):
                raise UserError(f"{one.address} has no column {column}, and the first object has")
            described = [[*g.place.extent, g.rows, g.samples, g.digest.hex(), g.sizes] for g in found]
            save_whole(folder, _joined(found), described)

    def indexed(self, place: GroupPlace, rows: Rows) -> IndexedGroup:
        """What is known of a group; its samples are kept on this machine while there is room."""
        columns, sizes = self.encoder.encode(rows, self.objects[place.shard].address)
        if not columns:
            return IndexedGroup(place, len(rows), b"", sizes, {})
        if self._kept < self.cache.limit // 2:
            self._kept += self.cache.keep(cache_name(self.objects, place, self.encoding), columns)
        lengths = next(column for column in columns.values() if isinstance(column, Ragged)).lengths
        kind = np.uint16 if lengths.max(initial=0) < 1 << 16 else np.uint32
        weights = {name: np.asarray(c) for name, c in columns.items() if name.endswith(WEIGHT)}
        ahead = {LENGTH: lengths.astype(kind), **weights}
        return IndexedGroup(place, len(rows), group_digest(columns), sizes, ahead)

    def table(self, groups: list[IndexedGroup]) -> GroupTable:
        """The table of some groups that hold samples."""
        digests = np.frombuffer(b"".join(group.digest for group in groups), np.uint8)
        return GroupTable(
            shards=self.objects,
            encoding=self.encoding,
            shard=np.array([group.place.shard for group in groups], np.int32),
            extent=np.array([group.place.extent for group in groups], np.int64),
            rows=np.array([(group.place.first, group.place.stop) for group in groups], np.int64),
            samples=np.array([group.samples for group in groups], np.int64),
            digest=digests.reshape(len(groups), -1),
        )

    def hold_out(self, groups: dict[str, list[IndexedGroup]]) -> int:
        """Take the last rows of training as validation; how many. A group may be divided."""
        total = sum(group.rows for group in groups["train"])
        wanted = left = max(1, min(total // readers.VALIDATION_ONE_IN, MOST_HELD_OUT))
        if total < 2:
            said = f"holds {total} rows: training and validation need one each"
            raise UserError(f"--data {self.encoder.name}: {said}")
        groups["valid"] = []
        while left:
            last = groups["train"].pop()
            if last.rows > left:
                before, last = self._divided(last, last.rows - left)
                groups["train"].append(before)
            groups["valid"].insert(0, last)
            left -= last.rows
        return wanted

    def _divided(self, group: IndexedGroup, border: int) -> list[IndexedGroup]:
        """The rows of a group before a border and those behind it, as groups of their own."""
        shard, extent, _, _ = group.place
        rows = shard_of(self.store, self.objects[shard], self.encoder.columns).rows(extent)
        parts = ((0, border), (border, len(rows)))
        return [self.indexed(GroupPlace(shard, extent, a, b), rows[a:b]) for a, b in parts]
