"""SHA-256 digests of files. Of tensors the content counts (names, types, shapes, bytes), not the layout."""

from __future__ import annotations

import hashlib
import json
import mmap
from pathlib import Path
from typing import Any

BLOCK = 8 << 20
"""Bytes read at a time."""


def folder_digests(folder: Path) -> dict[str, str]:
    """Relative path -> digest of every file under a folder."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): file_digest(p) for p in paths}


def file_digest(path: Path) -> str:
    """The digest of a file's bytes; of a .safetensors file that of its tensors."""
    if path.suffix == ".safetensors" and (found := _tensors_digest(path)) is not None:
        return found
    return bytes_digest(path)


def bytes_digest(path: Path) -> str:
    """The digest of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _tensors_digest(path: Path) -> str | None:
    """The digest of the tensors, by name; None where the file is not of the format.

    The format is a length, a JSON header and the bytes (huggingface/safetensors, "Format"). The header's
    metadata, whose order differs from one writer to the next, does not count.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 8 + int.from_bytes(content[:8], "little")
            header: dict[str, Any] = json.loads(content[8:start])
            header.pop("__metadata__", None)
            for name, tensor in sorted(header.items()):
                digest.update(json.dumps([name, tensor["dtype"], tensor["shape"]]).encode())
                first, last = (start + offset for offset in tensor["data_offsets"])
                if last > len(content):
                    return None
                for place in range(first, last, BLOCK):
                    digest.update(content[place : min(place + BLOCK, last)])
    except (ValueError, KeyError, TypeError):
        return None
    return digest.hexdigest()
