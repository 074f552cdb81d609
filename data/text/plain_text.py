"""Plain text as independent blocks of tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import tokenizers
from isobatch.data.base import Column, Ragged
from isobatch.data.cleaning.pipeline import CleaningPipeline
from isobatch.data.cleaning.steps import CleaningStep
from isobatch.data.corpora import Corpus

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Encoder:
    """What turns texts into rows of tokens."""

    tokenizer: Tokenizer
    special: Mapping[str, int | None]
    width: int
    """Most tokens of a row."""
    stride: int = 0
    """Tokens between the beginnings of held-out windows; 0: they do not overlap."""
    spool: Path | None = None
    """Where tokens pass through a file, so that memory stays flat."""

    @property
    def kind(self) -> type:
        """The numbers that hold its tokens; counting its words takes a moment."""
        return np.uint16 if tokenizers.vocabulary_size(self.tokenizer) <= 1 << 16 else np.int32


@dataclass(slots=True)
class Counts:
    """The size of a split's text, before it became tokens."""

    words: int = 0
    """Separated by white space; ends of lines are no words."""
    bytes: int = 0
    """In UTF-8."""

    def of(self, texts: Iterable[str], end: str) -> Iterator[str]:
        """The same texts, each with `end` behind it, counted as they pass."""
        for text in texts:
            self.words += len(text.split())
            self.bytes += len(text.encode()) + len(end)
            yield text + end if end else text


class PlainText:
    """One set of plain text.

    Columns: `tokens` (n, width), the last block of a split may be shorter, and `token.weight` (n,), the
    number of tokens a causal model predicts in a block: its length - 1.
    """

    form = "text"

    def __init__(self, name: str, corpus: Corpus, steps: Sequence[CleaningStep] = ()) -> None:
        self.name, self.corpus = name, corpus
        self.splits: Sequence[str] = list(corpus.splits)
        self.cleaning = CleaningPipeline(steps, "lines" if corpus.is_stream else "texts")

    def texts(self) -> Iterator[str]:
        """What a tokenizer is trained on."""
        return self._read("train", self.cleaning.transforms_only())

    def _read(self, split: str, cleaning: CleaningPipeline) -> Iterator[str]:
        texts = iter(self.corpus.splits[split]())
        if not cleaning.steps:
            return texts
        return cleaning.clean_lines(texts) if self.corpus.is_stream else cleaning.clean_texts(texts)

    @property
    def notes(self) -> list[str]:
        return [*self.corpus.notes, *self.cleaning.notes()]

    def open(self, encoder: Encoder) -> None:
        return

    def encode(self, split: str, encoder: Encoder) -> tuple[dict[str, Column], dict[str, int]]:
        """A split's columns and sizes."""
        eos, counts = encoder.special["eos"], Counts()
        after = [eos] if eos is not None and not self.corpus.is_stream else []
        texts = counts.of(self._read(split, self.cleaning), "" if self.corpus.is_stream or after else "\n")
        chunks = tokenizers.encode_texts(encoder.tokenizer, texts, after, encoder.kind)
        tokens = spooled(chunks, encoder.kind, encoder.spool)
        if len(tokens) < 2:
            raise UserError(
                f"--data {self.name}: the {split} text has {len(tokens)} tokens: at least 2 are needed"
            )
        overlap = encoder.stride and split != "train"
        columns = windows(tokens, encoder.width, encoder.stride) if overlap else blocks(tokens, encoder.width)
        predicted = int(columns["token.weight"].sum())
        sizes = {"tokens": len(tokens), "predicted": predicted, "words": counts.words, "bytes": counts.bytes}
        return columns, sizes

    def facts(self) -> dict[str, Any]:
        return {}

    def prompt(self) -> str:
        """The first words of the validation text."""
        return _first_words(self._read("valid", self.cleaning.transforms_only()))


def blocks(tokens: np.ndarray, width: int) -> dict[str, Any]:
    """Columns of independent blocks; a last block of one token is dropped, for it predicts nothing."""
    if len(tokens) % width == 1:
        tokens = tokens[:-1]
    ragged = Ragged.from_blocks(tokens, width)
    return {"tokens": ragged, "token.weight": (ragged.lengths - 1).astype(np.int32)}


def windows(tokens: np.ndarray, width: int, stride: int) -> dict[str, Any]:
    """Columns of windows that begin every `stride` tokens, of which each learns what none before it did.

    All tokens but the first are predicted once, those behind the first window from at least width - stride
    others. `learn` as of Conversations.
    """
    starts = np.arange(0, max(1, len(tokens) - width + stride), stride)
    stops = np.minimum(starts + width, len(tokens))
    before = np.concatenate([[1], stops[:-1]])
    lengths = stops - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    row = np.repeat(np.arange(len(starts)), lengths)
    place = np.arange(offsets[-1]) - offsets[row] + starts[row]
    learn = (place >= before[row]).astype(np.uint8)
    return {
        "tokens": Ragged(np.asarray(tokens)[place], offsets),
        "learn": Ragged(learn, offsets),
        "token.weight": (stops - before).astype(np.int32),
    }


class Spool:
    """An array that grows in a file that nobody else sees."""

    def __init__(self, kind: type, folder: Path | None) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.kind, self.file = kind, tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def add(self, values: np.ndarray) -> None:
        self.file.write(values.astype(self.kind, copy=False).tobytes())

    def array(self) -> np.ndarray:
        """All that was added; the end of adding."""
        with self.file:
            self.file.flush()
            return np.memmap(self.file, self.kind, "r") if self.file.tell() else np.empty(0, self.kind)


def spooled(chunks: Iterable[np.ndarray], kind: type, folder: Path | None) -> np.ndarray:
    """The chunks end to end."""
    spool = Spool(kind, folder)
    for chunk in chunks:
        spool.add(chunk)
    return spool.array()


def _first_words(texts: Iterable[str], count: int = 8) -> str:
    words = next((words for text in texts if (words := text.split())), ["The"])
    return " ".join(words[:count])
