"""How many logits a language model's head makes at a time (models/causal_lm/chunked_cross_entropy.py)."""

from __future__ import annotations

CHUNK_BYTES = 64 << 20
"""Size of the fp32 logits that a linear head's loss holds at a time on a CPU."""
CHUNK_SHARE, MOST_CHUNK_BYTES = 128, 512 << 20
"""On a GPU a chunk is the 128th part of its memory, up to half a gigabyte: small products waste its cores."""


def chunk_bytes(gpu_memory: int | None) -> int:
    """Size of the fp32 logits that a head holds at a time, on a GPU with this much memory or on a CPU."""
    if gpu_memory is None:
        return CHUNK_BYTES
    return min(MOST_CHUNK_BYTES, max(CHUNK_BYTES, gpu_memory // CHUNK_SHARE))
