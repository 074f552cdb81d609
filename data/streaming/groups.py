"""Groups of neighbouring samples: which a split has, and their arrays on this machine's disk.

A group's folder holds its columns as prepared data does. Its name says what it was made from, so that runs
with the same data and tokenizer share it, and nothing in it is ever changed. The cache is used by all
processes of the machine; the groups that were used least lately are deleted for new ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.package import cache_folder
from isobatch.data.base import Column, Columns, Ragged, load, save
from isobatch.data.streaming.shards import Extent, Rows, Shard
from isobatch.data.streaming.store import StoredObject

FOLDER = "ISOBATCH_STREAM_CACHE"
"""Environment variable with the folder of groups, on a disk of the node's own."""
DEFAULT_BYTES = 20 * 10**9
RESCAN_SHARE = 50
"""The folder is measured again when this part of the limit was written: one in so many."""
STALE_SECONDS = 3600
"""A temporary folder that is older was left by a process that died."""
DIGEST_BYTES = 16
SHARDS_FILE = "shards.json"
GROUPS_FOLDER, GROUPS_FILE = "groups", "groups.json"
TO_THE_END = -1
COLUMNS = ("shard", "extent", "rows", "samples", "digest")


class GroupPlace(NamedTuple):
    """Where a group of samples comes from."""

    shard: int
    extent: Extent
    first: int = 0
    """The rows from `first` to `stop` belong to the split: all, but where a border of splits is inside."""
    stop: int = TO_THE_END

    def rows_of(self, shard: Shard) -> Rows:
        """The rows of the group, from its shard."""
        rows = shard.rows(self.extent)
        return rows[self.first : len(rows) if self.stop == TO_THE_END else self.stop]


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
    """(groups, 2) int64, `first` and `stop` of GroupPlace."""
    samples: np.ndarray
    """(groups,) int64."""
    digest: np.ndarray
    """(groups, DIGEST_BYTES) uint8, see `group_digest`."""

    def __len__(self) -> int:
        return len(self.shard)

    def place(self, group: int) -> GroupPlace:
        """Where a group comes from."""
        extent = Extent(*self.extent[group].tolist())
        return GroupPlace(int(self.shard[group]), extent, *self.rows[group].tolist())

    def write(self, folder: Path) -> None:
        """Write the table of a split into its folder, and beside it what the tables of all splits share."""
        save(folder / GROUPS_FOLDER, {name: getattr(self, name) for name in COLUMNS})
        shared = {"encoding": self.encoding, "shards": [asdict(one) for one in self.shards]}
        atomic_files.write_json(folder.parent / SHARDS_FILE, shared)

    @classmethod
    def open(cls, folder: Path) -> GroupTable:
        """The table of a prepared split."""
        found = atomic_files.read_json(folder.parent / SHARDS_FILE)
        shards = [StoredObject(**one) for one in found["shards"]]
        columns = {name: np.asarray(column) for name, column in load(folder / GROUPS_FOLDER).items()}
        return cls(shards, found["encoding"], **columns)


def short_hash(*parts: object) -> str:
    """32 hex digits of SHA-256 over values that JSON knows."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def cache_name(shards: list[StoredObject], place: GroupPlace, encoding: str) -> str:
    """32 hex digits of all that a group's arrays depend on."""
    stored = shards[place.shard]
    where = (stored.address, stored.size, stored.version, *place.extent)
    return short_hash(encoding, *where, place.first, place.stop)


def groups_folder() -> Path:
    """Where groups are kept: $ISOBATCH_STREAM_CACHE, else beside prepared data."""
    return Path(os.environ.get(FOLDER) or cache_folder() / "groups")


def group_digest(columns: Columns) -> bytes:
    """A digest of the names, types and values of a group's columns."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name, column in sorted(columns.items()):
        parts = [column.values, column.offsets] if isinstance(column, Ragged) else [column]
        for part in parts:
            digest.update(f"{name} {part.dtype.str} {part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


def save_whole(folder: Path, columns: Columns, described: object = None) -> int:
    """Save columns, and groups.json with what is `described`, all or nothing; the bytes that were written.

    Where another process was first, its own stay.
    """
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        save(temporary, columns)
        if described is not None:
            (temporary / GROUPS_FILE).write_text(json.dumps(described))
        size = _size(temporary)
        temporary.replace(folder)
        return size
    except OSError:
        if not folder.is_dir():
            raise
        return 0
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class GroupCache:
    """Groups by name in a folder of at most `limit` bytes. Any number of processes may use it at once."""

    def __init__(self, folder: Path, limit: int = DEFAULT_BYTES) -> None:
        self.folder, self.limit = folder, limit
        self._unmeasured = limit  # so that the first write measures
        self._lock = threading.Lock()

    def get(self, name: str, digest: bytes, make: Callable[[], Columns]) -> dict[str, Column]:
        """The columns of a group, from the folder where they are as they were indexed, else made and kept.

        One process at a time makes a group. What `make` returns is not compared with the digest.
        """
        from filelock import FileLock

        if (found := self.look_up(name, digest)) is not None:
            return found
        with (
            atomic_files.explain_write_errors(self.folder),
            atomic_files.shared_folder(self.folder),
            FileLock(self.folder / f".lock-{name[-2:]}"),
        ):
            if (found := self.look_up(name, digest)) is None:
                found = dict(make())
                self.keep(name, found)
            return found

    def look_up(self, name: str, digest: bytes) -> dict[str, Column] | None:
        """The columns of a group that is in the folder and whole; a damaged one is deleted."""
        folder = self.folder / name
        try:
            columns = load(folder)
            os.utime(folder)
        except (OSError, UserError, ValueError, KeyError):
            return None  # it is not there, or is being deleted for others
        if group_digest(columns) == digest:
            return columns
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def keep(self, name: str, columns: Columns) -> int:
        """Write a group, and delete the groups that were used least lately where there are too many.

        Returns the bytes that were written.
        """
        size = save_whole(self.folder / name, columns)
        with self._lock:
            self._unmeasured += size
            if self._unmeasured * RESCAN_SHARE >= self.limit:
                self._unmeasured = 0
                self._shrink()
        return size

    def _shrink(self) -> None:
        """Delete the groups that were used least lately, until the folder is within its limit."""
        groups = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):
                changed, is_temporary = entry.stat().st_mtime, entry.name.startswith(".")
                if entry.is_dir() and (not is_temporary or time.time() - changed > STALE_SECONDS):
                    groups.append((changed, _size(Path(entry.path)), entry.path))
        excess = sum(size for _, size, _ in groups) - self.limit * (RESCAN_SHARE - 1) // RESCAN_SHARE
        for _, size, path in sorted(groups):
            if excess > 0:
                shutil.rmtree(path, ignore_errors=True)
                excess -= size


def _size(folder: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(entry.stat().st_size for entry in os.scandir(folder))
