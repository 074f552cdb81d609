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
import queue
import re
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import StopRequestedError, UserError
from isobatch.engine.checkpointing import remote_store
from isobatch.engine.checkpointing.remote_store import (
    BEGUN,
    OWNER_FILE,
    REFUSALS,
    CheckpointStore,
    copies,
    open_store,
    retried,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

WAIT_SECONDS = 600.0
"""That the main rank waits for the files of other nodes, and the end of a run for its last copy."""
WAITING = 2
"""Checkpoints that wait to be copied; the oldest is left out where there are more."""
NOT_COPIED = (
    "checkpoints",
    "final",
    "exports",
    "plots",
    "report",
    "profile",
    "slurm",
    "exit.json",
    "ranks.json",
)
"""What `resume` does not need of a run."""
CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+@|(?<=\?)\S+")
"""Parts of addresses in the errors of libraries that may let their reader in."""


class RemoteCopies:
    """Copies checkpoints in a thread of its own, on the first rank of each node; surrounds the training."""

    def __init__(self, url: str, run: Path, identity: str, is_main: bool, say: Callable[[str], None]) -> None:
        """`url`: the value of --checkpoint-copy; `identity`: of the run, see `RunFolder.identity`.

        Raises UserError where the URL cannot be used, or has another run's copies.
        """
        self._url, self._run, self._is_main, self._say = url, run, is_main, say
        self._identity = identity
        self._not_copied = ""
        """Name of the newest checkpoint, where it has no copy."""
        self._is_claimed = not is_main
        if is_main:
            self._try_to_claim()
        self._queue: queue.Queue[tuple[Path, str, str] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="checkpoint copies", daemon=True)

    @functools.cached_property
    def _store(self) -> CheckpointStore:
        return open_store(self._url, self._run.resolve().name)

    def _try_to_claim(self) -> None:
        """Claim the folder now; a store that does not answer is tried again with the first copy."""
        try:
            self._claim()
        except UserError:
            raise
        except Exception as error:  # a store's own
            if type(error).__name__ in REFUSALS:
                raise UserError(
                    f"--checkpoint-copy {self._url}: cannot be written: {_in_a_line(error)}"
                ) from None
            self._say(
                f"--checkpoint-copy {self._url}: does not answer ({_in_a_line(error)}); it is tried"
                " again with each checkpoint"
            )

    def _claim(self) -> None:
        """Write whose copies these are. Raises UserError where they are another run's."""
        owner, names = self._store.owner(), self._store.names()
        if owner not in (None, self._identity):
            raise UserError(
                f"--checkpoint-copy {self._url}: holds copies of another run with the name {self._run.name}:"
                " give another --name or URL, or delete them there"
            )
        known = copies(self._store.records(names)).values()
        ours = {name for of in known for objects in of.values() for name in objects}
        if foreign := sorted(names - ours - {OWNER_FILE}):
            more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
            raise UserError(
                f"--checkpoint-copy {self._url}: {self._store.root} holds {foreign[0]}{more}, which no copy"
                " wrote: give another --name or URL, or move it away"
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
                self._say(f"--checkpoint-copy {self._url}: the last copy is not whole yet, and is given up")
            elif self._not_copied:
                self._say(f"--checkpoint-copy {self._url}: has no copy of {self._not_copied}, the last one")

    def add(self, folder: Path, file: str, save: str) -> None:
        """Copy a checkpoint that is complete: `file` of this node, of the save of that name."""
        if self._queue.qsize() >= WAITING:
            with contextlib.suppress(queue.Empty):
                self._tell(self._queue.get_nowait(), "the store is slower than the saves")
        self._queue.put((folder, file, save))

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._copy(*job)
                self._not_copied = ""
            except Exception as error:  # whatever a store raises: training goes on
                self._not_copied = job[0].name
                self._tell(job, _in_a_line(error))

    def _tell(self, job: tuple[Path, str, str] | None, why: str) -> None:
        if job is not None:
            self._say(f"--checkpoint-copy {self._url}: {job[0].name} is not copied ({why}); training goes on")

    def _copy(self, folder: Path, file: str, save: str) -> None:
        copy = f"{folder.name}-{save}"
        if not self._is_claimed:
            self._claim()
        files = [*_small_files(self._run), *sorted(folder.iterdir())] if self._is_main else [folder / file]
        names = {path: path.relative_to(self._run).as_posix() for path in files}
        begun = {"checkpoint": folder.name, "folder": copy, "files": list(names.values())}
        self._store.write(f"{copy}.{file}{BEGUN}", json.dumps(begun))
        if not self._is_main:
            self._store.put(folder / file, f"{copy}/{names[folder / file]}")
            return
        sizes: dict[str, int] = {}
        for path, name in names.items():
            if path.parent != folder or path.name == file or not path.name.startswith("node-"):
                self._store.put(path, f"{copy}/{name}")
            in_store = path.parent != folder and retried(self._store.size, f"{copy}/{name}")
            sizes[name] = in_store or path.stat().st_size  # a log has grown since
        self._await({f"{copy}/{name}": size for name, size in sizes.items()})
        saved_at = (folder / "index.json").stat().st_mtime
        manifest = {**begun, "saved_at": saved_at, "files": sizes}
        name = f"{folder.name}.json"
        records = self._store.records(self._store.names())
        self._store.write(name, json.dumps(manifest, indent=2))
        self._remove(copies(records), {said["folder"] for one, said in records if one == name} - {copy})

    def _await(self, sizes: dict[str, int]) -> None:
        """Wait until the store has all files, those of other nodes too. Raises TimeoutError."""
        until = time.monotonic() + WAIT_SECONDS
        for name, size in sizes.items():
            while retried(self._store.size, name) != size:
                if time.monotonic() > until:
                    raise TimeoutError(f"{name} has not come")
                time.sleep(remote_store.FIRST_DELAY_SECONDS)

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
        if path.name.startswith(".") or path.name in NOT_COPIED:
            continue
        yield from sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def fetch_run(url: str, out: Path, here: str | None = None) -> Path:
    """The folder in `out` of a run whose copies lie at `url`, fetched where the newest one is not here.

    `here`: the identity of the run that is there already. Its files that no copy has stay. Raises UserError,
    also where it is another run.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    folder, store = out / name, open_store(parent, name)
    try:
        owner, (*others, newest) = store.owner(), store.manifests().values()
    except ValueError:
        if _newest_save(folder):
            return folder
        raise UserError(
            f"{url} holds no whole copy: give --checkpoint-copy's URL and the run's name"
        ) from None
    except Exception as error:  # a store's own
        raise UserError(f"{url} cannot be read: {_in_a_line(error)}") from None
    if None not in (owner, here) and owner != here:
        raise UserError(f"{folder} is another run than that of {url}: move it away, or give another --out")
    if _newest_save(folder) >= newest["saved_at"]:
        return folder
    fresh = folder.with_name(f".{name}.fetched")
    shutil.rmtree(fresh, ignore_errors=True)
    _fetch(store, newest, newest["files"], fresh)
    for manifest in reversed(others):
        _fetch(store, manifest, [f for f in manifest["files"] if f.startswith("checkpoints/")], fresh)
    _move_into(fresh, folder)
    return folder


def _newest_save(folder: Path) -> float:
    """When the newest checkpoint in a run's folder was written, in seconds since 1970; 0 without one."""
    saves = (folder / "checkpoints").glob("[!.]*/index.json")
    return max((path.stat().st_mtime for path in saves), default=0.0)


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


def _in_a_line(error: Exception) -> str:
    return CREDENTIALS.sub("...", f"{type(error).__name__}: {error}".splitlines()[0])


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
