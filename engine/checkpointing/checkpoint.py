"""Portable checkpoints: fp32 weights and optimizer state by parameter name, in pieces, without pickle.

A checkpoint folder holds one safetensors file per rank that wrote it, index.json with every tensor's shape,
and state.json. Any strategy and world size can read it. It is written in the background under a temporary
name and renamed when every rank has written and synced, so a folder with its final name is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError, UserError
from isobatch.engine.checkpointing.digests import bytes_digest, file_sums
from isobatch.engine.checkpointing.host_buffer import HostBuffer
from isobatch.engine.checkpointing.portable_state import PortableState, TensorEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from isobatch.engine.distributed.communicator import Communicator

CHECKSUMS = "checksums.json"
TEXTS = ("index.json", "state.json")
LEFTOVER = re.compile(r"\..+-\d+\.(tmp|old)")
"""Names that `_temporary` and `remove` give to a checkpoint's folder."""


class CheckpointWriter:
    """Writes one checkpoint at a time, in the background. All ranks must call the same methods."""

    def __init__(self, world: Communicator, on_complete: Callable[[Path], None] = lambda _: None) -> None:
        self.world = world
        self.on_complete = on_complete
        """Called on the main rank with the folder of a checkpoint once it is complete."""
        self._buffer = HostBuffer(world.device)
        self._folder: Path | None = None
        self._thread = threading.Thread()
        self._problem = ""

    def start(self, folder: Path, state: PortableState, facts: Mapping[str, Any]) -> None:
        """Start to copy this rank's pieces to host memory, then to write them; `facts` go into state.json."""
        self.wait()
        self._folder, self._problem = folder, ""
        parts = {f"{p.name}@{p.start}": p.values.detach() for p in state.pieces}
        unstable = {f"{p.name}@{p.start}" for p in state.pieces if p.name in state.buffers}
        size = self._buffer.fill(parts, unstable)
        entries = state.entries if self.world.is_main else None
        self._thread = threading.Thread(target=self._write, args=(folder, size, entries, facts))
        self._thread.start()

    def _write(
        self,
        folder: Path,
        size: int,
        entries: Mapping[str, TensorEntry] | None,
        facts: Mapping[str, Any],
    ) -> None:
        temporary = _temporary(folder)
        try:
            with atomic_files.explain_write_errors(temporary):
                temporary.mkdir(parents=True, exist_ok=True)
                self._buffer.write(temporary / _file(self.world.rank), size)
                if entries is not None:
                    _write_texts(temporary, entries, facts, self.world.size)
        except UserError as error:
            self._problem = str(error)
        except BaseException as error:  # also a panic in Rust, else it would count as written
            self._problem = f"cannot write {temporary}: {error!r}"

    def rank_flags(self) -> list[float]:
        """[1 if this rank has written its part, 1 if its write failed], to be summed over ranks."""
        ended = self._folder is not None and not self._thread.is_alive()
        return [float(ended), float(bool(ended and self._problem))]

    def complete_if_written(self, written: float, failed: float) -> None:
        """Complete the checkpoint if every rank has written or one failed. Arguments: summed rank_flags."""
        if self._folder is not None and (failed or written == self.world.size):
            self._complete()

    def wait(self) -> None:
        """Wait until the checkpoint in progress, if any, is complete and visible to every rank."""
        if self._folder is not None:
            self._complete()
            self.world.barrier()

    def _complete(self) -> None:
        """Rename the finished checkpoint; raise UserError on all ranks where the write failed on one."""
        self._thread.join()
        folder, self._folder = self._folder, None
        assert folder is not None
        problems = [p for p in self.world.all_gather_objects(self._problem) if p]
        if problems:
            if self.world.is_main:
                shutil.rmtree(_temporary(folder), ignore_errors=True)
            raise UserError(problems[0])
        if self.world.is_main:
            _replace(_temporary(folder), folder)
            self.on_complete(folder)


def save(folder: Path, state: PortableState, facts: Mapping[str, Any], world: Communicator) -> None:
    """Write a checkpoint and wait for it. All ranks call this."""
    writer = CheckpointWriter(world)
    writer.start(folder, state, facts)
    writer.wait()


def _write_texts(
    folder: Path, entries: Mapping[str, TensorEntry], facts: Mapping[str, Any], world: int
) -> None:
    tensors = {name: {"shape": list(e.shape), "dtype": e.dtype} for name, e in entries.items()}
    atomic_files.write_json(folder / "index.json", {"world_size": world, "tensors": tensors})
    atomic_files.write_json(folder / "state.json", facts)
    atomic_files.write_json(folder / CHECKSUMS, {name: atomic_files.crc32(folder / name) for name in TEXTS})


def _temporary(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.tmp")


def recorded_digest(folder: Path) -> str:
    """The digest of a checkpoint: of its texts, and of the digests recorded when its tensors were written.

    Empty for a checkpoint of an older version, which recorded none.
    """
    texts = {name: bytes_digest(folder / name) for name in TEXTS}
    parts = {path.stem: atomic_files.read_json(path).get("sha256") for path in folder.glob("rank-*.json")}
    if not parts or None in parts.values():
        return ""
    return hashlib.sha256(json.dumps([texts, parts], sort_keys=True).encode()).hexdigest()[:32]


class SavedCheckpoint:
    """A checkpoint on disk, read one tensor, or one part of it, at a time.

    Raises TrainingError where anything is missing or damaged. Opening checks sizes and index;
    `verify_checksums` checks the content of the weights' files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._naming_damage():
            recorded = json.loads((folder / CHECKSUMS).read_text())
            for name in TEXTS:
                if atomic_files.crc32(folder / name) != recorded[name]:
                    raise ValueError(f"{name} is not what was written")
            index = json.loads((folder / "index.json").read_text())
            self.state: dict[str, Any] = json.loads((folder / "state.json").read_text())
            self.entries = {
                n: TensorEntry(tuple(e["shape"]), e["dtype"]) for n, e in index["tensors"].items()
            }
            self._paths = [folder / _file(rank) for rank in range(index["world_size"])]
            for path in self._paths:
                if path.stat().st_size != json.loads(path.with_suffix(".json").read_text())["bytes"]:
                    raise ValueError(f"{path.name} is not what was written")
            self._readers = [safe_open(str(path), framework="pt") for path in self._paths]
            self._pieces = self._find_pieces()

    def _find_pieces(self) -> dict[str, list[tuple[int, int, int]]]:
        """Name -> (start, stop, reader) of its pieces, in order. Raises ValueError where one is missing."""
        pieces: dict[str, list[tuple[int, int, int]]] = {name: [] for name in self.entries}
        for number, reader in enumerate(self._readers):
            for key in reader.keys():  # noqa: SIM118 (no mapping)
                name, _, start = key.rpartition("@")
                (length,) = reader.get_slice(key).get_shape()
                pieces[name].append((int(start), int(start) + length, number))
        for name, of_name in pieces.items():
            of_name.sort()
            borders = [0, *(stop for _, stop, _ in of_name)]
            if borders[:-1] != [start for start, _, _ in of_name] or borders[-1] != self._size(name):
                raise ValueError(f"parts of {name} are missing")
        return pieces

    def _size(self, name: str) -> int:
        count = 1
        for n in self.entries[name].shape:
            count *= n
        return count

    @contextlib.contextmanager
    def _naming_damage(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise TrainingError(f"checkpoint {self.folder} is damaged: {error}") from None

    def verify_checksums(self, rank: int = 0, world: int = 1) -> None:
        """Compare the checksums of this rank's share of the files. Raises TrainingError."""
        with self._naming_damage():
            for path in self._paths[rank::world]:
                recorded = json.loads(path.with_suffix(".json").read_text())
                found = file_sums(path)
                # A CRC finds accidents, a digest what was done on purpose. Older versions recorded none.
                if recorded not in (found, {k: found[k] for k in ("bytes", "crc32")}):
                    raise ValueError(f"{path.name} is not what was written")

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.read_slice(name, 0, self._size(name)).view(self.entries[name].shape)

    def read_slice(self, name: str, start: int, stop: int) -> Tensor:
        """Elements start..stop-1 of the flattened tensor, 1-d."""
        import torch

        out = torch.empty(stop - start, dtype=getattr(torch, self.entries[name].dtype))
        with self._naming_damage():
            for first, last, number in self._pieces[name]:
                low, high = max(start, first), min(stop, last)
                if low < high:
                    piece = self._readers[number].get_slice(f"{name}@{first}")
                    out[low - start : high - start] = piece[low - first : high - first]
        return out


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders, known by their names, of saves and deletes that were killed."""
    for path in folder.glob(".*"):
        if LEFTOVER.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _replace(fresh: Path, folder: Path) -> None:
    if folder.exists():
        remove(folder)
    fresh.replace(folder)
    descriptor = os.open(folder.parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a checkpoint. Renamed first, so that a killed delete leaves no folder that looks complete."""
    gone = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    folder.replace(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def checkpoint_name(phase: str, step: int) -> str:
    return f"{phase}-{step}"


def phase_and_step(name: str) -> tuple[str, int]:
    """The phase and step of a checkpoint's name."""
    phase, _, step = name.rpartition("-")
    return phase, int(step)


def replace_state(folder: Path, facts: Mapping[str, Any]) -> None:
    """Write other facts into a checkpoint's state.json; its tensors stay."""
    recorded = atomic_files.read_json(folder / CHECKSUMS)
    atomic_files.write_json(folder / "state.json", facts)
    sums = {**recorded, "state.json": atomic_files.crc32(folder / "state.json")}
    atomic_files.write_json(folder / CHECKSUMS, sums)


def list_checkpoints(folder: Path, phases: list[str]) -> list[Path]:
    """Complete checkpoints, oldest first: by phase, then step."""
    found = [p for p in folder.glob("*-*") if (p / "index.json").exists() and not p.name.startswith(".")]
    return sorted((p for p in found if _order(p, phases)[0] >= 0), key=lambda p: _order(p, phases))


def _order(path: Path, phases: list[str]) -> tuple[int, int]:
    """(index of the phase, step); the index is -1 where the name is not a checkpoint's."""
    phase, _, step = path.name.rpartition("-")
    return (phases.index(phase), int(step)) if phase in phases and step.isdigit() else (-1, 0)


def delete_old(folder: Path, phases: list[str], keep: int, spare: set[str]) -> None:
    """Delete all but the newest `keep` checkpoints and those named in `spare`."""
    for path in list_checkpoints(folder, phases)[:-keep]:
        if path.name not in spare:
            remove(path)
