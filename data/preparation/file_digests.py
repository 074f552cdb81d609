"""Digests of raw files, remembered in the cache folder: a file is read for its digest once.

A file counts as the one that was read while its size, inode and times of its last change are the same. One
that was changed just before it was read is read again the next time: within one tick of a file system's clock
it may be changed twice, as in git's index ("racy git").
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.package import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REMEMBERED_BYTES = 1 << 20
"""Smaller files are read every time: that takes a millisecond."""
CLOCK_TICK_NS = 2_000_000_000
"""The coarsest clock of a file system (FAT's); a digest of a file that changed later is not remembered."""
BLOCK_BYTES = 1 << 22


def file_hash(file: Path) -> str:
    """BLAKE2b of a file's content, 128 bits as 32 hex digits; of a large file perhaps from memory."""
    before = _stamp(file)
    if before["size"] < REMEMBERED_BYTES:
        return _content_hash(file)
    record = cache_folder() / "digests" / f"{_name(file)}.json"
    known = _remembered(record)
    if {name: known.get(name) for name in before} == before:
        return str(known["digest"])
    started, digest = time.time_ns(), _content_hash(file)
    settled = started - max(before["mtime_ns"], before["ctime_ns"]) > CLOCK_TICK_NS
    if settled and _stamp(file) == before:
        with contextlib.suppress(UserError, OSError):  # a cache that cannot be written is told of elsewhere
            record.parent.mkdir(parents=True, exist_ok=True)
            atomic_files.write_json(record, {**before, "digest": digest})
    return digest


def _stamp(file: Path) -> dict[str, Any]:
    """What is another after every change of a file."""
    found = file.stat()
    times = {"mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns}
    return {"path": str(file.resolve()), "size": found.st_size, "inode": found.st_ino, **times}


def _name(file: Path) -> str:
    return hashlib.blake2b(os.fsencode(file.resolve()), digest_size=16).hexdigest()


def _remembered(record: Path) -> dict[str, Any]:
    """What is recorded; nothing where there is no record, or a broken one."""
    try:
        return atomic_files.read_json(record)
    except UserError:
        return {}


def _content_hash(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for block in _blocks(file):
        digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            yield block
