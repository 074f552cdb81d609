"""Labelled texts become rows of tokens with special tokens; in any process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.data.base import Column, Ragged
from isobatch.data.preparation.encoding import EncodedShard
from isobatch.data.preparation.spooled_array import SpooledArray

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tokenizers import Tokenizer

BATCH_TEXTS = 1024


class EncodedRows:
    """The rows of a split as they come, in temporary files."""

    def __init__(self, dtype: np.dtype[Any], folder: Path | None, pairs: bool) -> None:
        self.tokens = SpooledArray(dtype, folder)
        self.types = SpooledArray(np.dtype(np.uint8), folder) if pairs else None
        self.lengths = [np.zeros(1, np.uint32)]
        self.cut = 0
        """Rows of which something is cut off."""

    def add(self, shard: EncodedShard) -> None:
        """Append the rows of a shard that LabelledEncoder made."""
        self.tokens.add(shard.arrays["tokens"])
        if self.types is not None:
            self.types.add(shard.arrays["types"])
        self.lengths.append(shard.arrays["lengths"])
        self.cut += shard.facts["cut"]

    def columns(self, pad: int) -> dict[str, Column]:
        """`tokens`, and `types` of pairs; nothing can be added after this."""
        offsets = np.cumsum(np.concatenate(self.lengths), dtype=np.int64)
        found: dict[str, Column] = {"tokens": Ragged(self.tokens.array(), offsets, pad)}
        return found if self.types is None else {**found, "types": Ragged(self.types.array(), offsets)}


class LabelledEncoder:
    """Tokenizes texts, or pairs of texts one after the other, cut to `max_length` tokens.

    A shard has `tokens` (all,), for pairs `types` of the same shape, and `lengths` (rows,). Its facts: the
    number of rows that are `cut`.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        self.tokenizer, self.dtype = tokenizer, np.dtype(settings["dtype"])
        self.pairs, self.max_length = settings["pairs"], settings["max_length"]

    def __call__(self, texts: list[str]) -> EncodedShard:
        rows: list[Any] = list(zip(texts[::2], texts[1::2], strict=True)) if self.pairs else texts
        parts = [
            self._encode(rows[start : start + BATCH_TEXTS]) for start in range(0, len(rows), BATCH_TEXTS)
        ]
        names = parts[0][0]
        arrays = {name: np.concatenate([found[name] for found, _ in parts]) for name in names}
        return EncodedShard(arrays, {"cut": sum(cut for _, cut in parts)})

    def _encode(self, rows: list[Any]) -> tuple[dict[str, np.ndarray], int]:
        self.tokenizer.enable_truncation(self.max_length, strategy="longest_first")
        encoded = self.tokenizer.encode_batch(rows, add_special_tokens=True)
        self.tokenizer.no_truncation()
        ids = [encoding.ids for encoding in encoded]
        arrays = {"tokens": np.concatenate([np.array(row, self.dtype) for row in ids])}
        if self.pairs:
            arrays["types"] = np.concatenate([np.array(e.type_ids, np.uint8) for e in encoded])
        arrays["lengths"] = np.array([len(row) for row in ids], np.uint32)
        return arrays, sum(bool(e.overflowing) for e in encoded)
