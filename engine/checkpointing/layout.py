"""The layout of a checkpoint: which rank writes which bytes of which file, and where every piece lies.

The ranks of a node write into one safetensors file. It begins with the format's header, which the node's
first rank writes; then come the ranks' pieces, each rank's from a sector's border on, so that every rank
writes its own range at once with O_DIRECT. What is left of a sector is a tensor of zeros of its own: the
format leaves no gaps.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isobatch.engine.checkpointing.portable_state import TensorEntry

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
DTYPES |= {f"int{n}": f"I{n}" for n in (8, 16, 32, 64)} | {"uint8": "U8"}
"""torch's dtype names -> those of safetensors."""
WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
"""safetensors' dtypes -> bytes of an element."""
SECTOR = 4096
"""O_DIRECT needs addresses, file offsets and lengths that are multiples of this."""
FILLING = "filling"
"""Name of the tensors of zeros; no weight or moment has it."""
HEADER_BYTES_A_PIECE = 256
"""At most, beside the JSON of its name: of its type and numbers, and of zeros that follow it."""


@dataclass(frozen=True, slots=True)
class FilePart:
    """The bytes of a file that one rank wrote."""

    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Where every piece of every tensor lies."""

    entries: dict[str, TensorEntry]
    files: list[str]
    sizes: list[int]
    """Bytes, of each file."""
    parts: list[FilePart]
    """By rank. They cover the files."""
    pieces: np.ndarray
    """(pieces, 5) int64: number of the entry, first element, last + 1, number of the file, byte in it; in
    this order."""

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.entries)}

    def pieces_of(self, name: str) -> np.ndarray:
        """(n, 4): first element, last + 1, file, byte, of a tensor's pieces in order."""
        low, high = np.searchsorted(self.pieces[:, 0], [self._numbers[name], self._numbers[name] + 1])
        return self.pieces[low:high, 1:]

    def check(self) -> None:
        """Raise ValueError where pieces do not cover a tensor."""
        for name, entry in self.entries.items():
            rows = self.pieces_of(name)
            starts, stops = rows[:, 0].tolist(), rows[:, 1].tolist()
            if [0, *stops] != [*starts, math.prod(entry.shape)]:
                raise ValueError(f"parts of {name} are missing")

    def header(self, file: int) -> bytes:
        """The header of a file: a length, and JSON with blanks behind it up to where the pieces begin."""
        names, kinds = list(self.entries), [DTYPES[e.dtype] for e in self.entries.values()]
        rows = self.pieces[self.pieces[:, 3] == file]
        rows = rows[np.argsort(rows[:, 4], kind="stable")]
        begin = place = _header_size(self.entries, rows[:, 0])
        found: dict[str, Any] = {}

        def add(name: str, kind: str, count: int, stop: int) -> None:
            offsets = [place - begin, stop - begin]
            found[name] = {"dtype": kind, "shape": [count], "data_offsets": offsets}

        for number, first, last, _, start in rows.tolist():
            if place < start:
                add(f"{FILLING}@{place}", "U8", start - place, start)
                place = start
            stop = start + (last - first) * WIDTHS[kinds[number]]
            add(f"{names[number]}@{first}", kinds[number], last - first, stop)
            place = stop
        if place < self.sizes[file]:
            add(f"{FILLING}@{place}", "U8", self.sizes[file] - place, self.sizes[file])
        text = json.dumps(found, separators=(",", ":")).encode()
        return (begin - 8).to_bytes(8, "little") + text.ljust(begin - 8)

    @functools.cached_property
    def text(self) -> str:
        """JSON for index.json."""
        tensors = {name: {"shape": list(e.shape), "dtype": e.dtype} for name, e in self.entries.items()}
        files = [{"name": name, "bytes": size} for name, size in zip(self.files, self.sizes, strict=True)]
        parts = [[part.file, part.start, part.stop] for part in self.parts]
        pieces = {name: self.pieces_of(name).tolist() for name in self.entries}
        index = {"world_size": len(self.parts), "tensors": tensors, "files": files, "parts": parts}
        return json.dumps({**index, "pieces": pieces})


def layout_in(index: Mapping[str, Any]) -> Layout:
    """The layout that index.json describes. Raises ValueError, KeyError or TypeError where it does not."""
    entries = {n: TensorEntry(tuple(e["shape"]), e["dtype"]) for n, e in index["tensors"].items()}
    tables = [
        np.insert(np.array(index["pieces"][name], np.int64).reshape(-1, 4), 0, number, axis=1)
        for number, name in enumerate(entries)
    ]
    files, parts = index["files"], [FilePart(*part) for part in index["parts"]]
    names, sizes = [file["name"] for file in files], [file["bytes"] for file in files]
    if any("/" in name for name in names):
        raise ValueError("index.json names a file elsewhere")
    return Layout(entries, names, sizes, parts, np.concatenate([np.empty((0, 5), np.int64), *tables]))


def make_layout(entries: Mapping[str, TensorEntry], shares: Sequence[tuple[int, np.ndarray]]) -> Layout:
    """The layout of a checkpoint. `shares`: by rank its node, and its pieces in the order of its memory.

    A piece is (number of the entry, first element, last + 1); a share's array is (pieces, 3), int64.
    """
    widths = np.array([WIDTHS[DTYPES[e.dtype]] for e in entries.values()], np.int64)
    nodes = sorted({node for node, _ in shares})
    parts, tables, sizes = {}, [], []
    for file, node in enumerate(nodes):
        of_node = [(rank, rows) for rank, (its, rows) in enumerate(shares) if its == node]
        start = 0
        place = _header_size(entries, np.concatenate([rows[:, 0] for _, rows in of_node]))
        for rank, rows in of_node:
            ends = place + np.cumsum((rows[:, 2] - rows[:, 1]) * widths[rows[:, 0]])
            begins = np.concatenate([[place], ends])[:-1]
            tables.append(np.column_stack([rows, np.full(len(rows), file), begins]))
            place = whole_sectors(int(ends[-1]) if len(rows) else place)
            parts[rank] = FilePart(file, start, place)
            start = place
        sizes.append(place)
    pieces = np.concatenate(tables)
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    files = [f"node-{number:05d}.safetensors" for number in range(len(nodes))]
    return Layout(dict(entries), files, sizes, [parts[rank] for rank in range(len(shares))], pieces)


def _header_size(entries: Mapping[str, TensorEntry], numbers: np.ndarray) -> int:
    """Bytes kept for the header of a file with pieces of these entries, in whole sectors."""
    lengths = np.array([len(json.dumps(name)) for name in entries], np.int64)
    return whole_sectors(HEADER_BYTES_A_PIECE + int((lengths[numbers] + HEADER_BYTES_A_PIECE).sum()))


def whole_sectors(size: int) -> int:
    """A size in bytes, rounded up to sectors."""
    return -(-size // SECTOR) * SECTOR
