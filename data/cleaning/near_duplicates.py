"""Near-duplicates by MinHash (Broder 1997) and banded buckets, from the library datasketch."""

from __future__ import annotations

import importlib.metadata
import re
import zlib
from typing import Any

import numpy as np

from isobatch.core.errors import UserError

HASHES = 128
"""Of each text; the share of equal ones estimates the overlap with a standard error of at most 0.044."""
RECALL = 0.97
"""Share of the pairs just at the threshold that the buckets must bring together."""
_WORD = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002fa1f]|\\w+")


def require() -> str:
    """The version of datasketch, which is not imported for it; another may hash otherwise."""
    try:
        return importlib.metadata.version("datasketch")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("--clean near: needs datasketch: pip install datasketch") from None


class NearDuplicates:
    """Whether a text shares at least `threshold` of its pairs of words with one that was kept before.

    The share is the Jaccard index: pairs in both texts over pairs in either.
    """

    def __init__(self, threshold: float) -> None:
        require()
        from datasketch import MinHash, MinHashLSH

        self.threshold = threshold
        self.blank = MinHash(num_perm=HASHES, hashfunc=zlib.crc32)
        self.buckets = MinHashLSH(num_perm=HASHES, params=bands(threshold))
        self.kept: list[np.ndarray] = []

    def __call__(self, text: str) -> bool:
        found: Any = self.blank.copy()
        found.update_batch(pairs(text))
        for number in self.buckets.query(found):
            if (self.kept[number] == found.hashvalues).mean() >= self.threshold:
                return True
        self.buckets.insert(len(self.kept), found, check_duplication=False)
        self.kept.append(found.hashvalues)
        return False


def pairs(text: str) -> list[bytes]:
    """Neighbouring words, in lower case; Han and kana characters are words."""
    words = _WORD.findall(text.lower())
    return [f"{a} {b}".encode() for a, b in set(zip(words, words[1:], strict=False))] or [
        text.strip().encode()
    ]


def bands(threshold: float) -> tuple[int, int]:
    """(bands, hashes in each): the longest bands that bring pairs at the threshold together.

    Two texts meet in some bucket with probability 1 - (1 - threshold^hashes)^bands.
    """
    fit = [(HASHES // r, r) for r in range(1, HASHES // 2 + 1)]
    return max(
        (c for c in fit if 1 - (1 - threshold ** c[1]) ** c[0] >= RECALL), key=lambda c: c[1], default=fit[0]
    )
