"""Shards: what came out of some megabytes of input, as numbers; in memory, on a pipe, or kept in a file.

A shard's file is its own manifest: a line of JSON (what it was made from, facts, arrays, digest), then the
bytes of the arrays. A file that is not whole, or was made from other input, counts as not there.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path


def short_digest(*parts: bytes | memoryview) -> str:
    """BLAKE2b over these bytes, 32 hex digits."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def text_hash(text: str | bytes) -> int:
    """A number of 64 bits for a text, the same in every process."""
    found = hashlib.blake2b(text.encode() if isinstance(text, str) else text, digest_size=8)
    return int.from_bytes(found.digest(), "little")


@dataclass(frozen=True, slots=True)
class EncodedShard:
    """What a part of the input became."""

    arrays: Mapping[str, np.ndarray]
    """(n,) each."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """JSON."""

    def pack(self, made_from: str = "") -> bytes:
        """A line of JSON and the arrays' bytes. `made_from` is a digest of the input."""
        blocks = [np.ascontiguousarray(array).tobytes() for array in self.arrays.values()]
        header = {
            "made_from": made_from,
            "facts": self.facts,
            "arrays": [[name, array.dtype.str, array.size] for name, array in self.arrays.items()],
            "digest": short_digest(*blocks),
        }
        return b"".join([json.dumps(header).encode(), b"\n", *blocks])

    @classmethod
    def unpack(cls, packed: bytes, made_from: str = "") -> EncodedShard | None:
        """The shard in such bytes; None where they are not whole, or were made from something else."""
        head, _, body = packed.partition(b"\n")
        try:
            header = json.loads(head)
            if header["made_from"] != made_from or header["digest"] != short_digest(memoryview(body)):
                return None
        except (ValueError, KeyError, TypeError):
            return None
        arrays, place = {}, 0
        for name, dtype, size in header["arrays"]:
            arrays[name] = np.frombuffer(body, dtype, size, place)
            place += arrays[name].nbytes
        return cls(arrays, header["facts"])

    def keep(self, file: Path, made_from: str) -> None:
        """Write the file under another name, then rename it: a killed process leaves no part of it.

        The other name is this writer's alone, also among those of other nodes.
        """
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
        temporary.write_bytes(self.pack(made_from))
        temporary.replace(file)


def kept_shard(file: Path, made_from: str) -> EncodedShard | None:
    """The shard in a file, if it is whole and was made from this."""
    return EncodedShard.unpack(file.read_bytes(), made_from) if file.is_file() else None
