"""Copies of checkpoints in a remote store, s3:// or any other that fsspec knows: `--checkpoint-copy URL`.

Each is a folder URL/RUN/CHECKPOINT-SAVE/ with the files of the run and of one checkpoint, and its manifest
URL/RUN/CHECKPOINT.json, which is written last: a copy without one is not whole. URL/RUN/owner says whose
copies they are: two runs may have one name. The first rank of each node
sends its node's file, the main rank all others. Copies are made in the background, one at a time; a failure
is said and never ends training. The store keeps what the local folder keeps.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import shutil
import threading
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import StopRequestedError, UserError

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
OWNER_FILE = "owner"
REFUSALS = ("FileNotFoundError", "PermissionError", "NoCredentialsError")
"""Names of errors with which a store refuses for good: no bucket, no right to write."""


class CheckpointStore(NamedTuple):
    """A folder of a remote store."""

    files: Any
    """fsspec's file system."""
    root: str

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

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

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Name of a checkpoint -> manifest of its copy, the newest last."""
        self.files.invalidate_cache()
        paths = retried(self.files.glob, self.path("*.json"))
        found = [json.loads(retried(self.files.cat_file, path)) for path in paths]
        return {m["checkpoint"]: m for m in sorted(found, key=lambda m: m["saved_at"])}


def open_store(url: str, run: str) -> CheckpointStore:
    """The folder of a run in a store. Raises UserError where the URL or what it needs is wrong."""
    import fsspec

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
        return open_store(self._url, self._run.name)

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
        owner = self._store.owner()
        if owner is None:
            self._store.write(OWNER_FILE, self._identity)
        elif owner != self._identity:
            raise UserError(
                f"--checkpoint-copy {self._url}: holds copies of another run with the name {self._run.name}:"
                " give another --name or URL, or delete them there"
            )
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
        if not self._is_main:
            self._store.put(folder / file, f"{copy}/checkpoints/{folder.name}/{file}")
            return
        sizes: dict[str, int] = {}
        for path in (*_small_files(self._run), *sorted(folder.iterdir())):
            name = path.relative_to(self._run).as_posix()
            if path.parent != folder or path.name == file or not path.name.startswith("node-"):
                self._store.put(path, f"{copy}/{name}")
            in_store = path.parent != folder and retried(self._store.size, f"{copy}/{name}")
            sizes[name] = in_store or path.stat().st_size  # a log has grown since
        self._await({f"{copy}/{name}": size for name, size in sizes.items()})
        saved_at = (folder / "index.json").stat().st_mtime
        manifest = {"checkpoint": folder.name, "folder": copy, "saved_at": saved_at, "files": sizes}
        before = self._store.manifests()
        self._store.write(f"{folder.name}.json", json.dumps(manifest, indent=2))
        earlier = before.pop(folder.name, manifest)["folder"]
        self._remove({earlier} - {copy}, list(before))

    def _await(self, sizes: dict[str, int]) -> None:
        """Wait until the store has all files, those of other nodes too. Raises TimeoutError."""
        until = time.monotonic() + WAIT_SECONDS
        for name, size in sizes.items():
            while retried(self._store.size, name) != size:
                if time.monotonic() > until:
                    raise TimeoutError(f"{name} has not come")
                time.sleep(FIRST_DELAY_SECONDS)

    def _remove(self, folders: set[str], names: list[str]) -> None:
        """Remove these folders of the store, and copies of checkpoints that are no longer here."""

        def is_gone(checkpoint: str) -> bool:
            return not (self._run / "checkpoints" / checkpoint).is_dir()

        for name in filter(is_gone, names):
            retried(self._store.files.rm_file, self._store.path(f"{name}.json"))
        for entry in retried(self._store.files.ls, self._store.root, True):
            name = PurePosixPath(entry["name"]).name
            # Other nodes may send a later checkpoint already, which has no manifest yet.
            if entry["type"] == "directory" and (name in folders or is_gone(name.rpartition("-")[0])):
                retried(self._store.files.rm, entry["name"], True)


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
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _fetch(store: CheckpointStore, manifest: dict[str, Any], names: Iterable[str], folder: Path) -> None:
    for name in names:
        path = folder / name
        if ".." in PurePosixPath(name).parts or not path.is_relative_to(folder):
            raise UserError(f"{store.root} names a file elsewhere: {name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        source = store.path(f"{manifest['folder']}/{name}")
        retried(store.files.get_file, source, str(path))
        if path.stat().st_size != manifest["files"][name]:
            raise UserError(f"{source} has {path.stat().st_size} bytes, and its manifest says otherwise")
