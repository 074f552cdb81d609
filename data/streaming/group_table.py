"""The table of groups of a split, and the shards they lie in: what an index says beside the samples."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from isobatch.core import atomic_files
from isobatch.data.base import load, save
from isobatch.data.streaming.shards import Extent
from isobatch.data.streaming.store import StoredObject

if TYPE_CHECKING:
    from pathlib import Path

SHARDS_FILE = "shards.json"
GROUPS_FOLDER = "groups"


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows of a group that belong to a split: all, but where the border of two splits is inside it."""

    first: int = 0
    stop: int = -1
    """-1: to the end."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where a group of samples comes from."""

    shard: int
    extent: Extent
    rows: Slice = Slice()


@dataclass(frozen=True, slots=True, eq=False)
class GroupTable:
    """The groups of a split in order, end to end."""

    shards: list[StoredObject]
    """All shards of the data."""
    encoding: str
    """A hash of what turns rows into samples."""
    shard: np.ndarray
    """(groups,) the number of each group's shard."""
    extent: np.ndarray
    """(groups, 2) int64."""
    rows: np.ndarray
    """(groups, 2) int64, see Slice."""
    samples: np.ndarray
    """(groups,) int64."""
    digest: np.ndarray
    """(groups, DIGEST_BYTES) uint8, see `group_digest`."""

    def __len__(self) -> int:
        return len(self.shard)

    def place(self, group: int) -> GroupPlace:
        """Where a group comes from."""
        extent, rows = self.extent[group].tolist(), self.rows[group].tolist()
        return GroupPlace(int(self.shard[group]), Extent(*extent), Slice(*rows))

    def cache_name(self, group: int) -> str:
        """Names a group by all that its arrays depend on."""
        return cache_name(self.shards, self.place(group), self.encoding)

    def write(self, folder: Path) -> None:
        """Write the table of a split into its folder; `write_shards` writes the rest."""
        columns = {"shard": self.shard, "extent": self.extent, "rows": self.rows}
        save(folder / GROUPS_FOLDER, {**columns, "samples": self.samples, "digest": self.digest})

    @classmethod
    def open(cls, folder: Path) -> GroupTable:
        """The table of a prepared split."""
        found = atomic_files.read_json(folder.parent / SHARDS_FILE)
        shards = [StoredObject(**one) for one in found["shards"]]
        columns = {name: np.asarray(column) for name, column in load(folder / GROUPS_FOLDER).items()}
        return cls(shards, found["encoding"], **columns)


def write_shards(folder: Path, shards: list[StoredObject], encoding: str) -> None:
    """Write what the tables of all splits share."""
    content = {"encoding": encoding, "shards": [asdict(one) for one in shards]}
    atomic_files.write_json(folder / SHARDS_FILE, content)


def cache_name(shards: list[StoredObject], place: GroupPlace, encoding: str) -> str:
    """32 hex digits of all that a group's arrays depend on."""
    stored = shards[place.shard]
    parts = [stored.address, stored.size, stored.version, *place.extent, place.rows.first, place.rows.stop]
    return hashlib.sha256(json.dumps([encoding, *parts]).encode()).hexdigest()[:32]
