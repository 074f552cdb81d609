"""Copies of checkpoints in a remote store, s3:// or any other that fsspec knows: `--checkpoint-copy URL`.

Each is a folder URL/RUN/CHECKPOINT-SAVE/ with the files of the run and of one checkpoint, and a record
URL/RUN/CHECKPOINT-SAVE.json that names these files: written first, and again as `whole` when all of them are
there. URL/RUN/owner says whose copies they are: two runs may have one name. A place that is another run's, or
that holds anything and has no owner, is refused, and nothing but what a record names is ever removed. The
main rank sends the files in the background, one checkpoint at a time; a failure is said and never ends
training. The store keeps what the local folder keeps.
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
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from isobatch.core.errors import StopRequestedError, UserError
from isobatch.core.extras import need

WAIT_SECONDS = 600.0
"""That the end of a run waits for its last copy."""
WAITING = 2
"""Checkpoints that wait to be copied; the oldest is left out where there are more."""
OWNER_FILE = "owner"
REFUSALS = ("FileNotFoundError", "PermissionError", "NoCredentialsError")
"""Names of errors with which a store refuses for good: no bucket, no right to write."""
NOT_COPIED = {"checkpoints", "final", "exports", "plots", "report", "profile", "slurm"}
NOT_COPIED |= {"exit.json", "ranks.json"}
"""What `resume` does not need of a run."""
CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+@|(?<=\?)\S+")
"""Parts of addresses in the errors of libraries that may let their reader in."""
Record = dict[str, Any]
"""Of a copy: its `checkpoint` and `folder`, `files` {name: bytes}, `saved_at` and whether it is `whole`."""


class CheckpointStore:
    """The folder of a store that holds the copies of a run's checkpoints. Raises the store's own errors."""

    def __init__(self, url: str, run: str) -> None:
        """`run`: the run's name. Raises UserError where the URL or what it needs is wrong."""
        import fsspec

        if run in ("", ".", ".."):
            way = "give the URL of the copies with the run's name: s3://bucket/prefix/RUN"
            raise UserError(f"{url}/{run}: {way}")
        try:
            # Other nodes write there too: what was listed before says nothing.
            self.files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            if library := {"s3": "s3fs", "gs": "gcsfs"}.get(url.partition("://")[0]):
                need(library, f"--checkpoint-copy {url}")
            raise UserError(f"--checkpoint-copy {url}: {error}") from None
        if "file" in self.files.protocol:  # others have no folders
            self.files = fsspec.filesystem("file", auto_mkdir=True)
        self.root = f"{root.rstrip('/')}/{run}"

    def path(self, name: str) -> str:
        """Of an object. Raises UserError for one that lies elsewhere: a record may say anything."""
        path = f"{self.root}/{name}"
        inside = not {"", ".."} & {*name.split("/")}
        if inside and "file" in self.files.protocol:  # where links may lead anywhere
            inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.root))
        if not inside:
            raise UserError(f"{self.root} names a file elsewhere: {name}")
        return path

    def read(self, name: str) -> str | None:
        """None where there is no such object."""
        try:
            return str(self.files.cat_file(self.path(name)).decode())
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Names of all objects in the folder, those in its folders too."""
        paths = (str(path).lstrip("/") for path in self.files.find(self.root))
        return sorted(path.removeprefix(f"{self.root.lstrip('/')}/") for path in paths)

    def records(self) -> list[Record]:
        """The records of copies, the newest last; what is no such record was written by somebody else."""
        found = []
        for name in (name for name in self.names() if "/" not in name and name.endswith(".json")):
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                said = json.loads(self.read(name) or "")
                is_named = name == f"{said['folder']}.json"
                is_ours = is_named and said["folder"].startswith(f"{said['checkpoint']}-")
                if is_ours and said["saved_at"] >= 0 and said["files"].keys():
                    found.append(said)
        return sorted(found, key=lambda said: said["saved_at"])

    def record(self, said: Record) -> None:
        """Write the record of a copy."""
        self.files.pipe_file(self.path(f"{said['folder']}.json"), json.dumps(said, indent=2).encode())

    def remove(self, said: Record) -> None:
        """Remove the files of a copy, then its record, and folders that are empty then."""
        self.record({**said, "whole": False})
        names = [*(f"{said['folder']}/{name}" for name in said["files"]), f"{said['folder']}.json"]
        for path in [self.path(name) for name in names]:
            with contextlib.suppress(FileNotFoundError):  # it was never sent
                self.files.rm_file(path)
        folders = {str(folder) for name in names for folder in PurePosixPath(name).parents} - {"."}
        for folder in sorted(folders, key=len, reverse=True):
            with contextlib.suppress(OSError):  # not empty, or a store without folders
                self.files.rmdir(self.path(folder))


class RemoteCopies:
    """Copies checkpoints in a thread of its own, on the main rank; surrounds the training."""

    def __init__(self, url: str, run: Path, identity: str, say: Callable[[str], None]) -> None:
        """`url`: the value of --checkpoint-copy; `identity`: of the run, see `RunFolder.identity`.

        Raises UserError where the URL cannot be used, or has another run's copies. A store that does not
        answer is tried again with the first copy.
        """
        self._url, self._run, self._identity = url, run, identity
        self._say: Callable[[str], None] = lambda text: say(f"--checkpoint-copy {url}: {text}")
        self._queue: queue.Queue[tuple[Path, str] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)
        try:
            self._claim()
        except UserError:
            raise
        except Exception as error:  # a store's own
            if type(error).__name__ in REFUSALS:
                raise UserError(f"--checkpoint-copy {url}: cannot be written: {_in_a_line(error)}") from None
            self._say(f"does not answer ({_in_a_line(error)}); it is tried again with each checkpoint")

    @functools.cached_property
    def _store(self) -> CheckpointStore:
        return CheckpointStore(self._url, self._run.resolve().name)

    def _claim(self) -> None:
        """Write whose copies these are. Raises UserError where the place is somebody else's."""
        owner = self._store.read(OWNER_FILE)
        if owner not in (None, self._identity):
            whose = f"holds copies of another run with the name {self._run.name}"
            raise UserError(f"--checkpoint-copy {self._url}: {whose}: give another --name or URL")
        if owner is None and (foreign := self._store.names()):
            what = f"{self._store.root} holds {foreign[0]}, which no copy wrote"
            raise UserError(f"--checkpoint-copy {self._url}: {what}: give another --name or URL")
        if owner is None:
            self._store.files.pipe_file(self._store.path(OWNER_FILE), self._identity.encode())

    def __enter__(self) -> RemoteCopies:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last copy, but not after an error."""
        self._queue.put(None)
        if kind is None or issubclass(kind, StopRequestedError):
            self._thread.join(WAIT_SECONDS)
            if self._thread.is_alive():
                self._say("the last copy is not whole yet, and is given up")

    def add(self, folder: Path, save: str) -> None:
        """Copy a checkpoint that is complete, of the save of that name."""
        if self._queue.qsize() >= WAITING:
            with contextlib.suppress(queue.Empty):
                if late := self._queue.get_nowait():
                    self._say(f"{late[0].name} is not copied: the store is slower than the saves")
        self._queue.put((folder, save))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._copy(*job)
            except Exception as error:  # whatever a store raises: training goes on
                self._say(f"{job[0].name} is not copied ({_in_a_line(error)}); training goes on")

    def _copy(self, folder: Path, save: str) -> None:
        store, copy = self._store, f"{folder.name}-{save}"
        self._claim()
        saved_at = (folder / "index.json").stat().st_mtime
        paths = [*_small_files(self._run), *sorted(folder.iterdir())]
        places = {str(p): store.path(f"{copy}/{p.relative_to(self._run).as_posix()}") for p in paths}
        files = {path.relative_to(self._run).as_posix(): path.stat().st_size for path in paths}
        said = {"checkpoint": folder.name, "folder": copy, "saved_at": saved_at, "files": files}
        store.record({**said, "whole": False})
        store.files.put(list(places), list(places.values()))
        for name, place in zip(files, places.values(), strict=True):
            files[name] = store.files.size(place)  # a log has grown since
        store.record({**said, "whole": True})
        self._remove_old(folder.name, copy)

    def _remove_old(self, checkpoint: str, copy: str) -> None:
        """Remove earlier copies of a checkpoint than `copy`, and copies of what is no longer here."""
        for said in self._store.records():
            is_gone = not (self._run / "checkpoints" / said["checkpoint"]).is_dir()
            if is_gone or (said["checkpoint"] == checkpoint and said["folder"] != copy):
                self._store.remove(said)


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
    folder, store = out / name, CheckpointStore(parent, name)
    # When the newest checkpoint here was written, in seconds since 1970.
    saves = (path.stat().st_mtime for path in (folder / "checkpoints").glob("[!.]*/index.json"))
    newest_here = max(saves, default=0.0)
    try:
        owner, records = store.read(OWNER_FILE), store.records()
    except Exception as error:  # a store's own
        raise UserError(f"{url} cannot be read: {_in_a_line(error)}") from None
    # The newest last; a run may save a checkpoint again.
    found = [*{said["checkpoint"]: said for said in records if said.get("whole")}.values()]
    found.sort(key=lambda said: said["saved_at"])
    if not found and not newest_here:
        raise UserError(f"{url} holds no whole copy: give --checkpoint-copy's URL and the run's name")
    if found and None not in (owner, here) and owner != here:
        raise UserError(f"{folder} is another run than that of {url}: move it away, or give another --out")
    if not found or newest_here >= found[-1]["saved_at"]:
        return folder
    fresh = folder.with_name(f".{name}.fetched")
    shutil.rmtree(fresh, ignore_errors=True)
    for said in found:
        for file, size in said["files"].items():
            if said is found[-1] or file.startswith("checkpoints/"):
                source, path = store.path(f"{said['folder']}/{file}"), fresh / file
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    store.files.get_file(source, str(path))
                except Exception as error:  # a store's own
                    raise UserError(f"{source} cannot be read: {_in_a_line(error)}") from None
                if path.stat().st_size != size:
                    raise UserError(f"{source} has not the {size} bytes that its record says")
    _move_into(fresh, folder)
    return folder


def _move_into(fresh: Path, folder: Path) -> None:
    """Give a fetched run its place; in a folder that is there, its files and checkpoints replace those."""
    if not folder.exists():
        fresh.rename(folder)
        return
    for path in sorted(fresh.glob("checkpoints/*")):
        place = folder / "checkpoints" / path.name
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        path.rename(place)
    for path in sorted(p for p in fresh.rglob("*") if p.is_file()):
        place = folder / path.relative_to(fresh)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    shutil.rmtree(fresh)
