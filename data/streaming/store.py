"""Reading a store through fsspec: what is there, and ranges of bytes, tried again where the store fails."""

from __future__ import annotations

import math
import os
import random
import socket
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from isobatch.core.errors import IsobatchError, TrainingError, UserError
from isobatch.core.measures import printable
from isobatch.data.streaming import locations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
ATTEMPTS = 70
"""Of each read. With the pauses between them a store may be away for a quarter of an hour."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 20.0
"""Seconds between attempts: each pause is twice the one before, and up to half of it is left out at random,
so that ranks that failed together do not come back together."""
SAID_AFTER = 5
"""Attempts that fail before a person is told, some 4 seconds."""
SAID_EVERY_SECONDS = 60.0
REFUSALS = (FileNotFoundError, PermissionError, ValueError, TypeError, ImportError)
"""To ask again would not help."""
NO_CREDENTIALS = "NoCredentialsError"
"""botocore's name of it."""
VERSION_FIELDS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "Last-Modified", "mtime", "created")
"""What stores call a mark that changes with an object, the best first."""
_PAUSES = random.Random(f"{socket.gethostname()} {os.getpid()}")
NEVER_EMPTY = ("parquet", "jsonl.gz")
"""Formats of which no whole file has 0 bytes."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as the store described it."""

    address: str
    size: int
    version: str
    """Its ETag, or the time of its last change."""


class ChangedObjectError(TrainingError):
    """An object is not the one that was indexed."""


class Store:
    """The objects behind addresses, of any scheme, for all threads of a process."""

    def __init__(self) -> None:
        self._opened: dict[str, Any] = {}

    def _open(self, address: str) -> tuple[Any, str]:
        """(fsspec's file system, the path in it). fsspec itself makes a new one for each thread."""
        from fsspec.core import strip_protocol, url_to_fs

        scheme = address.partition("://")[0]
        if scheme not in self._opened:
            self._opened[scheme] = url_to_fs(address, use_listings_cache=False)[0]
        return self._opened[scheme], strip_protocol(address)

    def find(self, data: str) -> list[StoredObject]:
        """The objects with a known ending that --data names, by address; empty files of lines are none.

        Raises UserError where nothing matches, an object is no whole file, or the store refuses.
        """
        found: dict[str, StoredObject] = {}
        for pattern in locations.patterns(data):
            try:
                listed = _insist(pattern, "the list of objects", partial(self._list, pattern))
            except TrainingError as error:
                raise UserError(f"--data {data}: {error}") from None
            for one in listed:
                if not one.size and locations.file_format(one.address) in NEVER_EMPTY:
                    raise UserError(f"--data {data}: {one.address} has 0 bytes, so it is no whole file")
            matched = [one for one in listed if one.size and locations.file_format(one.address)]
            if not matched:
                endings = " ".join(locations.ENDINGS)
                raise UserError(
                    f"--data {data}: {pattern} matches no object that ends in {endings}, or there is no such"
                    " bucket"
                )
            found |= {one.address: one for one in matched}
        return [found[address] for address in sorted(found)]

    def _list(self, pattern: str) -> list[StoredObject]:
        return list(self._matches(pattern))

    def _matches(self, pattern: str) -> Iterator[StoredObject]:
        filesystem, path = self._open(pattern)
        if any(mark in path for mark in "*?["):
            details = filesystem.glob(path, detail=True)
        elif locations.file_format(pattern):
            details = {path: filesystem.info(path)}
        else:
            details = filesystem.find(path, detail=True)
        for name, info in details.items():
            if info["type"] == "file":
                yield _described(filesystem.unstrip_protocol(name), info)

    def describe(self, address: str) -> StoredObject:
        """The object as it is now. Raises TrainingError where it cannot be asked for."""
        filesystem, path = self._open(address)
        return _described(address, _insist(address, "its size", lambda: filesystem.info(path)))

    def read(self, address: str, start: int, stop: int) -> bytes:
        """The bytes from `start` to `stop` of an object. Raises TrainingError, naming it, in the end."""
        filesystem, path = self._open(address)

        def attempt() -> bytes:
            found: bytes = filesystem.cat_file(path, start=start, end=stop)
            if len(found) != stop - start:
                raise OSError(f"{len(found):,} bytes came in place of {stop - start:,}")
            return found

        return _insist(address, f"bytes {start:,} to {stop:,}", attempt)

    def require_unchanged(self, indexed: StoredObject) -> None:
        """Raise ChangedObjectError where the store now has another object at this address."""
        now = self.describe(indexed.address)
        if (now.size, now.version) != (indexed.size, indexed.version):
            raise ChangedObjectError(changed(indexed.address))


def changed(address: str) -> str:
    """What is said of an object that is not as it was indexed."""
    return (
        f"{address} was changed after it was indexed: put the old one back, or train anew with --again, which"
        " indexes the new one"
    )


def _described(address: str, info: dict[str, Any]) -> StoredObject:
    version = next((str(info[name]) for name in VERSION_FIELDS if info.get(name)), "")
    if info.get("size") is None:
        raise OSError("the server does not say how large it is")
    return StoredObject(address, int(info["size"]), version.strip('"'))


def _insist(address: str, what: str, attempt: Callable[[], T]) -> T:
    """The result of an attempt that may fail for a while. Raises TrainingError with the last reason."""
    pause = FIRST_PAUSE
    for number in range(1, ATTEMPTS + 1):
        try:
            return attempt()
        except IsobatchError:
            raise
        except Exception as error:  # of the network, of whatever library reads this scheme
            if isinstance(error, REFUSALS) or type(error).__name__ == NO_CREDENTIALS:
                raise TrainingError(_why_refused(error, address)) from None
            if number == ATTEMPTS:
                raise TrainingError(
                    f"{address}: {what} could not be had in {ATTEMPTS} attempts: {_in_a_line(error)};"
                    " `resume` goes on when the store answers"
                ) from None
            if number >= SAID_AFTER:
                _failing.say(f"{address}: {what} cannot be had ({_in_a_line(error)}): trying again")
        time.sleep(pause * _PAUSES.uniform(0.5, 1))
        pause = min(2 * pause, LONGEST_PAUSE)
    raise AssertionError("the last attempt returns or raises")


class Failing:
    """Tells a person now and then that a store fails; the threads of a process share one."""

    def __init__(self) -> None:
        self._lock, self._said = threading.Lock(), -math.inf

    def say(self, line: str) -> None:
        with self._lock:
            if time.monotonic() - self._said < SAID_EVERY_SECONDS:
                return
            self._said = time.monotonic()
        print(printable(line), file=sys.stderr, flush=True)


_failing = Failing()


def _why_refused(error: Exception, address: str) -> str:
    """Why a store gave nothing, in a line that begins with the address."""
    if isinstance(error, FileNotFoundError):
        return f"{address}: there is no such object or bucket"
    if isinstance(error, PermissionError) or type(error).__name__ == NO_CREDENTIALS:
        scheme = address.partition("://")[0]
        remedy = {"s3": " (AWS_PROFILE or AWS_ACCESS_KEY_ID; FSSPEC_S3_ANON=true for public data)"}
        remedy |= {"gs": " (GOOGLE_APPLICATION_CREDENTIALS)", "hf": " (hf auth login, or HF_TOKEN)"}
        return f"{address}: no permission: give credentials that may list and read it{remedy.get(scheme, '')}"
    return f"{address}: {_in_a_line(error)}"


def _in_a_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


class ObjectFile:
    """An object as a file to read from, for libraries that want one; each read is one of the store's."""

    closed = False
    mode = "rb"

    def __init__(self, store: Store, stored: StoredObject) -> None:
        self._store, self._object, self._at = store, stored, 0

    def read(self, size: int = -1) -> bytes:
        stop = self._object.size if size < 0 else min(self._object.size, self._at + size)
        found = self._store.read(self._object.address, self._at, stop) if stop > self._at else b""
        self._at = stop
        return found

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._object.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        """Nothing to write."""

    def close(self) -> None:
        """Nothing is open."""


def name_of(address: str) -> str:
    """The last part of an address."""
    return PurePosixPath(address).name
