"""Text for language models: tokenized, joined and cut into independent blocks of `max_length` tokens."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from data import corpora, hub, readers, tokenizers
from data.base import Columns, DataError, Ragged, save
from data.corpora import DEMO, Corpus
from data.tokenized import Tokenized

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SMALLEST_VOCABULARY = 257


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """The fields of plain text."""

    text_column: str = "text"
    """The column of csv, jsonl, json, parquet and hub data that holds the text."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the data; by default 8192, and 1024 for the demo."""
    data_config: str | None = None
    """The configuration of a hub data set that has several, such as wikitext-2-raw-v1."""


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


class Text(Tokenized):
    """Text from a folder, a file, a hub id, or the demo: source code of Python's own standard library.

    Columns: `tokens` (n, max_length), the last block of a split may be shorter, and `token.weight` (n,), the
    number of tokens a causal model predicts in a block: its length - 1.
    """

    Options: ClassVar[type] = TextOptions
    demo_vocabulary: ClassVar[int] = 1024

    def check(self) -> None:
        size = self.options.vocab_size
        if size is not None and size < SMALLEST_VOCABULARY:
            raise DataError(
                f"--vocab-size {size}: must be at least {SMALLEST_VOCABULARY}: 256 bytes and an end token"
            )
        self._place()
        if self.recipe.data == DEMO:
            corpora.demo_files()
        elif (path := self._path()) is not None:
            self._check_files(path)
        else:
            hub.require_dataset(self.recipe.data)

    def _check_files(self, path: Path) -> None:
        parts = readers.find(path, self.recipe.format)
        if not any(file.stat().st_size for file in parts["train"].files):
            raise DataError(f"--data {path}: {parts['train'].files[0]} is empty")
        for part in parts.values():
            if not part.is_stream:
                readers.require_column(part, self.options.text_column)

    def identity(self) -> dict[str, Any]:
        return {
            "data": self._content(),
            "format": self.recipe.format,
            "tokenizer": self._place().identity(),
            "max_length": self.recipe.max_length,
            "text_column": self.options.text_column,
            "vocab_size": self._vocabulary_size(),
        }

    def _content(self) -> Any:
        """Hashes of the files; a hub data set, whose files are not at hand, goes by its name."""
        if self.recipe.data == DEMO:
            return [platform.python_version(), *(tokenizers.file_hash(f) for f in corpora.demo_files())]
        if (path := self._path()) is None:
            return [self.recipe.data, self.options.data_config]
        return readers.content(readers.find(path, self.recipe.format))

    def corpus(self) -> Corpus:
        """The texts, with a validation split."""
        if self.recipe.data == DEMO:
            return corpora.demo()
        if (path := self._path()) is not None:
            return corpora.of_files(readers.find(path, self.recipe.format), self.options.text_column)
        return corpora.of_hub(self.recipe.data, self.options.data_config, self.options.text_column)

    def read(self) -> Mapping[str, Columns]:
        corpus = self.corpus()
        tokenizer, special = self._opened(corpus)
        return {
            split: self._split(corpus, split, tokenizer, special["eos"], None)[0] for split in corpus.splits
        }

    def prepare(self, folder: Path) -> dict[str, Any]:
        corpus = self.corpus()
        tokenizer, special = self._opened(corpus)
        sizes = {}
        for split in corpus.splits:
            columns, sizes[split] = self._split(corpus, split, tokenizer, special["eos"], folder)
            save(folder / split, columns)
        tokenizer.save(str(folder / "tokenizer.json"))
        return {
            "tokenizer": "tokenizer.json",
            "vocabulary": tokenizers.size(tokenizer),
            **special,
            "splits": sizes,
            "prompt": "def" if self.recipe.data == DEMO else _first_words(corpus.splits["valid"]()),
            "notes": list(corpus.notes),
        }

    def _opened(self, corpus: Corpus) -> tuple[Tokenizer, dict[str, int | None]]:
        return self._tokenizer(lambda size: tokenizers.train(corpus.splits["train"](), size))

    def _split(
        self, corpus: Corpus, split: str, tokenizer: Tokenizer, eos: int | None, spool_in: Path | None
    ) -> tuple[Columns, dict[str, int]]:
        """A split's columns and sizes. The tokens pass through a file, so that memory stays flat."""
        kind = np.uint16 if tokenizers.size(tokenizer) <= 1 << 16 else np.int32
        counts = Counts()
        after = [eos] if eos is not None and not corpus.is_stream else []
        texts = counts.of(corpus.splits[split](), "" if corpus.is_stream or after else "\n")
        tokens = _spooled(tokenizers.encode(tokenizer, texts, after, kind), kind, spool_in)
        if len(tokens) < 2:
            raise DataError(
                f"--data {self.recipe.data}: the {split} text has {len(tokens)} tokens: at least 2 are needed"
            )
        columns = blocks(tokens, self.recipe.max_length)
        predicted = int(columns["token.weight"].sum())
        return columns, {
            "tokens": len(tokens),
            "predicted": predicted,
            "words": counts.words,
            "bytes": counts.bytes,
        }


def blocks(tokens: np.ndarray, width: int) -> dict[str, Any]:
    """Columns of independent blocks; a last block of one token is dropped, for it predicts nothing."""
    if width < 2:
        raise DataError(f"--max-length {width}: a block needs at least 2 tokens")
    if len(tokens) % width == 1:
        tokens = tokens[:-1]
    ragged = Ragged.from_blocks(tokens, width)
    return {"tokens": ragged, "token.weight": (ragged.lengths - 1).astype(np.int32)}


def _spooled(chunks: Iterable[np.ndarray], kind: type, folder: Path | None) -> np.ndarray:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as spool:
        for chunk in chunks:
            spool.write(chunk.tobytes())
        spool.flush()
        return np.memmap(spool, kind, "r") if spool.tell() else np.empty(0, kind)


def _first_words(texts: Iterable[str], count: int = 8) -> str:
    words = next((words for text in texts if (words := text.split())), ["The"])
    return " ".join(words[:count])
