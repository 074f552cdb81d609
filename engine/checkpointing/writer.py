"""Writes checkpoints in the background: one file per node, into which its ranks write side by side.

A folder is written under a temporary name and renamed when every rank has written and synced, so a folder
with its final name is complete.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import CHECKSUMS, TEXTS, read_contents, replace, temporary_of
from isobatch.engine.checkpointing.digests import bytes_digest
from isobatch.engine.checkpointing.host_buffer import HostBuffer
from isobatch.engine.checkpointing.layout import Layout, make_layout
from isobatch.engine.checkpointing.portable_state import PortableState, TensorPiece
from isobatch.engine.distributed.communicator import Communicator


class CheckpointWriter:
    """Writes one checkpoint at a time, in the background. All ranks must call the same methods.

    The ranks exchange what pieces they hold when the state's entries change: the same entries must be dealt
    in the same way.
    """

    def __init__(
        self,
        world: Communicator,
        on_complete: Callable[[Path, str], None] = lambda _folder, _save: None,
        buffer: HostBuffer | None = None,
    ) -> None:
        """`buffer`: kept from another writer, with its memory."""
        self.world = world
        self.on_complete = on_complete
        """Called on the main rank with the folder of a checkpoint that is complete, and its save's name."""
        self._buffer = buffer or HostBuffer(world.device)
        self.folder: Path | None = None
        """Of the checkpoint in progress; None where there is none."""
        self._thread = threading.Thread()
        self._problem: UserError | None = None
        self._sums: dict[str, int | str] = {}
        self._text_sums: dict[str, str] = {}
        self._layout: Layout | None = None
        self._rows = np.empty((0, 3), np.int64)

    def start(self, folder: Path, state: PortableState, facts: Mapping[str, Any]) -> None:
        """Start to copy this rank's pieces to host memory, then to write them; `facts` go into state.json."""
        self.wait()
        # The widest element types first, as safetensors does, so that all tensors are aligned.
        pieces = sorted(state.pieces, key=lambda p: (-p.values.element_size(), p.name, p.start))
        layout = self._layout_of(state, pieces)
        self.folder, self._problem = folder, None
        part = layout.parts[self.world.rank]
        header = layout.header(part.file) if part.start == 0 else b""
        self._buffer.fill([p.values.detach() for p in pieces], header)
        self._thread = threading.Thread(target=self._write, args=(folder, layout, facts))
        self._thread.start()

    def _layout_of(self, state: PortableState, pieces: list[TensorPiece]) -> Layout:
        """The layout of a state with these entries. Ranks exchange their pieces where they are new.

        A piece names its entry by number: the order of entries must be the same on all ranks, whatever order
        their optimizers keep state in. Raises ValueError on all ranks where pieces miss a part.
        """
        entries = dict(sorted(state.entries.items()))
        numbers = {name: number for number, name in enumerate(entries)}
        rows = [(numbers[p.name], p.start, p.start + p.values.numel()) for p in pieces]
        own = np.array(rows, np.int64).reshape(-1, 3)
        if self._layout is None or self._layout.entries != entries:
            named = zlib.crc32("\n".join(entries).encode())
            shares = self.world.all_gather_objects((self.world.node, own, named))
            if len({named for *_, named in shares}) > 1:
                raise ValueError("the ranks do not save the same tensors")
            layout = make_layout(entries, [share[:2] for share in shares])
            layout.check()
            self._layout, self._rows = layout, own
        assert np.array_equal(own, self._rows), "the same entries must be dealt in the same way"
        return self._layout

    def _write(self, folder: Path, layout: Layout, facts: Mapping[str, Any]) -> None:
        temporary, part = temporary_of(folder), layout.parts[self.world.rank]
        path, size = temporary / layout.files[part.file], part.stop - part.start
        try:
            with atomic_files.explain_write_errors(folder, sum(layout.sizes)):
                temporary.mkdir(parents=True, exist_ok=True)
                self._sums = self._buffer.write(path, part.start, size, layout.sizes[part.file])
                if self.world.is_main:
                    atomic_files.write_text(temporary / "index.json", layout.text)
                    atomic_files.write_json(temporary / "state.json", facts)
                    self._text_sums = {name: bytes_digest(temporary / name) for name in TEXTS}
        except UserError as error:
            self._problem = error
        except BaseException as error:  # also a panic in Rust, else it would count as written
            self._problem = UserError(f"cannot write {temporary}: {error!r}")

    def rank_flags(self) -> list[float]:
        """[1 if this rank has written its part, 1 if its write failed], to be summed over ranks."""
        ended = self.folder is not None and not self._thread.is_alive()
        return [float(ended), float(bool(ended and self._problem))]

    def wait(self) -> None:
        """Wait until the checkpoint in progress, if any, is complete and visible to every rank."""
        if self.folder is not None:
            self.complete()
            self.world.barrier()

    def complete(self) -> None:
        """Wait for the checkpoint in progress, if any, and rename it. All ranks call this.

        Raises UserError on all of them where the write failed on one.
        """
        if (folder := self.folder) is None:
            return
        self._thread.join()
        self.folder = None
        ended = self.world.all_gather_objects((self._problem, self._sums))
        if problems := [problem for problem, _ in ended if problem]:
            if self.world.is_main:
                shutil.rmtree(temporary_of(folder), ignore_errors=True)
            raise problems[0]
        if self.world.is_main:
            sums = {**self._text_sums, "parts": [sums for _, sums in ended]}
            atomic_files.write_json(temporary_of(folder) / CHECKSUMS, sums)
            read_contents(temporary_of(folder))  # before an older one is deleted
            replace(temporary_of(folder), folder)
            save = hashlib.sha256("".join(str(sums["sha256"]) for _, sums in ended).encode())
            self.on_complete(folder, save.hexdigest()[:12])
