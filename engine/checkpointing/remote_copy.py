"""Copies of checkpoints in a remote store, s3:// or any other that fsspec knows: `--checkpoint-copy URL`.

Each is a folder URL/RUN/CHECKPOINT-SAVE/ with the files of the run and of one checkpoint, and its manifest
URL/RUN/CHECKPOINT.json, which is written last: a copy without one is not whole. URL/RUN/owner says whose
copies they are: two runs may have one name. The first rank of each node
sends its node's file, the main rank all others; each writes first what it will send, in a list
URL/RUN/CHECKPOINT-SAVE.FILE.begun. What neither a list nor a manifest names was written by somebody else: a
place that holds such is refused, and nothing but what they name is ever removed. Copies are made in the
background, one at a time; a failure is said and never ends training. The store keeps what the local folder
keeps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import re
import shutil
import threading
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import StopRequestedError, UserError
from isobatch.core.extras import need

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

ATTEMPTS = 6
"""Of each operation on the store."""
FIRST_DELAY_SECONDS = 1.0
"""Before an operation is tried again; doubled each time."""
WAIT_SECONDS = 600.0
"""That the main rank waits for the files of other nodes, and the end of a run for its last copy."""
WAITING = 2
"""Checkpoints that wait to be copied; the oldest is left out where there are more."""
OWNER_FILE = "owner"
BEGUN = ".begun"
"""Ends the name of the list of what a node sends of a copy."""
REFUSALS = ("FileNotFoundError", "PermissionError", "NoCredentialsError")
"""Names of errors with which a store refuses for good: no bucket, no right to write."""
NOT_COPIED = {"checkpoints", "final", "exports", "plots", "report", "profile", "slurm"}
NOT_COPIED |= {"exit.json", "ranks.json"}
"""What `resume` does not need of a run."""
CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+@|(?<=\?)\S+")
"""Parts of addresses in the errors of libraries that may let their reader in."""


class CheckpointStore(NamedTuple):
    """The folder of a store that holds the copies of a run's checkpoints."""

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
        retried(self.files.put_file, str(path), self.path(name))

    def write(self, name: str, text: str) -> None:
        retried(self.files.pipe_file, self.path(name), text.encode(), refusals=REFUSALS)

    def read(self, name: str) -> str:
        """Raises FileNotFoundError where there is no such object."""
        self.files.invalidate_cache()
        content: bytes = retried(self.files.cat_file, self.path(name), refusals=REFUSALS)
        return content.decode()

    def size(self, name: str) -> int | None:
        """Bytes of an object; None where there is none."""
        self.files.invalidate_cache()
        try:
            return int(retried(self.files.info, self.path(name), refusals=REFUSALS)["size"])
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

    def owner(self) -> str | None:
        """The identity of the run whose copies these are; None where none are."""
        try:
            return self.read(OWNER_FILE)
        except FileNotFoundError:
            return None

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Name of a checkpoint -> manifest of its copy, the newest last."""
        found = [said for name, said in self.records(self.names()) if name.endswith(".json")]
        return {m["checkpoint"]: m for m in sorted(found, key=lambda m: m["saved_at"])}

    def records(self, names: Collection[str]) -> list[tuple[str, dict[str, Any]]]:
        """(name, content) of the manifests, and of the lists of what was begun, among objects."""
        found = []
        for name in sorted(name for name in names if "/" not in name and name.endswith((".json", BEGUN))):
            text = self.read(name)
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
        if library := {"s3": "s3fs", "gs": "gcsfs"}.get(url.partition("://")[0]):
            need(library, f"--checkpoint-copy {url}")
        raise UserError(f"--checkpoint-copy {url}: {error}") from None
    if "file" in files.protocol:  # others have no folders
        files = fsspec.filesystem("file", auto_mkdir=True)
    return CheckpointStore(files, f"{root.rstrip('/')}/{run}")


def retried(operation: Callable[..., Any], *given: Any, refusals: Collection[str] = ()) -> Any:
    """The result of an operation on the store, tried again with growing delays where it fails.

    `refusals`: names of errors after which it is not tried again.
    """
    for attempt in range(ATTEMPTS - 1):
        try:
            return operation(*given)
        except Exception as error:  # a store's own: its library does not say which would last
            if type(error).__name__ in refusals:
                raise
            time.sleep(FIRST_DELAY_SECONDS * 2**attempt)
    return operation(*given)


class RemoteCopies:
    """Copies checkpoints in a thread of its own, on the first rank of each node; surrounds the training."""

    def __init__(self, url: str, run: Path, identity: str, is_main: bool, say: Callable[[str], None]) -> None:
        """`url`: the value of --checkpoint-copy; `identity`: of the run, see `RunFolder.identity`.

        Raises UserError where the URL cannot be used, or has another run's copies. A store that does not
        answer is tried again with the first copy.
        """
        self._url, self._run, self._identity, self._is_main, self._say = url, run, identity, is_main, say
        self._queue: queue.Queue[tuple[Path, str, str] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)
        self._is_claimed = not is_main
        try:
            self._claim()
        except UserError:
            raise
        except Exception as error:  # a store's own
            if type(error).__name__ in REFUSALS:
                raise self._error(f"cannot be written: {_in_a_line(error)}") from None
            self._tell(f"does not answer ({_in_a_line(error)}); it is tried again with each checkpoint")

    @functools.cached_property
    def _store(self) -> CheckpointStore:
        return open_store(self._url, self._run.resolve().name)

    def _error(self, text: str) -> UserError:
        return UserError(f"--checkpoint-copy {self._url}: {text}")

    def _tell(self, text: str) -> None:
        self._say(f"--checkpoint-copy {self._url}: {text}")

    def _claim(self) -> None:
        """Write whose copies these are. Raises UserError where they are another run's."""
        if self._is_claimed:
            return
        owner, names = self._store.owner(), self._store.names()
        if owner not in (None, self._identity):
            raise self._error(
                f"holds copies of another run with the name {self._run.name}: give another --name or URL, or"
                " delete them there"
            )
        known = copies(self._store.records(names)).values()
        ours = {name for of in known for objects in of.values() for name in objects}
        if foreign := sorted(names - ours - {OWNER_FILE}):
            raise self._error(
                f"{self._store.root} holds {foreign[0]}, which no copy wrote: give another --name or URL, or"
                " move it away"
            )
        if owner is None:
            self._store.write(OWNER_FILE, self._identity)
        self._is_claimed = True

    def __enter__(self) -> RemoteCopies:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last copy, but not after an error."""
        self._queue.put(None)
        if kind is None or issubclass(kind, StopRequestedError):
            self._thread.join(WAIT_SECONDS)
            if self._thread.is_alive():
                self._tell("the last copy is not whole yet, and is given up")

    def add(self, folder: Path, file: str, save: str) -> None:
        """Copy a checkpoint that is complete: `file` of this node, of the save of that name."""
        if self._queue.qsize() >= WAITING:
            with contextlib.suppress(queue.Empty):
                if late := self._queue.get_nowait():
                    self._tell_missing(late[0], "the store is slower than the saves")
        self._queue.put((folder, file, save))

    def _tell_missing(self, folder: Path, why: str) -> None:
        self._tell(f"{folder.name} is not copied ({why}); training goes on")

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._copy(*job)
            except Exception as error:  # whatever a store raises: training goes on
                self._tell_missing(job[0], _in_a_line(error))

    def _copy(self, folder: Path, file: str, save: str) -> None:
        self._claim()
        copy, manifest = f"{folder.name}-{save}", f"{folder.name}.json"
        own = [folder / file] + (
            [*_small_files(self._run), *sorted(folder.iterdir())] if self._is_main else []
        )
        names = {path: path.relative_to(self._run).as_posix() for path in own}
        begun = {"checkpoint": folder.name, "folder": copy, "files": list(names.values())}
        self._store.write(f"{copy}.{file}{BEGUN}", json.dumps(begun))
        sizes: dict[str, int] = {}
        for path, name in names.items():
            is_others = path.parent == folder and path.name.startswith("node-") and path.name != file
            if not is_others:
                self._store.put(path, f"{copy}/{name}")
            # A log has grown since.
            sizes[name] = (
                path.parent != folder and self._store.size(f"{copy}/{name}")
            ) or path.stat().st_size
        if not self._is_main:
            return
        self._await({f"{copy}/{name}": size for name, size in sizes.items()})
        saved_at = (folder / "index.json").stat().st_mtime
        records = self._store.records(self._store.names())
        self._store.write(manifest, json.dumps({**begun, "saved_at": saved_at, "files": sizes}, indent=2))
        self._remove(copies(records), {said["folder"] for name, said in records if name == manifest} - {copy})

    def _await(self, sizes: dict[str, int]) -> None:
        """Wait until the store has all files, those of other nodes too. Raises TimeoutError."""
        until = time.monotonic() + WAIT_SECONDS
        for name, size in sizes.items():
            while self._store.size(name) != size:
                if time.monotonic() > until:
                    raise TimeoutError(f"{name} has not come")
                time.sleep(FIRST_DELAY_SECONDS)

    def _remove(self, found: dict[str, dict[str, list[str]]], folders: set[str]) -> None:
        """Remove these folders of the store, and copies of checkpoints that are no longer here: of each what
        its manifest and its lists name, the manifest first.
        """
        for checkpoint, folders_of in found.items():
            # Other nodes may send a later checkpoint already, which has no manifest yet.
            is_gone = not (self._run / "checkpoints" / checkpoint).is_dir()
            manifest = f"{checkpoint}.json"
            for names in (folders_of[one] for one in folders_of if is_gone or one in folders):
                last = [name for name in names if name.endswith(BEGUN)]
                first = [manifest] if is_gone and manifest in names else []
                self._store.remove([*first, *(set(names) - {manifest, *last}), *last])


def _small_files(run: Path) -> Iterator[Path]:
    """The files of a run, without its checkpoints and what was made of it; what is hidden is of a process."""
    for path in sorted(run.iterdir()):
        if not path.name.startswith(".") and path.name not in NOT_COPIED:
            yield from sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def _in_a_line(error: Exception) -> str:
    return CREDENTIALS.sub("...", f"{type(error).__name__}: {error}".splitlines()[0])


def fetch_run(url: str, out: Path, here: str | None = None) -> Path:
    """The folder in `out` of a run whose copies lie at `url`, fetched where the newest one is not here.

    `here`: the identity of the run that is there already. Its files that no copy has stay. Raises UserError,
    also where it is another run.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    folder, store = out / name, open_store(parent, name)
    # When the newest checkpoint here was written, in seconds since 1970.
    saves = (path.stat().st_mtime for path in (folder / "checkpoints").glob("[!.]*/index.json"))
    newest_here = max(saves, default=0.0)
    try:
        owner, found = store.owner(), list(store.manifests().values())
    except Exception as error:  # a store's own
        raise UserError(f"{url} cannot be read: {_in_a_line(error)}") from None
    if not found and not newest_here:
        raise UserError(f"{url} holds no whole copy: give --checkpoint-copy's URL and the run's name")
    if found and None not in (owner, here) and owner != here:
        raise UserError(f"{folder} is another run than that of {url}: move it away, or give another --out")
    if not found or newest_here >= found[-1]["saved_at"]:
        return folder
    fresh = folder.with_name(f".{name}.fetched")
    shutil.rmtree(fresh, ignore_errors=True)
    for manifest in reversed(found):
        is_newest = manifest is found[-1]
        _fetch(
            store,
            manifest,
            [n for n in manifest["files"] if is_newest or n.startswith("checkpoints/")],
            fresh,
        )
    _move_into(fresh, folder)
    return folder


def _fetch(store: CheckpointStore, manifest: dict[str, Any], names: Iterable[str], folder: Path) -> None:
    for name in names:
        path = folder / name
        source = store.path(f"{manifest['folder']}/{name}")
        if not path.is_relative_to(folder):
            raise UserError(f"{store.root} names a file elsewhere: {name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        retried(store.files.get_file, source, str(path))
        if path.stat().st_size != manifest["files"][name]:
            raise UserError(f"{source} has {path.stat().st_size} bytes, and its manifest says otherwise")


def _move_into(fresh: Path, folder: Path) -> None:
    """Give a fetched run its place; in a folder that is there, its files and checkpoints replace those."""
    if not folder.exists():
        fresh.rename(folder)
        return
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    for path in sorted((fresh / "checkpoints").iterdir()):
        shutil.rmtree(checkpoints / path.name, ignore_errors=True)
        path.rename(checkpoints / path.name)
    for path in sorted(p for p in fresh.rglob("*") if p.is_file()):
        place = folder / path.relative_to(fresh)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    shutil.rmtree(fresh)
