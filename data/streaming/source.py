"""Samples that stay in a store: a group is read, encoded as local preparation does, and kept when needed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.measures import format_bytes
from isobatch.data.base import WEIGHT, Column, Columns, NoSamplesError, Ragged, Source, load
from isobatch.data.cleaning import CLEANING_VERSION, CleaningStep
from isobatch.data.corpora import Corpus
from isobatch.data.digests import file_hash
from isobatch.data.streaming.groups import GroupCache, GroupTable, cache_name, group_digest
from isobatch.data.streaming.shards import Rows, Shard, shard_of
from isobatch.data.streaming.store import Store, changed_object
from isobatch.data.text import chat_templates
from isobatch.data.text.conversations import TOKENIZATION_VERSION, Conversations
from isobatch.data.text.plain_text import PlainText, TokenizationSettings
from isobatch.data.text.row_fields import FIELD, LEFT_OUT
from isobatch.data.text.sources import TEXT, TextSet

VERSION = 2
"""Part of the cache key: raise it when the same rows become other tokens."""


@dataclass(slots=True)
class TextGroupEncoder:
    """Rows of text to tokens, as local preparation does it."""

    name: str
    """--data, in errors."""
    kind: str
    """TEXT, or the column that marks conversations."""
    column: str
    """The column of plain text."""
    cleaning: tuple[CleaningStep, ...]
    options: Any
    """TextOptions."""
    tokenizer_folder: Path | None
    tokenization: TokenizationSettings = field(init=False)
    """Set when the tokenizer is known."""

    @property
    def columns(self) -> list[str] | None:
        return [self.column] if self.kind == TEXT else None

    def text_set(self, rows: Mapping[str, Rows], where: str) -> TextSet:
        """The rows of each split as local preparation sees a set."""
        located = {split: partial(_located, found, where) for split, found in rows.items()}
        if self.kind == TEXT:
            return PlainText(self.name, Corpus(located, column=self.column), self.cleaning)
        folder, steps = self.tokenizer_folder, self.cleaning
        return Conversations(self.name, located, self.kind, self.options, folder, steps)

    def encode(self, rows: Rows, where: str) -> tuple[dict[str, Column], dict[str, int]]:
        """(columns, the sizes that Facts sums up, and what is noted of rows); no columns without a text."""
        found = self.text_set({"train": rows}, where)
        found.bind_tokenizer(self.tokenization)
        columns: dict[str, Column] = {}
        sizes: dict[str, int] = {}
        with contextlib.suppress(NoSamplesError):
            columns, sizes = found.encode("train", self.tokenization)
        noted = {name: n for name, n in found.total.items() if name.startswith((LEFT_OUT, FIELD))}
        return columns, sizes | noted

    def identity(self) -> str:
        """A hash of all that decides which tokens rows become."""
        one, options, template = self.tokenization, self.options, None
        if file := chat_templates.template_file(self.tokenizer_folder):
            template = file_hash(file)
        cleaning = [CLEANING_VERSION, *map(str, self.cleaning)]
        parts = [VERSION, self.kind, self.column, cleaning, TOKENIZATION_VERSION]
        parts += [chat_templates.text_of(options.template), options.template_kwargs, options.response_only]
        parts += [dict(one.special_ids), template, one.max_length]
        text = json.dumps(parts, sort_keys=True, default=str) + one.tokenizer.to_str()
        return hashlib.sha256(text.encode()).hexdigest()


def _located(rows: Rows, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{where} row {number}", row) for number, row in enumerate(rows, 1))


LENGTH = "length"
TOKEN_BYTES = 4
WINDOWS_KEPT = 3
"""The one that is read from, the one after it, and room for what was not deleted yet."""
OPEN_GROUPS = 256
"""Groups whose files are mapped."""
OPEN_SHARDS = 64
"""Shards whose Parquet metadata is in memory."""
THREADS = 8
"""They get groups before they are needed."""
REMEMBERED = 128
"""Groups that were asked for last, which are not asked for again."""


class StreamedSource(Source):
    """The samples of a split of data in a store.

    Lengths and weights are in the index. `read_ahead` is set by who knows how many are mixed.
    """

    def __init__(self, folder: Path, encoder: TextGroupEncoder, cache: GroupCache) -> None:
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
        self._columns_of = lru_cache(OPEN_GROUPS)(self._columns)
        self._shard_of = lru_cache(OPEN_SHARDS)(self._shard)
        self._expected: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._expect_once = lru_cache(REMEMBERED)(self._expected.put)
        self._has_readers = False

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self._lengths[indices].astype(np.int64)

    def check(self, indices: np.ndarray) -> None:
        self._require_own_process()
        for group in np.unique(self._groups_of(indices)).tolist():
            if self.unread[group]:
                self._columns_of(group)

    def expect(self, indices: np.ndarray) -> None:
        self._require_own_process()
        for group in np.unique(self._groups_of(indices)).tolist():
            self._expect_once(group)
        for number in range(0 if self._has_readers else THREADS):
            threading.Thread(target=self._read_ahead, name=f"read ahead {number}", daemon=True).start()
        self._has_readers = True

    def _read_ahead(self) -> None:
        """Get the groups that are expected; who needs one does not wait for this thread, which never ends."""
        while True:
            group = self._expected.get()
            with contextlib.suppress(Exception):  # who needs the group meets the error too, and is told
                self.cache.get(*self._request(group))

    def keep_at_most(self, size: int) -> None:
        window = self.read_ahead * float(self._lengths.mean()) * TOKEN_BYTES
        if size < WINDOWS_KEPT * window:
            raise UserError(
                f"--stream-cache of {format_bytes(size)}: must hold {WINDOWS_KEPT} windows of groups, about"
                f" {format_bytes(WINDOWS_KEPT * window)}: raise it, or take a smaller --shuffle-window"
            )
        self.cache.limit = size

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        self._require_own_process()
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

    def _columns(self, group: int) -> dict[str, Column]:
        """The columns of a group, mapped; read from the store where no process of this machine has it."""
        columns = self.cache.get(*self._request(group))
        self.unread[group] = False
        return columns

    def _require_own_process(self) -> None:
        """A forked process has neither the threads of the one before nor a lock that one of them held."""
        if self._process != os.getpid():
            self._begin()

    def _request(self, group: int) -> tuple[str, bytes, Any]:
        digest = self.table.digest[group].tobytes()
        name = cache_name(self.table.shards, self.table.place(group), self.table.encoding)
        return name, digest, partial(self._read, group, digest)

    def _read(self, group: int, digest: bytes) -> Columns:
        """The columns of a group from the store. Raises TrainingError where they are not those indexed."""
        place = self.table.place(group)
        shard = self._shard_of(place.shard)
        address = shard.stored.address
        columns = self.encoder.encode(place.rows_of(shard), address)[0]
        if group_digest(columns) != digest:
            self._store.require_unchanged(shard.stored)
            raise changed_object(address, " (or the library tokenizers has another version)")
        return columns

    def _shard(self, number: int) -> Shard:
        """A shard, which is asked for its size and version before it is first read."""
        self._store.require_unchanged(self.table.shards[number])
        return shard_of(self._store, self.table.shards[number], self.encoder.columns)
