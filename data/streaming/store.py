"""A store through fsspec: what --data names there, and ranges of bytes, tried again where the store fails."""

from __future__ import annotations

import io
import os
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from isobatch.core import hub_cache
from isobatch.core.errors import IsobatchError, TrainingError, UserError, explain_errors
from isobatch.core.extras import need
from isobatch.core.flags import nearest_hint
from isobatch.core.measures import printable

T = TypeVar("T")
REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
SECRET = re.compile(r"sig|token|secret|credential|password|key|session", re.IGNORECASE)
"""Names of parts of an address that let its reader in: addresses are written into recipes and logs."""
CHAINED = re.compile(r"::(?=\w[\w+.-]*(?:://|::))")
NAMES_BEFORE_AT = ("hf", "abfs", "abfss")
"""Schemes that write something else than a user before an @."""
ENDINGS = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonl.gz": "jsonl.gz"}
ENDINGS |= {".ndjson.gz": "jsonl.gz"}
LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "https": "aiohttp", "http": "aiohttp"}
LIBRARIES |= {"file": "fsspec", "memory": "fsspec"}
"""Scheme -> the library that reads it."""
ATTEMPTS, ATTEMPTS_TO_LIST = 70, 10
"""Of each read: with the pauses between them a store may be away for a quarter of an hour. And of the list of
objects, with which all begins: a minute.
"""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 20.0
"""Seconds between attempts: each pause is twice the one before, and up to half of it is left out at random,
so that ranks that failed together do not come back together."""
SAID_AFTER = 5
"""Attempts that fail before a person is told, some 4 seconds."""
SAID_EVERY_SECONDS = 60
REFUSALS = (ValueError, TypeError, ImportError)
"""To ask again would not help."""
VERSION_FIELDS = ("ETag", "etag", "md5Hash", "blob_id", "LastModified", "Last-Modified", "mtime", "created")
"""What stores call a mark that changes with an object, the best first."""
_pauses = random.SystemRandom()


def is_remote(data: str) -> bool:
    """Whether --data names a store: it begins with s3://, gs://, hf://, https:// or the like."""
    return REMOTE.match(data) is not None


def patterns(data: str) -> list[str]:
    """The addresses of --data, which commas separate; together they are one set."""
    return [one.strip() for one in data.split(",")]


def name_of(address: str) -> str:
    """The last part of an address."""
    return PurePosixPath(urlsplit(address).path).name


def file_format(address: str) -> str | None:
    """parquet, jsonl or jsonl.gz, by the ending of an address; None for another one."""
    name = name_of(address).lower()
    return next((kind for ending, kind in ENDINGS.items() if name.endswith(ending)), None)


def check(data: str) -> None:
    """Raise UserError for addresses that nothing here can read, or a server that does not answer in 2 s."""
    for address in patterns(data):
        scheme = address.partition("://")[0]
        if not is_remote(address):
            said = f"{address or 'nothing'} is no address such as s3://bucket/*.parquet"
            raise UserError(f"--data {data}: {said}")
        if scheme not in LIBRARIES:
            known = ", ".join(f"{name}://" for name in LIBRARIES)
            raise UserError(f"--data {data}: {scheme}:// is none of {known}{nearest_hint(scheme, LIBRARIES)}")
        refuse_secrets(address)
        need(LIBRARIES[scheme], f"--data {data}: {scheme}://")
        own = f"{scheme}://{urlsplit(address).netloc}" if scheme in ("http", "https") else None
        servers = {"s3": os.environ.get("AWS_ENDPOINT_URL"), "hf": hub_cache.hub_address()}
        server = own or servers.get(scheme)
        # The hub may be told to be offline.
        if server and not (hub_cache.is_reachable() if scheme == "hf" else hub_cache.answers(server)):
            raise UserError(f"--data {data}: {server} cannot be reached: check the address and the network")


def refuse_secrets(address: str, flag: str = "--data", written: str = "the recipe") -> None:
    """Raise UserError for an address that carries a password or a signature; it is not repeated.

    `written`: where it would be kept. Addresses of fsspec may hold others, behind `::`.
    """
    for one in CHAINED.split(unquote(address)):
        scheme, _, rest = one.partition("://")
        place, *given = re.split(r"[?&#;]", rest)
        host = place.partition("/")[0]
        names_no_user = scheme in NAMES_BEFORE_AT and ":" not in host
        # A key of S3 may hold slashes: then what looks like the host has a port that is none.
        if ("@" in host and not names_no_user) or re.search(r":(?!\d*$)[^\]]*$", host):
            raise UserError(
                f"{flag} {scheme}://{place.rpartition('@')[2]}: leave user and password out, they would be"
                f" written into {written}"
            )
        if any("=" in pair and SECRET.search(pair.partition("=")[0]) for pair in given):
            raise UserError(
                f"{flag} {scheme}://{place}: leave the signature out, it would be written into {written};"
                " give the library its credentials in the environment"
            )


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as the store described it."""

    address: str
    size: int
    version: str
    """Its ETag, or the time of its last change."""


def changed_object(address: str, or_else: str = "") -> TrainingError:
    """The error where an object is not the one that was indexed."""
    return TrainingError(
        f"{address} was changed after it was indexed: put the old one back, or train anew with --again,"
        f" which indexes the new one{or_else}"
    )


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

        Raises UserError where nothing matches, or the store refuses.
        """
        found: dict[str, StoredObject] = {}
        for pattern in patterns(data):
            with explain_errors(f"--data {data}", TrainingError):
                ask = partial(self._list, pattern)
                listed = _insist(pattern, "the list of objects", ask, ATTEMPTS_TO_LIST)
            known = [(one, file_format(one.address)) for one in listed]
            matched = {one.address: one for one, kind in known if kind and (one.size or kind != "jsonl")}
            if not matched:
                raise UserError(
                    f"--data {data}: {pattern} matches no object that ends in {' '.join(ENDINGS)}, or there"
                    " is no such bucket"
                )
            found |= matched
        return [found[address] for address in sorted(found)]

    def _list(self, pattern: str) -> list[StoredObject]:
        filesystem, path = self._open(pattern)
        if any(mark in path for mark in "*?["):
            details = filesystem.glob(path, detail=True)
        elif file_format(pattern):
            details = {path: filesystem.info(path)}
        else:
            details = filesystem.find(path, detail=True)
        files = {name: info for name, info in details.items() if info["type"] == "file"}
        return [_described(filesystem.unstrip_protocol(name), info) for name, info in files.items()]

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
        """Raise TrainingError where the store now has another object at this address."""
        filesystem, path = self._open(indexed.address)
        info = _insist(indexed.address, "its size", lambda: filesystem.info(path))
        if _described(indexed.address, info) != indexed:
            raise changed_object(indexed.address)


def _described(address: str, info: dict[str, Any]) -> StoredObject:
    version = next((str(info[name]) for name in VERSION_FIELDS if info.get(name)), "")
    if info.get("size") is None:
        raise OSError("the server does not say how large it is")
    return StoredObject(address, int(info["size"]), version.strip('"'))


def _insist(address: str, what: str, attempt: Callable[[], T], attempts: int = 0) -> T:
    """The result of an attempt that may fail for a while. Raises TrainingError with the last reason."""
    pause, attempts = FIRST_PAUSE, attempts or ATTEMPTS
    for number in range(1, attempts + 1):
        try:
            return attempt()
        except IsobatchError:
            raise
        except Exception as error:  # of the network, of whatever library reads this scheme
            said = (str(error).strip() or type(error).__name__).partition("\n")[0]
            if isinstance(error, FileNotFoundError):
                raise TrainingError(f"{address}: there is no such object or bucket") from None
            if isinstance(error, PermissionError) or type(error).__name__ == "NoCredentialsError":
                raise TrainingError(
                    f"{address}: no permission: give the library credentials that may list and read it, in"
                    " the environment (FSSPEC_S3_ANON=true for public data in S3)"
                ) from None
            if isinstance(error, REFUSALS):
                raise TrainingError(f"{address}: {said}") from None
            if number == attempts:
                raise TrainingError(
                    f"{address}: {what} could not be had in {attempts} attempts: {said}; `resume` goes on"
                    " when the store answers"
                ) from None
            minute = int(time.monotonic() / SAID_EVERY_SECONDS)
            if number >= SAID_AFTER and _said[0] != minute:
                _said[0] = minute
                line = printable(f"{address}: {what} cannot be had ({said}): trying again")
                print(line, file=sys.stderr, flush=True)
        time.sleep(pause * _pauses.uniform(0.5, 1))
        pause = min(2 * pause, LONGEST_PAUSE)
    raise AssertionError("the last attempt returns or raises")


_said = [-1]
"""The minute in which a person was told last that a store fails; the threads of a process share it."""


class ObjectFile(io.RawIOBase):
    """An object as a file to read from, for libraries that want one; each read is one of the store's."""

    def __init__(self, store: Store, stored: StoredObject) -> None:
        self._store, self._object, self._at = store, stored, 0

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        stop = min(self._object.size, self._at + len(view))
        count = max(0, stop - self._at)
        view[:count] = self._store.read(self._object.address, self._at, stop) if count else b""
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._object.size}[whence]
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
