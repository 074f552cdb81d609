"""Groups as arrays on this machine's disk: made once, used by all processes, the oldest deleted for new ones.

A group's folder holds its columns as prepared data does. Its name says what it was made from, so that runs
with the same data and tokenizer share it, and nothing in it is ever changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isobatch.core.atomic_files import explain_write_errors
from isobatch.core.errors import UserError
from isobatch.core.package import cache_folder
from isobatch.data.base import Ragged, load, save

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.data.base import Column, Columns

FOLDER = "ISOBATCH_STREAM_CACHE"
"""Environment variable with the folder of groups, on a disk of the node's own."""
DEFAULT_BYTES = 20 * 10**9
RESCAN_SHARE = 50
"""The folder is measured again when this part of the limit was written: one in so many."""
STALE_SECONDS = 3600
"""A temporary folder that is older was left by a process that died."""
DIGEST_BYTES = 16


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


class GroupCache:
    """Groups by name in a folder of at most `limit` bytes. Any number of processes may use it at once."""

    def __init__(self, folder: Path, limit: int = DEFAULT_BYTES) -> None:
        self.folder, self.limit = folder, limit
        self._unmeasured = limit  # so that the first write measures
        self._lock = threading.Lock()

    def get(
        self, name: str, digest: bytes, make: Callable[[], Columns], wait: bool = True
    ) -> dict[str, Column] | None:
        """The columns of a group, from the folder where they are as they were indexed, else made and kept.

        One process at a time makes a group; without `wait`, None where another one does so now. What `make`
        returns is not compared with the digest.
        """
        if (found := self.look_up(name, digest)) is not None:
            return found
        with explain_write_errors(self.folder):
            return self._make(name, digest, make, wait)

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

    def _make(
        self, name: str, digest: bytes, make: Callable[[], Columns], wait: bool
    ) -> dict[str, Column] | None:
        from filelock import FileLock, Timeout

        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.folder / f".lock-{name[-2:]}", timeout=-1 if wait else 0):
                if (found := self.look_up(name, digest)) is not None:
                    return found
                columns = make()
                self.keep(name, columns)
                return dict(columns)
        except Timeout:
            return None

    def keep(self, name: str, columns: Columns) -> None:
        """Write a group, and delete the groups that were used least lately where there are too many."""
        temporary = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            save(temporary, columns)
            size = _size(temporary)
            temporary.replace(self.folder / name)
        except OSError:
            if not (self.folder / name).is_dir():
                raise
            return  # another process was first
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        with self._lock:
            self._unmeasured += size
            if self._unmeasured * RESCAN_SHARE >= self.limit:
                self._unmeasured = 0
                self._shrink()

    def _shrink(self) -> None:
        """Delete the groups that were used least lately, until the folder is within its limit."""
        groups = []
        for entry in os.scandir(self.folder):
            try:
                changed = entry.stat().st_mtime
                left_over = entry.name.startswith(".") and time.time() - changed > STALE_SECONDS
                if entry.is_dir() and (left_over or not entry.name.startswith(".")):
                    groups.append((changed, _size(Path(entry.path)), entry.path))
            except FileNotFoundError:
                continue
        excess = sum(size for _, size, _ in groups) - self.limit * (RESCAN_SHARE - 1) // RESCAN_SHARE
        for _, size, path in sorted(groups):
            if excess <= 0:
                return
            shutil.rmtree(path, ignore_errors=True)
            excess -= size


def _size(folder: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(entry.stat().st_size for entry in os.scandir(folder))
