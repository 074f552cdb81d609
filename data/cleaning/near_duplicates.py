"""Near-duplicates of texts: MinHash (Broder 1997) with locality-sensitive hashing, by datasketch."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import zlib
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    import numpy as np

NUM_HASHES = 128
"""Hashes of a text. The share of equal ones estimates the Jaccard index, standard error at most 0.044."""
MIN_RECALL = 0.97
"""The share of the pairs exactly at the threshold that the buckets must find."""
_WORD = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]|\\w+")


def require_datasketch() -> str:
    """The version of datasketch, read without importing it: another version may hash differently.

    Raises UserError where it is not installed.
    """
    try:
        return importlib.metadata.version("datasketch")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("--clean near: needs datasketch: pip install datasketch") from None


class NearDuplicates:
    """Says of each text whether it is a near-duplicate of an earlier one that was not.

    It is if the Jaccard index of their word pairs (pairs in both texts over pairs in either), estimated by
    MinHash, is at least `threshold`.
    """

    def __init__(self, threshold: float) -> None:
        require_datasketch()
        from datasketch import MinHash, MinHashLSH

        self.threshold = threshold
        self.empty_minhash = MinHash(num_perm=NUM_HASHES, hashfunc=zlib.crc32)
        self.buckets = MinHashLSH(num_perm=NUM_HASHES, params=choose_bands(threshold))
        self.kept: list[np.ndarray] = []

    def __call__(self, text: str) -> bool:
        minhash: Any = self.empty_minhash.copy()
        minhash.update_batch(word_pairs(text))
        for number in self.buckets.query(minhash):
            if (self.kept[number] == minhash.hashvalues).mean() >= self.threshold:
                return True
        self.buckets.insert(len(self.kept), minhash, check_duplication=False)
        self.kept.append(minhash.hashvalues)
        return False


def word_pairs(text: str) -> list[bytes]:
    """The pairs of neighbouring words, lower case, each once; every Han or kana character is a word.

    A text of one word gives that text.
    """
    words = _WORD.findall(text.lower())
    return [f"{a} {b}".encode() for a, b in set(itertools.pairwise(words))] or [text.strip().encode()]


def choose_bands(threshold: float) -> tuple[int, int]:
    """(bands, hashes in each): the longest bands that find pairs at the threshold with MIN_RECALL.

    Two texts share some bucket with probability 1 - (1 - threshold^hashes)^bands.
    """
    candidates = [(NUM_HASHES // r, r) for r in range(1, NUM_HASHES // 2 + 1)]
    return max(
        (c for c in candidates if 1 - (1 - threshold ** c[1]) ** c[0] >= MIN_RECALL),
        key=lambda c: c[1],
        default=candidates[0],
    )
