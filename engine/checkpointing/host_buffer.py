"""Host buffer: a safetensors file built in host memory by one copy and written with O_DIRECT.

Measured beside training on two busy cores, for 340 MB: the copy takes 23 ms into pages that were touched
before and 1.7 s into new ones, so the buffer is kept; the write takes 0.01 s of processor time, against 0.1
to 0.7 s through the page cache; the checksum 0.01 s by isal, 0.07 s by zlib. safetensors' own save_file holds
the GIL while it copies, 0.37 s for 151 MB.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
from typing import TYPE_CHECKING, Any

from isal import isal_zlib

from isobatch.core import atomic_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"}
DTYPES |= {f"int{n}": f"I{n}" for n in (8, 16, 32, 64)} | {"uint8": "U8"}
"""torch's dtype names -> those of safetensors."""
SECTOR = 4096
"""O_DIRECT needs addresses, file offsets and lengths that are multiples of this."""
CHUNK = 8 << 20
"""Bytes per write."""


class HostBuffer:
    """Memory for one file, reused for every save; it only grows."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SECTOR)

    def fill(self, parts: Mapping[str, Tensor]) -> int:
        """Copy 1-d tensors, by name and from any device, into the buffer; returns the file's size in bytes.

        The format is a length, a JSON header and the bytes (huggingface/safetensors, "Format").
        """
        import torch

        # Widest element type first, as safetensors does, so that all tensors are aligned.
        ordered = sorted(parts.items(), key=lambda part: (-part[1].element_size(), part[0]))
        header: dict[str, Any] = {}
        offset = 0
        for name, tensor in ordered:
            stop = offset + tensor.numel() * tensor.element_size()
            kind = DTYPES[str(tensor.dtype).removeprefix("torch.")]
            header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        text = len(text).to_bytes(8, "little") + text
        self._reserve(len(text) + offset)
        self._memory[: len(text)] = text
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)[len(text) :]
        for name, tensor in ordered:
            start, stop = header[name]["data_offsets"]
            flat[start:stop].view(tensor.dtype).copy_(tensor)
        return len(text) + offset

    def _reserve(self, size: int) -> None:
        if size > len(self._memory):
            self._memory = mmap.mmap(-1, -(-size // SECTOR) * SECTOR)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)

    def write(self, path: Path, size: int) -> None:
        """Write the first `size` bytes to `path` and sync; their size and CRC-32 go to a .json beside it."""
        with memoryview(self._memory) as memory:
            try:
                _write(path, memory, size, os.O_DIRECT)
            except (AttributeError, OSError) as error:  # O_DIRECT is not supported everywhere
                if isinstance(error, OSError) and error.errno != errno.EINVAL:
                    raise
                _write(path, memory, size, 0)
            atomic_files.write_json(
                path.with_suffix(".json"), {"bytes": size, "crc32": isal_zlib.crc32(memory[:size])}
            )


def _write(path: Path, memory: memoryview, size: int, flags: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o666)
    try:
        offset, end = 0, -(-size // SECTOR) * SECTOR
        while offset < end:
            offset += os.write(descriptor, memory[offset : min(offset + CHUNK, end)])
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
