"""Plain text as independent blocks of tokens, or as overlapping windows for evaluation."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from isobatch.data import tokenizers
from isobatch.data.base import Column, NoSamplesError, Ragged
from isobatch.data.cleaning import CleaningPipeline, CleaningStep
from isobatch.data.corpora import Corpus, TrainingRows
from isobatch.data.preparation.encoding import EncodedShard, ShardEncoder, Workshop, encode_whole, text_hash
from isobatch.data.text import row_fields
from isobatch.data.text.row_fields import RowCounts


@dataclass(frozen=True, slots=True)
class TokenizationSettings:
    """The tokenizer, and how its tokens are laid out in rows."""

    tokenizer: Tokenizer
    special_ids: Mapping[str, int | None]
    max_length: int
    """Most tokens of a row."""
    stride: int = 0
    """Tokens between the beginnings of held-out windows; 0: held-out text is in blocks too."""
    workshop: Workshop = field(default_factory=Workshop)
    """The processes that may tokenize, and where what they have done is kept."""

    @property
    def dtype(self) -> type:
        """Of token ids. Every access takes milliseconds: keep it."""
        return tokenizers.token_dtype(self.tokenizer)


@dataclass(frozen=True, kw_only=True)
class PlainTextEncoder(ShardEncoder):
    """Tokenizes texts and counts their words, lines and bytes; in any process.

    A shard has `tokens`, and of documents `hashes` (n,) uint64. Its facts: `words`, separated by white space;
    `lines`, the ends of lines (that of a document is one); `bytes` in UTF-8; whether a line is `open` at the
    end of the last text.
    """

    is_stream: bool
    eos: int | None
    """The token that follows a document; None: a line break does."""

    def __call__(self, texts: list[str]) -> EncodedShard:
        found = array("I")
        end = "\n" if self.eos is None and not self.is_stream else ""
        suffix = [] if self.eos is None or self.is_stream else [self.eos]
        for encoding in self.tokenizer.encode_batch_fast([t + end for t in texts], add_special_tokens=False):
            found.extend(encoding.ids)
            found.extend(suffix)
        arrays: dict[str, np.ndarray] = {"tokens": np.frombuffer(found, np.uint32).astype(self.dtype)}
        if not self.is_stream:
            arrays["hashes"] = np.fromiter(map(text_hash, texts), np.uint64, len(texts))
        facts = {
            "words": sum(len(text.split()) for text in texts),
            "lines": sum(text.count("\n") if self.is_stream else count_lines(text) for text in texts),
            "bytes": sum(len(text.encode()) for text in texts) + len(texts) * len(end),
            "open": not texts[-1].endswith("\n"),
        }
        return EncodedShard(arrays, facts)


def count_lines(text: str) -> int:
    """Lines of a text, of which the last need not end with a line break."""
    return text.count("\n") + (not text.endswith("\n"))


class PlainText:
    """One set of plain text.

    Columns: `tokens` (n, max_length), the last block of a split may be shorter, and `token.weight` (n,), the
    number of tokens a causal model predicts in a block: its length - 1.
    """

    form = "text"
    """What facts call the set."""

    def __init__(self, name: str, corpus: Corpus, steps: Sequence[CleaningStep] = ()) -> None:
        self.name, self.corpus = name, corpus
        self.splits: Sequence[str] = sorted(corpus.splits, key=lambda split: split != "train")
        self.remarks: list[str] = []
        self.total = RowCounts()
        """Of the rows of all splits."""
        self._known = TrainingRows()
        self.cleaning = CleaningPipeline(steps, "lines" if corpus.is_stream else "texts")

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on."""
        return self._read("train", self.cleaning.transforms_only())

    def _read(self, split: str, cleaning: CleaningPipeline, counts: RowCounts | None = None) -> Iterator[str]:
        texts = self._texts(split, RowCounts() if counts is None else counts)
        if not cleaning.steps:
            return texts
        if self.corpus.is_stream:
            return cleaning.clean_lines(texts)
        others = [name for name in self.corpus.splits if split == "train" != name]
        held_out = (self._texts(name, RowCounts()) for name in others)
        return cleaning.clean_texts(texts, chain.from_iterable(held_out))

    def _texts(self, split: str, counts: RowCounts) -> Iterator[str]:
        """The texts of a split as they are given; what rows hold beside them is counted."""
        found, column = self.corpus.splits[split](), self.corpus.column
        return iter(found) if column is None else row_fields.texts_in(found, column, counts)

    @property
    def notes(self) -> list[str]:
        """What the user should know, one line each."""
        return [*self.corpus.notes, *self.cleaning.notes(), *self.remarks, *self.total.field_notes()]

    def bind_tokenizer(self, settings: TokenizationSettings) -> None:
        """Nothing to prepare: plain text has no template."""

    def encode(self, split: str, settings: TokenizationSettings) -> tuple[dict[str, Column], dict[str, int]]:
        """(columns, sizes) of a split: training in blocks, held-out splits in windows if there is a stride.

        Raises UserError for a text of fewer than two tokens.
        """
        rows = RowCounts()
        texts = self._read(split, self.cleaning, rows)
        encoder = PlainTextEncoder(
            tokenizer=settings.tokenizer,
            dtype=settings.dtype,
            is_stream=self.corpus.is_stream,
            eos=settings.special_ids["eos"],
        )
        found, facts = encode_whole(encoder, f"{self.name}, {split}", texts, settings.workshop)
        counts = sum(map(Counter, facts), Counter[str]())
        if self.corpus.is_stream:
            counts["lines"] += not facts or facts[-1]["open"]
        self.total.update(rows)
        self.remarks += (left_out := [*rows.notes(split, settings.max_length)])
        tokens = found.get("tokens", np.empty(0, settings.dtype))
        if len(tokens) < 2:
            raise NoSamplesError(
                f"--data {self.name}: the {split} text has {len(tokens)} tokens: at least 2 are needed"
                + "".join(f"; {note} (the first: {rows.first_left_out})" for note in left_out)
            )
        width, stride = settings.max_length, settings.stride if split != "train" else 0
        columns = windows(tokens, width, stride) if stride else blocks(tokens, width)
        sizes = {"tokens": len(tokens), "predicted": int(columns["token.weight"].sum())}
        hashes = found.get("hashes", np.empty(0, np.uint64))  # a stream has no documents, so no hashes
        self.remarks += self._known.compare(split, hashes)
        return columns, sizes | {name: counts[name] for name in ("words", "bytes", "lines")}

    def facts(self) -> dict[str, Any]:
        """What Facts should know of the set: nothing more than its sizes."""
        return {}

    def prompt(self) -> str:
        """The first words of the validation text."""
        texts = self._read("valid", self.cleaning.transforms_only())
        return " ".join(next((words for text in texts if (words := text.split())), ["The"])[:8])


def blocks(tokens: np.ndarray, width: int) -> dict[str, Any]:
    """The columns of blocks of `width` tokens. A last block of one token predicts nothing and is dropped."""
    if len(tokens) % width == 1:
        tokens = tokens[:-1]
    ragged = Ragged(tokens, np.append(np.arange(0, len(tokens), width), len(tokens)))
    return {"tokens": ragged, "token.weight": (ragged.lengths - 1).astype(np.int32)}


def windows(tokens: np.ndarray, width: int, stride: int) -> dict[str, Any]:
    """The columns of windows of `width` tokens that begin every `stride` tokens, for perplexity.

    Every token but the first is predicted once, by the first window that contains it: after the first window
    that is from at least width - stride tokens of context. `learn` is the mask of those, as in Conversations.
    """
    starts = np.arange(0, max(1, len(tokens) - width + stride), stride)
    stops = np.minimum(starts + width, len(tokens))
    before = np.concatenate([[1], stops[:-1]])
    lengths = stops - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    row = np.repeat(np.arange(len(starts)), lengths)
    position = np.arange(offsets[-1]) - offsets[row] + starts[row]
    learn = (position >= before[row]).astype(np.uint8)
    return {
        "tokens": Ragged(np.asarray(tokens)[position], offsets),
        "learn": Ragged(learn, offsets),
        "token.weight": (stops - before).astype(np.int32),
    }
