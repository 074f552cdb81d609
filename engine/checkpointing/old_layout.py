"""The layout of checkpoints of version 0.1: a safetensors file per rank, and its sums beside it.

Their index.json has shapes alone, so that every file's header says which pieces lie in it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.engine.checkpointing.layout import DTYPES, FilePart, Layout, entries_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


def old_layout(folder: Path, index: Mapping[str, Any]) -> tuple[Layout, list[dict[str, Any]]]:
    """Layout and sums, by rank, of an old checkpoint. Raises OSError, ValueError or KeyError."""
    entries = entries_in(index)
    numbers = {name: number for number, name in enumerate(entries)}
    files = [f"rank-{rank:05d}.safetensors" for rank in range(index["world_size"])]
    sums = [json.loads((folder / file).with_suffix(".json").read_bytes()) for file in files]
    rows = [
        (numbers[name], first, last, file, start)
        for file, of_file in enumerate(files)
        for name, first, last, start in _pieces(folder / of_file, {n: e.dtype for n, e in entries.items()})
    ]
    pieces = np.array(sorted(rows), np.int64).reshape(-1, 5)
    sizes = [of_file["bytes"] for of_file in sums]
    parts = [FilePart(file, 0, size) for file, size in enumerate(sizes)]
    return Layout(entries, files, sizes, parts, pieces), sums


def _pieces(path: Path, dtypes: Mapping[str, str]) -> Iterator[tuple[str, int, int, int]]:
    """(name, first element, last + 1, byte in the file) of the pieces that a file's header names."""
    with path.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"{path.name} is not what was written")
        header = json.loads(stream.read(size))
    for key, tensor in header.items():
        name, _, first = key.rpartition("@")
        if tensor["dtype"] != DTYPES[dtypes[name]]:
            raise ValueError(f"{path.name} holds {name} as {tensor['dtype']}")
        (count,) = tensor["shape"]
        yield name, int(first), int(first) + count, 8 + size + tensor["data_offsets"][0]
