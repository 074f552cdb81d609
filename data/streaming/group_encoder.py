"""Rows of text in a store become tokens a group at a time, as those of a file here do."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.data.base import NoSamplesError
from isobatch.data.cleaning import pipeline
from isobatch.data.cleaning.steps import CleaningStep
from isobatch.data.corpora import Corpus
from isobatch.data.digests import file_hash
from isobatch.data.text import chat_templates
from isobatch.data.text.conversations import TOKENIZATION_VERSION, Conversations
from isobatch.data.text.plain_text import PlainText, TokenizationSettings
from isobatch.data.text.row_fields import FIELD, LEFT_OUT
from isobatch.data.text.sources import TEXT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from isobatch.data.base import Column
    from isobatch.data.streaming.shards import Rows
    from isobatch.data.text.sources import TextSet

VERSION = 2
"""Part of the cache key: raise it when the same rows become other tokens."""


@dataclass(slots=True)
class TextGroupEncoder:
    """Rows of text to tokens, as local preparation does it."""

    name: str
    """--data, in errors."""
    kind: str
    """TEXT, or the column that marks conversations."""
    column: str
    """The column of plain text."""
    cleaning: tuple[CleaningStep, ...]
    options: Any
    """TextOptions."""
    tokenizer_folder: Path | None
    tokenization: TokenizationSettings | None = None
    """Set when the tokenizer is known."""

    @property
    def columns(self) -> list[str] | None:
        return [self.column] if self.kind == TEXT else None

    def texts(self, rows: Rows, where: str) -> Iterator[str]:
        """What a tokenizer is trained on."""
        return self.text_set({"train": rows}, where).texts()

    def text_set(self, rows: Mapping[str, Rows], where: str) -> TextSet:
        """The rows of each split as local preparation sees a set."""
        located = {split: partial(_located, found, where) for split, found in rows.items()}
        if self.kind == TEXT:
            return PlainText(self.name, Corpus(located, column=self.column), self.cleaning)
        folder, steps = self.tokenizer_folder, self.cleaning
        return Conversations(self.name, located, self.kind, self.options, folder, steps)

    def encode(self, rows: Rows, where: str) -> tuple[dict[str, Column], dict[str, int]]:
        """(columns, the sizes that Facts sums up, and what is noted of rows); no columns without a text."""
        assert self.tokenization is not None
        found = self.text_set({"train": rows}, where)
        found.bind_tokenizer(self.tokenization)
        columns: dict[str, Column] = {}
        sizes: dict[str, int] = {}
        with contextlib.suppress(NoSamplesError):
            columns, sizes = found.encode("train", self.tokenization)
        noted = {name: n for name, n in found.total.items() if name.startswith((LEFT_OUT, FIELD))}
        return columns, sizes | noted

    def identity(self) -> str:
        """A hash of all that decides which tokens rows become."""
        assert self.tokenization is not None
        one = self.tokenization
        options, cleaning = self.options, [pipeline.CLEANING_VERSION, *map(str, self.cleaning)]
        parts = [VERSION, self.kind, self.column, cleaning, TOKENIZATION_VERSION, options.template]
        parts += [options.response_only, dict(one.special_ids)]
        template = chat_templates.template_file(self.tokenizer_folder)
        parts += [template and file_hash(template), one.max_length]
        text = json.dumps(parts, sort_keys=True, default=str) + one.tokenizer.to_str()
        return hashlib.sha256(text.encode()).hexdigest()


def _located(rows: Rows, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"{where} row {number}", row) for number, row in enumerate(rows, 1))
