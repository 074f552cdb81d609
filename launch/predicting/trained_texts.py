"""Which texts a run was trained on: an accuracy on those is no evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isobatch.data.base import Ragged, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

FACTOR = np.uint64(6364136223846793005)
"""Knuth's multiplier for 64-bit linear congruential generators."""


class TrainedTexts:
    """The texts of a run's training split, known by their tokens. `folder`: its prepared data."""

    def __init__(self, folder: str, tokenizer: Tokenizer, max_length: int) -> None:
        self._folder, self._tokenizer, self._max_length = Path(folder), tokenizer, max_length
        self._keys: np.ndarray | None = None

    def holds(self, samples: Sequence[str | tuple[str, str]]) -> np.ndarray:
        """(n,) bool, of each text or pair whether a training row has its tokens."""
        self._tokenizer.enable_truncation(self._max_length, strategy="longest_first")
        encoded = self._tokenizer.encode_batch(list(samples), add_special_tokens=True)
        if self._keys is None:
            tokens = load(self._folder / "train")["tokens"]
            assert isinstance(tokens, Ragged)
            self._keys = row_keys(tokens)
        return np.isin(row_keys(Ragged.from_rows([np.array(one.ids) for one in encoded])), self._keys)


def row_keys(rows: Ragged) -> np.ndarray:
    """(n,) uint64, equal for rows of the same tokens; for others with a chance of about 2^-64."""
    keys = np.zeros(len(rows), np.uint64)
    left, starts, lengths = np.arange(len(rows)), rows.offsets[:-1], rows.lengths
    for place in range(int(lengths.max(initial=0))):
        left = left[lengths[left] > place]
        keys[left] = keys[left] * FACTOR + rows.values[starts[left] + place].astype(np.uint64) + np.uint64(1)
    return keys
