"""Portable checkpoints: fp32 weights and optimizer state by parameter name, in pieces, without pickle.

A checkpoint folder holds one safetensors file per node that wrote it; index.json with every tensor's shape
and the place of its pieces; state.json; and checksums.json with the sums of all of these. Any strategy and
world size can read it. `writer.py` writes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core import atomic_files
from isobatch.core.errors import TrainingError, explain_errors
from isobatch.engine.checkpointing.digests import BLOCK, bytes_digest
from isobatch.engine.checkpointing.layout import FilePart, Layout, layout_in

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.engine.distributed.communicator import Communicator

CHECKSUMS = "checksums.json"
TEXTS = ("index.json", "state.json")
LEFTOVER = re.compile(r"\..+-\d+\.(tmp|old)")
"""Names that `temporary_of` and `remove` give to a checkpoint's folder."""


def temporary_of(folder: Path) -> Path:
    """The folder in which a checkpoint is written until it is complete."""
    return folder.with_name(f".{folder.name}.tmp")


def recorded_digest(folder: Path) -> str:
    """The digest of a checkpoint: of its texts, and of the digests recorded when its tensors were written."""
    texts = {name: bytes_digest(folder / name) for name in TEXTS}
    parts = [part["sha256"] for part in atomic_files.read_json(folder / CHECKSUMS)["parts"]]
    return hashlib.sha256(json.dumps([texts, parts], sort_keys=True).encode()).hexdigest()[:32]


class CheckpointTexts(NamedTuple):
    """What a checkpoint's texts say."""

    layout: Layout
    state: dict[str, Any]
    sums: list[dict[str, Any]]
    """By part: `bytes` and `sha256`."""


def read_contents(folder: Path) -> CheckpointTexts:
    """The texts of a checkpoint; they, and its files' sizes, are checked. Raises TrainingError."""
    with _naming_damage(folder):
        recorded = atomic_files.parse_json((folder / CHECKSUMS).read_bytes())
        texts = {name: (folder / name).read_bytes() for name in TEXTS}
        for name, text in texts.items():
            if hashlib.sha256(text).hexdigest() != recorded[name]:
                raise ValueError(f"{name} is not what was written")
        index, state = (atomic_files.parse_json(texts[name]) for name in TEXTS)
        layout, sums = layout_in(index), recorded["parts"]
        if [sum_["bytes"] for sum_ in sums] != [part.stop - part.start for part in layout.parts]:
            raise ValueError(f"{CHECKSUMS} is not what was written")
        for name, size in zip(layout.files, layout.sizes, strict=True):
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{name} is not what was written")
        layout.check()
    return CheckpointTexts(layout, state, sums)


def open_on_all(folder: Path, world: Communicator) -> SavedCheckpoint:
    """The checkpoint on every rank; the main rank reads its texts for all. Raises TrainingError on all."""
    contents, problem = None, ""
    if world.is_main:
        try:
            contents = read_contents(folder)
        except TrainingError as error:
            problem = str(error)
    contents, problem = world.broadcast_object((contents, problem))
    if contents is None:
        raise TrainingError(problem)
    return SavedCheckpoint(folder, contents)


class SavedCheckpoint:
    """A checkpoint on disk, read one tensor, or one part of it, at a time. Files are opened at first use.

    Raises TrainingError where anything is missing or damaged. Opening checks sizes and index;
    `verify_checksums` checks the content of the weights' files.
    """

    def __init__(self, folder: Path, contents: CheckpointTexts | None = None) -> None:
        """`contents`: the texts, where they were read already."""
        self.folder = folder
        self.layout, self.state, self._sums = contents or read_contents(folder)
        self.entries = self.layout.entries
        self._opened: dict[int, int] = {}
        """File -> descriptor."""
        weakref.finalize(self, _close, self._opened)

    def hooks_with_weights(self) -> list[str]:
        """Names of the hooks whose tensors are weights; they name folders. Raises TrainingError."""
        found = self.state.get("weights")
        if not isinstance(found, list) or not all(isinstance(n, str) and n.isidentifier() for n in found):
            raise TrainingError(f"checkpoint {self.folder} is damaged: it does not name its hooks")
        return found

    def verify_checksums(self, rank: int = 0, world: int = 1) -> None:
        """Compare the checksums of this rank's share of the files. Raises TrainingError."""
        with _naming_damage(self.folder):
            count = len(self.layout.parts)
            for number in range(count * rank // world, count * (rank + 1) // world):
                part = self.layout.parts[number]
                if self._sums[number] != self._sums_of(part):
                    raise ValueError(f"{self.layout.files[part.file]} is not what was written")

    def _sums_of(self, part: FilePart) -> dict[str, int | str]:
        digest, block = hashlib.sha256(), memoryview(bytearray(min(BLOCK, part.stop - part.start)))
        for start in range(part.start, part.stop, BLOCK):
            of_part = block[: part.stop - start]
            self._read_into(of_part, part.file, start)
            digest.update(of_part)
        return {"bytes": part.stop - part.start, "sha256": digest.hexdigest()}

    def _read_into(self, memory: memoryview, file: int, start: int) -> None:
        """Fill `memory` from a file's bytes from `start` on. Raises OSError or ValueError."""
        name = self.layout.files[file]
        if file not in self._opened:
            self._opened[file] = os.open(self.folder / name, os.O_RDONLY)
        while memory:
            count = os.preadv(self._opened[file], [memory[:BLOCK]], start)
            if count == 0:
                raise ValueError(f"{name} is not what was written")
            memory, start = memory[count:], start + count

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        shape = self.entries[name].shape
        return self.read_slice(name, 0, math.prod(shape)).view(shape)

    def read_slice(self, name: str, start: int, stop: int) -> Tensor:
        """Elements start..stop-1 of the flattened tensor, 1-d."""
        import torch

        out = torch.empty(stop - start, dtype=getattr(torch, self.entries[name].dtype))
        width, memory = out.element_size(), out.view(torch.uint8).numpy().data
        rows = self.layout.pieces_of(name)
        with _naming_damage(self.folder):
            for first, last, file, place in rows[(rows[:, 1] > start) & (rows[:, 0] < stop)].tolist():
                low, high = max(start, first), min(stop, last)
                of_piece = memory[(low - start) * width : (high - start) * width]
                self._read_into(of_piece, file, place + (low - first) * width)
        return out


class SharedReader:
    """Whole tensors for every rank: all must read the same ones in the same order.

    Over several nodes the main rank reads them and sends them to the others, so that storage gives every byte
    once. On one node each reads what it needs: the machine keeps what it has read.
    """

    def __init__(self, saved: SavedCheckpoint, world: Communicator) -> None:
        self._saved, self._world, self.entries = saved, world, saved.entries

    def read(self, name: str) -> Tensor:
        """A whole tensor; on the device where it came from other ranks."""
        import torch

        entry = self.entries[name]
        if self._world.nodes == 1 or not math.prod(entry.shape):
            return self._saved.read(name)
        found = torch.zeros(math.prod(entry.shape), dtype=getattr(torch, entry.dtype))
        if self._world.is_main:
            found = self._saved.read(name).reshape(-1)
        found = found.to(self._world.device)
        # The others have zeros: a sum of integers gives the same bits.
        self._world.all_reduce_sum(found.view(torch.int32 if found.element_size() % 4 == 0 else torch.uint8))
        return found.view(entry.shape)


def _close(opened: dict[int, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)


def _naming_damage(folder: Path) -> contextlib.AbstractContextManager[None]:
    kinds = OSError, ValueError, KeyError, TypeError, IndexError, AttributeError
    return explain_errors(f"checkpoint {folder} is damaged", *kinds, to=TrainingError)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders, known by their names, of saves and deletes that were killed."""
    for path in folder.glob(".*"):
        if LEFTOVER.fullmatch(path.name) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def replace(fresh: Path, folder: Path) -> None:
    """Give a complete checkpoint its name, in place of what has it."""
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


def checkpoint_name(phase: str, step: int) -> str:
    return f"{phase}-{step}"


def phase_and_step(name: str) -> tuple[str, int]:
    """The phase and step of a checkpoint's name."""
    phase, _, step = name.rpartition("-")
    return phase, int(step)


def list_checkpoints(folder: Path, phases: list[str]) -> list[Path]:
    """Complete checkpoints, oldest first: by phase, then step. Other names are no checkpoints'."""
    found = {}
    for path in (index.parent for index in folder.glob("[!.]*-*/index.json")):
        phase, _, step = path.name.rpartition("-")
        if phase in phases and step.isdigit():
            found[phases.index(phase), int(step)] = path
    return [found[place] for place in sorted(found)]


def delete_old(folder: Path, phases: list[str], keep: int, spare: set[str]) -> None:
    """Delete all but the newest `keep` checkpoints and those named in `spare`."""
    for path in list_checkpoints(folder, phases)[:-keep]:
        if path.name not in spare:
            remove(path)
