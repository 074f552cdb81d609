"""Tasks for the benchmarks `engine` and `gpu`: models on random tokens, in blocks or of varied length."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from isobatch.data.base import Columns, Data, Ragged
from isobatch.models.causal_lm.task import CausalLM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VOCABULARY = int(os.environ.get("BENCHMARK_VOCABULARY", "2048"))
MEAN, TAIL, LONGEST = 28, 0.464, 377
"""Lengths of samples: lognormal with this mean and spread (95 % are below 53), and one sample of LONGEST."""


def lengths_of(count: int, mean: int = MEAN, longest: int = LONGEST) -> np.ndarray:
    """Lengths of varied samples, in order."""
    drawn = np.random.default_rng(7).lognormal(np.log(mean) - TAIL**2 / 2, TAIL, count)
    lengths = np.clip(np.rint(drawn), 2, longest).astype(np.int64)
    lengths[count // 2] = longest
    return lengths


class Blocks(Data):
    """Blocks of `max_length` tokens; rank-frequency like text's (Zipf), so that the loss has far to fall."""

    def read(self) -> Mapping[str, Columns]:
        rows = int(os.environ.get("BENCHMARK_ROWS", "2048"))
        return {"train": columns_of(self._lengths(rows))}

    def _lengths(self, rows: int) -> np.ndarray:
        return np.full(rows, self.recipe.max_length, np.int64)

    def identity(self) -> dict[str, Any]:
        rows = os.environ.get("BENCHMARK_ROWS")
        return {**super().identity(), "rows": rows, "width": self.recipe.max_length, "words": VOCABULARY}

    def prepare(self, folder: Path) -> dict[str, Any]:
        return {**super().prepare(folder), "vocabulary": VOCABULARY}


class Varied(Blocks):
    """Samples of lognormal length."""

    def _lengths(self, rows: int) -> np.ndarray:
        return lengths_of(rows)


def columns_of(lengths: np.ndarray) -> Columns:
    """Samples of these lengths: `tokens`, and what they weigh."""
    ranks = np.random.default_rng(3).zipf(1.3, int(lengths.sum())) - 1
    tokens = Ragged((ranks % VOCABULARY).astype(np.uint16), np.append(0, np.cumsum(lengths)))
    return {"tokens": tokens, "token.weight": (lengths - 1).astype(np.int32)}


class Instructions(Blocks):
    """Samples of the lengths of Alpaca's 52,002 (prompt and response): mean 110 tokens, 95 % below 212."""

    def _lengths(self, rows: int) -> np.ndarray:
        return lengths_of(rows, mean=110, longest=1509)


class BlockLM(CausalLM):
    """The project's causal language model, without text to export or to continue."""

    data: ClassVar[type | str | None] = Blocks

    def export(self, model: Any, folder: Path, *_: Any) -> None:
        model.save_pretrained(folder)

    def sample(self, *_: Any) -> str | None:
        return None


class VariedLM(BlockLM):
    """The same on samples of varied length."""

    data: ClassVar[type | str | None] = Varied


class InstructionsLM(BlockLM):
    """The same on samples of instructions' lengths."""

    data: ClassVar[type | str | None] = Instructions
