"""The index of data in a store: made once, from every row; shards that are indexed are not read again.

Each shard's part is kept by itself, under a name that says what it was made from, so that an index goes on
where it was stopped, and data that grew costs its new shards.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from isobatch.core.atomic_files import explain_write_errors
from isobatch.core.errors import UserError
from isobatch.core.package import cache_folder
from isobatch.core.terminal.status import doing
from isobatch.data import readers
from isobatch.data.base import WEIGHT, Ragged, save
from isobatch.data.streaming import group_table
from isobatch.data.streaming.group_cache import group_digest
from isobatch.data.streaming.group_table import GroupPlace, GroupTable, Slice
from isobatch.data.streaming.shard_index import IndexedGroup, joined, load_part, save_part
from isobatch.data.streaming.shards import Room, shard_of
from isobatch.data.streaming.source import LENGTH, GroupEncoder, rows_of_group
from isobatch.data.streaming.store import Store, StoredObject, name_of
from isobatch.data.text.row_fields import ConversationCounts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from isobatch.data.base import Column, Columns
    from isobatch.data.preparation.encoding import Share
    from isobatch.data.streaming.group_cache import GroupCache
    from isobatch.data.streaming.shards import Rows

THREADS = 16
"""Shards that are read at a time; they tokenize on all cores between them."""
ROOM_BYTES = 2 << 30
"""Memory for the groups that are read at a time; one that needs more has it alone."""
BYTES_OF_A_BYTE = 16
"""Memory that a byte of a Parquet file needs while its group is read and tokenized."""
MOST_HELD_OUT = 10_000
"""Rows that are validation where there is no such split: of a terabyte a twentieth would never be read."""


class CountingGroupEncoder(GroupEncoder, Protocol):
    """An encoder that counts what it encodes, and says what its columns depend on."""

    def encode_and_count(self, rows: Rows, where: str) -> tuple[Columns, dict[str, int]]: ...

    def identity(self) -> str: ...


@dataclass(slots=True)
class Index:
    """What Facts should know of an index."""

    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Split -> sums of what the encoder counts."""
    notes: list[str] = field(default_factory=list)
    stored_bytes: int = 0
    """Of all objects."""


def divide(objects: list[StoredObject]) -> dict[str, list[int]]:
    """Split -> numbers of its objects, by the words in their names; train where there are none.

    Raises UserError where nothing is left to train on.
    """
    splits: dict[str, list[int]] = {"train": []}
    for number, one in enumerate(objects):
        words = re.split(r"[^a-z]+", name_of(one.address).lower())
        split = next((readers.SPLITS[word] for word in words if word in readers.SPLITS), "train")
        splits.setdefault(split, []).append(number)
    if not splits["train"]:
        raise UserError(f"--data: all objects are held out by their names, as {objects[0].address}")
    return splits


def build(
    folder: Path,
    data: str,
    objects: list[StoredObject],
    splits: Mapping[str, list[int]],
    encoder: CountingGroupEncoder,
    cache: GroupCache,
) -> Index:
    """Write the index of every split into `folder`. `data`: --data, for errors."""
    builder = _Builder(objects, encoder, cache)
    with explain_write_errors(builder.folder):
        parts = builder.index_all()
    found = Index(stored_bytes=sum(one.size for one in objects))
    groups = {
        split: [group for number in numbers for group in parts[number]] for split, numbers in splits.items()
    }
    if "valid" not in groups:
        held_out = builder.hold_out(groups, data)
        found.notes.append(f"there is no validation split: the last {held_out:,} rows are it")
    group_table.write_shards(folder, objects, builder.encoding)
    total = ConversationCounts()
    for split, members in groups.items():
        kept = [group for group in members if group.samples]
        if not kept:
            raise UserError(f"--data {data}: the {split} split has nothing to learn from")
        _write(folder / split, objects, builder.encoding, kept)
        found.sizes[split] = _summed(members)
        noted = ConversationCounts.from_noted(found.sizes[split])
        found.notes += noted.notes(split, 0)
        total.add(noted.to_dict())
    found.notes += total.field_notes()
    return found


def index_share(
    objects: list[StoredObject], encoder: CountingGroupEncoder, cache: GroupCache, share: Share
) -> None:
    """Index the objects of a share, where other tasks index the others."""
    builder = _Builder(objects, encoder, cache)
    own = [number for number in range(len(objects)) if share.takes(number, builder.part_of(number))]
    with explain_write_errors(builder.folder):
        builder.index(own)


class _Builder:
    """Indexes shards in threads."""

    def __init__(self, objects: list[StoredObject], encoder: CountingGroupEncoder, cache: GroupCache) -> None:
        self.objects, self.encoder, self.cache = objects, encoder, cache
        self.encoding, self.store = encoder.identity(), Store()
        self.folder = cache_folder() / "shards"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._kept, self._room = 0, Room(ROOM_BYTES)

    def index_all(self) -> list[list[IndexedGroup]]:
        """The groups of every shard."""
        every = range(len(self.objects))
        self.index(every)
        return [load_part(self.part_of(number), number) for number in every]

    def index(self, numbers: Sequence[int]) -> None:
        """Keep the parts of these shards."""
        pool = ThreadPoolExecutor(THREADS, "index")
        try:
            for done, _ in enumerate(pool.map(self._keep, numbers), 1):
                doing("indexing", done, len(numbers))
        finally:
            pool.shutdown(cancel_futures=True)

    def part_of(self, number: int) -> Path:
        """The folder in which a shard's part is kept."""
        one = self.objects[number]
        key = json.dumps([self.encoding, one.address, one.size, one.version])
        return self.folder / hashlib.sha256(key.encode()).hexdigest()[:32]

    def _keep(self, number: int) -> None:
        one, folder = self.objects[number], self.part_of(number)
        if not (folder / "index.json").exists():
            shard = shard_of(self.store, one)
            with self._room.taken(BYTES_OF_A_BYTE * shard.largest_group(self.encoder.columns)):
                found = [
                    self.indexed(GroupPlace(number, extent), rows)
                    for extent, rows in shard.groups(self.encoder.columns)
                ]
            self.store.require_unchanged(one)
            save_part(folder, found)

    def indexed(self, place: GroupPlace, rows: Rows) -> IndexedGroup:
        """What is known of a group; its samples are kept on this machine while there is room."""
        columns, sizes = self.encoder.encode_and_count(rows, self.objects[place.shard].address)
        if not columns:
            return IndexedGroup(place, len(rows), b"", sizes, {})
        if self._kept < self.cache.limit // 2:
            self.cache.keep(group_table.cache_name(self.objects, place, self.encoding), columns)
            self._kept += sum(_bytes(column) for column in columns.values())
        return IndexedGroup(place, len(rows), group_digest(columns), sizes, _known_ahead(columns))

    def hold_out(self, groups: dict[str, list[IndexedGroup]], data: str) -> int:
        """Take the last rows of training as validation; how many. A group may be divided."""
        total = sum(group.rows for group in groups["train"])
        wanted = left = max(1, min(total // readers.VALIDATION_ONE_IN, MOST_HELD_OUT))
        if total < 2:
            raise UserError(f"--data {data}: holds {total} rows: training and validation need one each")
        groups["valid"] = []
        while left:
            last = groups["train"].pop()
            if last.rows > left:
                before, last = self._divided(last, last.rows - left)
                groups["train"].append(before)
            groups["valid"].insert(0, last)
            left -= last.rows
        return wanted

    def _divided(self, group: IndexedGroup, border: int) -> tuple[IndexedGroup, IndexedGroup]:
        """The rows of a group before a border and those behind it, as groups of their own."""
        shard = shard_of(self.store, self.objects[group.place.shard])
        rows = shard.rows(group.place.extent, self.encoder.columns)
        first, second = Slice(0, border), Slice(border, len(rows))
        return (
            self.indexed(GroupPlace(group.place.shard, group.place.extent, first), rows[:border]),
            self.indexed(GroupPlace(group.place.shard, group.place.extent, second), rows[border:]),
        )


def _known_ahead(columns: Columns) -> dict[str, np.ndarray]:
    """What is known of samples before they are read: lengths and weights."""
    ragged = next(column for column in columns.values() if isinstance(column, Ragged))
    lengths = ragged.lengths
    weights = {name: np.asarray(c) for name, c in columns.items() if name.endswith(WEIGHT)}
    kind = np.uint16 if lengths.max(initial=0) < 1 << 16 else np.uint32
    return {LENGTH: lengths.astype(kind), **weights}


def _bytes(column: Column) -> int:
    return column.values.nbytes + column.offsets.nbytes if isinstance(column, Ragged) else column.nbytes


def _write(folder: Path, objects: list[StoredObject], encoding: str, groups: list[IndexedGroup]) -> None:
    """Write a split: what is known of its samples, and the table of its groups."""
    save(folder, joined(groups))
    GroupTable(
        shards=objects,
        encoding=encoding,
        shard=np.array([group.place.shard for group in groups], np.int32),
        extent=np.array([group.place.extent for group in groups], np.int64),
        rows=np.array([(group.place.rows.first, group.place.rows.stop) for group in groups], np.int64),
        samples=np.array([group.samples for group in groups], np.int64),
        digest=np.frombuffer(b"".join(group.digest for group in groups), np.uint8).reshape(len(groups), -1),
    ).write(folder)


def _summed(groups: list[IndexedGroup]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for group in groups:
        total.update(group.sizes)
    return dict(total)


def first_rows(folder: Path, encoder: GroupEncoder) -> Rows:
    """The rows of the first group of a split."""
    table = GroupTable.open(folder)
    place = table.place(0)
    return rows_of_group(shard_of(Store(), table.shards[place.shard]), place, encoder)
