"""The folder of a remote store that holds the copies of a run's checkpoints, by fsspec."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

ATTEMPTS = 6
"""Of each operation on the store."""
FIRST_DELAY_SECONDS = 1.0
"""Before an operation is tried again; doubled each time."""
OWNER_FILE = "owner"
BEGUN = ".begun"
"""Ends the name of the list of what a node sends of a copy."""
REFUSALS = ("FileNotFoundError", "PermissionError", "NoCredentialsError")
"""Names of errors with which a store refuses for good: no bucket, no right to write."""


class CheckpointStore(NamedTuple):
    """A folder of a remote store."""

    files: Any
    """fsspec's file system."""
    root: str

    def path(self, name: str) -> str:
        """Of an object. Raises UserError for one that lies elsewhere: a manifest may say anything."""
        path = f"{self.root}/{name}"
        inside = ".." not in PurePosixPath(name).parts and not name.startswith("/")
        if inside and "file" in self.files.protocol:  # where links may lead anywhere
            inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.root))
        if not inside:
            raise UserError(f"{self.root} names a file elsewhere: {name}")
        return path

    def put(self, path: Path, name: str) -> None:
        """Send a file."""
        self._make_parent(name)
        retried(self.files.put_file, str(path), self.path(name))

    def write(self, name: str, text: str) -> None:
        self._make_parent(name)
        retried(self.files.pipe_file, self.path(name), text.encode(), refusals=REFUSALS)

    def _make_parent(self, name: str) -> None:
        if "file" in self.files.protocol:  # others have no folders
            self.files.makedirs(str(PurePosixPath(self.path(name)).parent), exist_ok=True)

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none."""
        try:
            self.files.invalidate_cache()
            return int(self.files.info(self.path(name))["size"])
        except FileNotFoundError:
            return None

    def owner(self) -> str | None:
        """The identity of the run whose copies these are; None where none says so, as of older versions."""
        try:
            self.files.invalidate_cache()
            text: bytes = retried(self.files.cat_file, self.path(OWNER_FILE), refusals=REFUSALS)
            return text.decode()
        except FileNotFoundError:
            return None

    def remove(self, names: Iterable[str]) -> None:
        """Remove these objects, and folders that are empty then."""
        paths = [self.path(name) for name in names]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):  # it was never sent
                retried(self.files.rm_file, path, refusals=REFUSALS)
        emptied = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
        for folder in sorted(emptied, key=len, reverse=True):
            if folder.startswith(f"{self.root}/"):
                with contextlib.suppress(OSError):  # not empty, or a store without folders
                    self.files.rmdir(folder)

    def names(self) -> set[str]:
        """Names of all objects in the folder, those in its folders too."""
        self.files.invalidate_cache()
        found = retried(self.files.find, self.root, refusals=REFUSALS)
        names = {str(path).lstrip("/").removeprefix(f"{self.root.lstrip('/')}/") for path in found}
        return {name for name in names if name and not name.endswith("/")}  # markers of folders

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Name of a checkpoint -> manifest of its copy, the newest last."""
        found = [said for name, said in self.records(self.names()) if name.endswith(".json")]
        return {m["checkpoint"]: m for m in sorted(found, key=lambda m: m["saved_at"])}

    def records(self, names: Collection[str]) -> list[tuple[str, dict[str, Any]]]:
        """(name, content) of the manifests, and of the lists of what was begun, among objects."""
        found = []
        for name in sorted(name for name in names if "/" not in name and name.endswith((".json", BEGUN))):
            text = retried(self.files.cat_file, self.path(name), refusals=REFUSALS)
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # somebody else's
                said = json.loads(text)
                checkpoint, folder = said["checkpoint"], said["folder"]
                is_list = name.endswith(BEGUN) and name.startswith(f"{folder}.")
                is_manifest = name == f"{checkpoint}.json" and said["saved_at"] >= 0
                if said["files"] and "/" not in folder and folder.startswith(f"{checkpoint}-"):
                    found += [(name, said)] if is_list or is_manifest else []
        return found


def copies(records: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, list[str]]]:
    """Checkpoint -> folder of a copy, whole or begun -> its objects, as manifests and lists name them."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, said in records:
        objects = found.setdefault(said["checkpoint"], {}).setdefault(said["folder"], [])
        objects += [name, *(f"{said['folder']}/{file}" for file in said["files"])]
    return found


def open_store(url: str, run: str) -> CheckpointStore:
    """The folder of a run in a store. Raises UserError where the URL or what it needs is wrong."""
    import fsspec

    if run in ("", ".", ".."):
        raise UserError(
            f"{url}/{run}: give the URL of the copies with the run's name: s3://bucket/prefix/RUN"
        )
    try:
        files, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        scheme = url.partition("://")[0]
        remedy = {"s3": "pip install 'isobatch[s3]'", "gs": "pip install gcsfs"}.get(scheme, str(error))
        raise UserError(f"--checkpoint-copy {url}: {scheme}:// needs: {remedy}") from None
    return CheckpointStore(files, f"{root.rstrip('/')}/{run}")


def retried(operation: Callable[..., Any], *given: Any, refusals: Collection[str] = ()) -> Any:
    """The result of an operation on the store, tried again with growing delays where it fails.

    `refusals`: names of errors after which it is not tried again.
    """
    delay = FIRST_DELAY_SECONDS
    for _ in range(ATTEMPTS - 1):
        try:
            return operation(*given)
        except Exception as error:  # a store's own: its library does not say which would last
            if type(error).__name__ in refusals:
                raise
            time.sleep(delay)
            delay *= 2
    return operation(*given)
