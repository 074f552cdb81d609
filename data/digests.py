"""Digests of prepared files: written when data is prepared, checked before its bytes are used.

digests.json beside the splits holds, for every file, the SHA-256 of each 16 MiB. A chunk is checked when it
is first fetched from, so that a changed file is found before it is learnt from, for one reading of the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError, UserError
from isobatch.core.package import cache_folder

CHUNK = 16 << 20
"""Bytes under one digest."""
DIGESTS_FILE = "digests.json"
FACTS_FILE = "facts.json"
"""A folder without it counts as not prepared."""
_HEX_DIGITS = 32


def chunk_digest(block: bytes | memoryview) -> str:
    """The first 128 bits of SHA-256, in hex: the fastest of hashlib's digests that nobody can forge."""
    return hashlib.sha256(block).hexdigest()[:_HEX_DIGITS]


def write_digests(folder: Path) -> str:
    """Write digests.json for every file under a prepared folder; returns the digest of all arrays."""
    found = {}
    for path in sorted(
        p for p in folder.rglob("*") if p.is_file() and p.name not in (DIGESTS_FILE, FACTS_FILE)
    ):
        with path.open("rb") as stream:
            blocks = iter(lambda: stream.read(CHUNK), b"")
            found[path.relative_to(folder).as_posix()] = [chunk_digest(block) for block in blocks]
    atomic_files.write_json(folder / DIGESTS_FILE, found)
    return overall_digest(folder)


def overall_digest(folder: Path) -> str:
    """The digest of the digests of all arrays; empty where the folder was prepared before there were any."""
    arrays = {n: f.digests for n, f in prepared_files(folder).items() if n.endswith(".npy")}
    return chunk_digest(json.dumps(arrays, sort_keys=True).encode()) if arrays else ""


def prepared_files(folder: Path) -> dict[str, PreparedFile]:
    """Name -> file, of all that have digests; nothing where the folder was prepared before there were any."""
    if not (folder / DIGESTS_FILE).exists():
        return {}
    digests = atomic_files.read_json(folder / DIGESTS_FILE)
    return {name: PreparedFile(folder, name, found) for name, found in digests.items()}


def changed_file(folder: Path, seconds: float) -> Path | None:
    """A file that is not as it was prepared, looked for in the smallest first and for so many seconds.

    The folder itself where digests.json is gone.
    """
    if not (folder / DIGESTS_FILE).exists():
        return folder
    stop = time.monotonic() + seconds
    for file in sorted(prepared_files(folder).values(), key=lambda f: len(f.digests)):
        for chunk in range(len(file.digests)):
            if not file.is_whole(chunk):
                return file.path
            if time.monotonic() > stop:
                return None
    return None


class PreparedFile:
    """A prepared file, each of whose chunks is checked once, when it is first asked for."""

    def __init__(self, folder: Path, name: str, digests: list[str]) -> None:
        self.folder, self.path, self.digests = folder, folder / name, digests
        self.size = self.path.stat().st_size if self.path.exists() else 0
        self.unchecked = np.ones(len(digests), bool)
        self._bytes: np.ndarray | None = None

    def check(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Check the chunks that hold these ranges of bytes. Raises TrainingError where one was changed."""
        if self.unchecked.any():
            borders = np.zeros(len(self.digests) + 1, np.int64)
            np.add.at(borders, starts // CHUNK, 1)
            np.add.at(borders, (stops - 1) // CHUNK + 1, -1)
            self._check(np.flatnonzero((borders.cumsum()[:-1] > 0) & self.unchecked))

    def check_all(self) -> None:
        """Check every chunk, again where it was before. Raises TrainingError where one was changed."""
        self._check(np.arange(len(self.digests)))

    def _check(self, chunks: np.ndarray) -> None:
        for chunk in chunks.tolist():
            if not self.is_whole(chunk):
                with suppress(OSError):  # in a cache that others own it stays
                    (self.folder / FACTS_FILE).unlink(missing_ok=True)
                raise TrainingError(
                    f"prepared file {self.path} was changed after it was prepared (behind byte"
                    f" {chunk * CHUNK:,}): run again, and it is prepared again"
                )
            self.unchecked[chunk] = False

    def is_whole(self, chunk: int) -> bool:
        """Whether the bytes of a chunk are those that were prepared."""
        if self._bytes is None:
            self._bytes = np.memmap(self.path, np.uint8, "r") if self.size else np.empty(0, np.uint8)
        return chunk_digest(self._bytes[chunk * CHUNK : (chunk + 1) * CHUNK].data) == self.digests[chunk]


class PreparedFolder:
    """The prepared data of a run, from the moment it is opened: what was checked, and what was written to."""

    def __init__(self, folder: Path, digest: str) -> None:
        """`digest` is that of all digests, as the run's facts record it; empty in older runs.

        Raises TrainingError where digests.json is another, or a file that is no split's column was changed.
        """
        if digest and overall_digest(folder) != digest:
            raise TrainingError(
                f"prepared file {folder / DIGESTS_FILE} is not the one of this run: delete {folder} and run"
                " again"
            )
        self.folder, self.files = folder, prepared_files(folder)
        self._stamps = {name: _stamp(file.path) for name, file in self.files.items()}
        for file in self.files.values():
            if file.path.suffix != ".npy" or not (file.path.parent / "index.json").exists():
                file.check_all()

    def check_written(self) -> list[str]:
        """Names of files that were written to or replaced since the last call, and are as they were prepared.

        Raises TrainingError where one is not. What a file held in between, nobody knows.
        """
        found = {name: _stamp(file.path) for name, file in self.files.items()}
        written = [name for name, stamp in found.items() if stamp != self._stamps[name]]
        for name in written:
            PreparedFile(self.folder, name, self.files[name].digests).check_all()
        self._stamps = found
        return written


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes with every write: nobody but the system's clock sets the time of a file's last change."""
    if not path.exists():
        return ()
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


REMEMBERED_BYTES = 1 << 20
"""Smaller files are read every time: that takes a millisecond."""
CLOCK_TICK_NS = 2_000_000_000
"""The coarsest clock of a file system (FAT's); a digest of a file that changed later is not remembered."""


def file_hash(file: Path) -> str:
    """BLAKE2b of a file's content, 128 bits as 32 hex digits; of a large file perhaps from memory."""
    place = str(file.resolve())
    stamp = list(_stamp(file))
    if stamp[1] < REMEMBERED_BYTES:
        return _content_hash(file)
    name = hashlib.blake2b(os.fsencode(place), digest_size=16).hexdigest()
    record, known = cache_folder() / "digests" / f"{name}.json", {}
    with suppress(UserError):  # there is no record, or a broken one
        known = atomic_files.read_json(record)
    if known.get("stamp") == [place, *stamp]:
        return str(known["digest"])
    started, digest = time.time_ns(), _content_hash(file)
    if started - max(stamp[2:]) > CLOCK_TICK_NS and list(_stamp(file)) == stamp:
        # A cache that cannot be written is told of elsewhere.
        with suppress(UserError, OSError), atomic_files.shared_folder(record.parent):
            atomic_files.write_json(record, {"stamp": [place, *stamp], "digest": digest})
    return digest


def _content_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
