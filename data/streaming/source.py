"""Samples that stay in a store: a group is read, encoded and kept here when one of them is needed."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from isobatch.core.errors import TrainingError, UserError
from isobatch.core.measures import format_bytes
from isobatch.data.base import WEIGHT, Ragged, Source, load
from isobatch.data.streaming.group_cache import GroupCache, group_digest
from isobatch.data.streaming.group_table import GroupTable
from isobatch.data.streaming.read_ahead import ReadAhead
from isobatch.data.streaming.shards import Rows, Shard, shard_of
from isobatch.data.streaming.store import Store, changed

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.data.base import Column, Columns
    from isobatch.data.streaming.group_table import GroupPlace

LENGTH = "length"
TOKEN_BYTES = 4
WINDOWS_KEPT = 3
"""The one that is read from, the one after it, and room for what was not deleted yet."""
OPEN_GROUPS = 256
"""Groups whose files are mapped."""
OPEN_SHARDS = 64
"""Shards whose Parquet metadata is in memory."""


class GroupEncoder(Protocol):
    """Turns the rows of a group into columns; the same rows always into the same columns."""

    @property
    def columns(self) -> list[str] | None:
        """The columns of a row that it needs; None for all."""

    def encode(self, rows: Rows, where: str) -> Columns:
        """The columns of the samples of these rows, of which `where` names the place in errors."""


class StreamedSource(Source):
    """The samples of a split of data in a store.

    Lengths and weights are in the index. `read_ahead` is set by who knows how many are mixed.
    """

    def __init__(self, folder: Path, encoder: GroupEncoder, cache: GroupCache) -> None:
        self.table, self.encoder, self.cache = GroupTable.open(folder), encoder, cache
        columns = load(folder)
        self._lengths = np.asarray(columns.pop(LENGTH))
        self.weights = {k.removesuffix(WEIGHT): np.asarray(c) for k, c in columns.items()}
        self.groups = np.asarray(self.table.samples)
        self._firsts = np.concatenate([[0], np.cumsum(self.groups)])
        self.unread = np.ones(len(self.table), bool)
        """(groups,) which were not compared with their digests by this process."""
        self._begin()

    def _begin(self) -> None:
        """What each process has for itself."""
        self._process = os.getpid()
        self._store = Store()
        self._open: OrderedDict[int, dict[str, Column]] = OrderedDict()
        self._shards: OrderedDict[int, tuple[Shard, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()
        self._reader = ReadAhead(lambda group: self.cache.get(*self._request(group), wait=False))

    def __getstate__(self) -> dict[str, Any]:
        own = ("_store", "_open", "_shards", "_lock", "_reader")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self._lengths[indices].astype(np.int64)

    def check(self, indices: np.ndarray) -> None:
        for group in np.unique(self._groups_of(indices)).tolist():
            if self.unread[group]:
                self._columns_of(group)

    def unchecked_chunks(self) -> dict[str, np.ndarray]:
        return {f"groups of {len(self.table.shards):,} objects": self.unread}

    def expect(self, indices: np.ndarray) -> None:
        self._require_own_process()
        self._reader.expect(np.unique(self._groups_of(indices)).tolist())

    def keep_at_most(self, size: int) -> None:
        window = self.read_ahead * float(self._lengths.mean()) * TOKEN_BYTES
        if size < WINDOWS_KEPT * window:
            raise UserError(
                f"--stream-cache of {format_bytes(size)}: must hold {WINDOWS_KEPT} windows of groups, about"
                f" {format_bytes(WINDOWS_KEPT * window)}: raise it, or take a smaller --shuffle-window"
            )
        self.cache.limit = size

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        groups = self._groups_of(indices)
        width = max(pad_to, int(self._lengths[indices].max(initial=1)))
        batch: dict[str, np.ndarray] = {}
        for group in np.unique(groups).tolist():
            inside = np.flatnonzero(groups == group)
            rows = indices[inside] - self._firsts[group]
            for name, column in self._columns_of(group).items():
                found = column.rows(rows, width) if isinstance(column, Ragged) else np.asarray(column)[rows]
                if name not in batch:
                    batch[name] = np.empty((len(indices), *found.shape[1:]), found.dtype)
                batch[name][inside] = found
        return {**batch, "index": indices, "length": self.lengths(indices)}

    def _groups_of(self, indices: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._firsts, indices, "right") - 1

    def _columns_of(self, group: int) -> dict[str, Column]:
        """The columns of a group, mapped; read from the store where no process of this machine has it."""
        self._require_own_process()
        with self._lock:
            if group in self._open:
                self._open.move_to_end(group)
                return self._open[group]
        columns = self.cache.get(*self._request(group))
        assert columns is not None
        with self._lock:
            self._open[group] = columns
            self.unread[group] = False
            while len(self._open) > OPEN_GROUPS:
                self._open.popitem(last=False)
        return columns

    def _require_own_process(self) -> None:
        """A forked process has neither the threads of the one before nor a lock that one of them held."""
        if self._process != os.getpid():
            self._begin()

    def _request(self, group: int) -> tuple[str, bytes, Any]:
        digest = self.table.digest[group].tobytes()
        return self.table.cache_name(group), digest, partial(self._read, group, digest)

    def _read(self, group: int, digest: bytes) -> Columns:
        """The columns of a group from the store. Raises TrainingError where they are not those indexed."""
        place = self.table.place(group)
        shard = self._shard(place.shard)
        columns = self.encoder.encode(rows_of_group(shard, place, self.encoder), shard.stored.address)
        if group_digest(columns) != digest:
            stored = self.table.shards[place.shard]
            self._store.require_unchanged(stored)
            raise TrainingError(f"{changed(stored.address)} (or the library tokenizers has another version)")
        return columns

    def _shard(self, number: int) -> Shard:
        """A shard, which is asked for its size and version before it is first read."""
        with self._lock:
            if number not in self._shards:
                self._shards[number] = shard_of(self._store, self.table.shards[number]), threading.Lock()
            self._shards.move_to_end(number)
            shard, lock = self._shards[number]
            while len(self._shards) > OPEN_SHARDS:
                self._shards.popitem(last=False)
        with lock:
            if not shard.compared:
                self._store.require_unchanged(shard.stored)
                shard.compared = True
        return shard


def rows_of_group(shard: Shard, place: GroupPlace, encoder: GroupEncoder) -> Rows:
    """The rows of a group, from its shard."""
    rows = shard.rows(place.extent, encoder.columns)
    return rows[place.rows.first : len(rows) if place.rows.stop < 0 else place.rows.stop]
