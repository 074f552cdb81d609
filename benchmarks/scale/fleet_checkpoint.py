"""The files of a checkpoint in a fleet, with the code that saves and resumes: for `benchmarks fleet`.

The pieces of every rank are laid out, and files of that layout, without content, stand for what was written.
Some ranks open the checkpoint and read of each of their pieces, as they do when a run is resumed.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core import atomic_files
from isobatch.engine.checkpointing.checkpoint import CHECKSUMS, TEXTS, CheckpointTexts, SavedCheckpoint
from isobatch.engine.checkpointing.layout import Layout, make_layout
from isobatch.engine.checkpointing.portable_state import TensorEntry, element_ranges
from isobatch.tests.opens import OPENS

RANKS_A_NODE = 8
SHAPES = {"embedding": (8192, 1024), **{f"layer.{n}": (1024, 4096) for n in range(24)}}
ENTRIES = {
    f"{kind}{name}": TensorEntry(shape, "float32")
    for kind in ("weight/", "moment/exp_avg/", "moment/exp_avg_sq/")
    for name, shape in SHAPES.items()
}
"""109 M parameters with Adam's moments, dealt as DDP deals them."""


def checkpoint_figures(world: int) -> dict[str, Any]:
    """Files and bytes of a checkpoint, and the most opens of a rank that resumes."""
    layout = _layout(world, RANKS_A_NODE)
    files, opens = _resumed(layout)
    return {
        "checkpoint files": files,
        "a node's file MB": round(max(layout.sizes) / 1e6, 1),
        "opens of a rank": opens,
    }


def _layout(world: int, ranks_a_node: int) -> Layout:
    sizes = {name: math.prod(entry.shape) for name, entry in ENTRIES.items()}
    numbers = {name: number for number, name in enumerate(ENTRIES)}
    return make_layout(
        ENTRIES,
        [
            (rank // ranks_a_node, np.array([(numbers[n], a, b) for n, a, b in ranges]))
            for rank in range(world)
            for ranges in [element_ranges(sizes, rank, world)]
        ],
    )


def _resumed(layout: Layout) -> tuple[int, int]:
    """(files of the checkpoint, most opens of the ranks 0, 1, the middle and the last)"""
    with tempfile.TemporaryDirectory() as name:
        folder, world = Path(name), len(layout.parts)
        _write(folder, layout)
        with OPENS.within(folder) as count:
            saved = SavedCheckpoint(folder)
        texts, most = CheckpointTexts(saved.layout, saved.state, []), 0
        for rank in sorted({0, 1, world // 2, world - 1}):
            begin = count.total() if rank == 0 else 0
            with OPENS.within(folder) as own:
                _read(SavedCheckpoint(folder, texts), rank, world)
            most = max(most, begin + own.total())
        return len(list(folder.iterdir())), most


def _read(saved: SavedCheckpoint, rank: int, world: int) -> None:
    """Read an element of each piece of the parts that are this rank's."""
    names, pieces = list(saved.entries), saved.layout.pieces
    for part in (saved.layout.parts[number] for number in saved.own_parts(rank, world)):
        inside = (pieces[:, 3] == part.file) & (pieces[:, 4] >= part.start) & (pieces[:, 4] < part.stop)
        for number, first, *_ in pieces[inside].tolist():
            saved.read_slice(names[number], first, first + 1)


def _write(folder: Path, layout: Layout) -> None:
    for file, size in zip(layout.files, layout.sizes, strict=True):
        _write_hollow(folder / file, size)
    (folder / "index.json").write_text(layout.text)
    _write_rest(folder, parts=[{"bytes": part.stop - part.start} for part in layout.parts])


def _write_rest(folder: Path, **sums: Any) -> None:
    (folder / "state.json").write_text("{}")
    sums |= {name: atomic_files.crc32(folder / name) for name in TEXTS}
    (folder / CHECKSUMS).write_text(json.dumps(sums))


def _write_hollow(path: Path, size: int) -> None:
    """Lengthen a file without writing: it reads as zeros."""
    with path.open("ab") as stream:
        stream.truncate(size)
