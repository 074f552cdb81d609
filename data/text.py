"""Text for language models: plain text in blocks, or conversations with a mask of what is learnt."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from data import cleaning, conversations, corpora, hub, near, readers, supervised, templates, tokenizers
from data.base import Columns, DataError, save
from data.blocks import Encoder, PlainText
from data.cleaning import Cleaning
from data.cleaning_steps import Step, steps_of
from data.corpora import DEMO, Table
from data.supervised import Conversations
from data.tokenized import Tokenized

SMALLEST_VOCABULARY = 257
TEXT = "text"
"""The column of plain text, where none is named."""
TextSet = PlainText | Conversations


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """The fields of text."""

    text_column: str | None = None
    """The column of csv, jsonl, json, parquet and hub data that holds plain text; by default text, unless
    the rows are conversations: instruction and output, messages, or conversations."""
    template: Literal["auto", "alpaca", "chatml", "plain"] = "auto"
    """How a conversation is written as text; auto is the tokenizer's own chat template, else alpaca for
    instructions and chatml for messages."""
    response_only: bool = True
    """Of conversations learn the assistant's tokens only; off learns the prompts too."""
    clean: tuple[str, ...] | None = None
    """Steps over every text before it is tokenized: html,unicode,control,short=10,duplicates,near=0.8."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the data; by default 8192, and 1024 for the demo."""
    data_config: str | None = None
    """The configuration of a hub data set that has several, such as wikitext-2-raw-v1."""


class Text(Tokenized):
    """Text from a folder, a file, a hub id, or the demo: source code of Python's own standard library.

    Columns: those of PlainText, or of Conversations where the rows are such.
    """

    Options: ClassVar[type] = TextOptions
    demo_vocabulary: ClassVar[int] = 1024

    def check(self) -> None:
        size = self.options.vocab_size
        if size is not None and size < SMALLEST_VOCABULARY:
            raise DataError(
                f"--vocab-size {size}: must be at least {SMALLEST_VOCABULARY}: 256 bytes and an end token"
            )
        if any(step.name == "near" for step in self._steps()):
            near.require()
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
        if self._form(parts) is None:
            for part in parts.values():
                if not part.is_stream:
                    readers.require_column(part, self.options.text_column or TEXT)

    def _steps(self) -> tuple[Step, ...]:
        return steps_of(self.options.clean or ())

    def _form(self, parts: Mapping[str, readers.Part]) -> str | None:
        """What marks the rows as conversations; None for plain text, and for a column that was named."""
        if parts["train"].is_stream or self.options.text_column is not None:
            return None
        return conversations.form_of(readers.columns(parts["train"]))

    def identity(self) -> dict[str, Any]:
        return {
            "data": self._content(),
            "format": self.recipe.format,
            "tokenizer": self._place().identity(),
            "max_length": self.recipe.max_length,
            "text_column": self.options.text_column or TEXT,
            "vocab_size": self._vocabulary_size(),
            **self._conversation_identity(),
            **self._cleaning_identity(),
        }

    def _conversation_identity(self) -> dict[str, Any]:
        """What conversations depend on beside. A hub data set, which is not at hand, may hold some."""
        path = self._path()
        plain = self.recipe.data == DEMO or (
            path is not None and self._form(readers.find(path, self.recipe.format)) is None
        )
        if plain:
            return {}
        template = templates.identity(self._place().path)
        return {
            "conversations": [supervised.RULES, self.options.template, self.options.response_only, template]
        }

    def _cleaning_identity(self) -> dict[str, Any]:
        steps = self._steps()
        version = [near.require()] if any(step.name == "near" for step in steps) else []
        return {"clean": [cleaning.RULES, *map(str, steps), *version]} if steps else {}

    def _content(self) -> Any:
        """Hashes of the files; a hub data set, whose files are not at hand, goes by its name."""
        if self.recipe.data == DEMO:
            return [platform.python_version(), *(tokenizers.file_hash(f) for f in corpora.demo_files())]
        if (path := self._path()) is None:
            return [self.recipe.data, self.options.data_config]
        return readers.content(readers.find(path, self.recipe.format))

    def text_set(self) -> TextSet:
        """The texts, with a validation split."""
        name, column = self.recipe.data, self.options.text_column or TEXT
        if name == DEMO:
            return PlainText(name, corpora.demo(), self._steps())
        if (path := self._path()) is not None:
            parts = readers.find(path, self.recipe.format)
            if form := self._form(parts):
                return self._conversations(corpora.table_of_files(parts), form)
            return PlainText(name, corpora.of_files(parts, column), self._steps())
        table = corpora.table_of_hub(name, self.options.data_config)
        form = conversations.form_of(table.columns) if self.options.text_column is None else None
        if form is not None:
            return self._conversations(table, form)
        return PlainText(name, corpora.of_hub(name, self.options.data_config, column), self._steps())

    def _conversations(self, table: Table, form: str) -> Conversations:
        notes = [*table.notes]
        if TEXT in table.columns:
            notes.append(
                f"the rows are read as conversations ({form}): --text-column {TEXT} reads plain text"
            )
        return Conversations(
            name=self.recipe.data,
            rows=table.splits,
            read=partial(conversations.messages_of, form=form),
            wanted=self.options.template,
            by_default="alpaca" if form == "instruction" else "chatml",
            response_only=self.options.response_only,
            folder=self._tokenizer_folder(),
            remarks=notes,
            cleaning=Cleaning(self._steps(), "conversations"),
        )

    def read(self) -> Mapping[str, Columns]:
        found, encoder = self._opened()
        return {split: found.encode(split, encoder)[0] for split in found.splits}

    def prepare(self, folder: Path) -> dict[str, Any]:
        found, encoder = self._opened(folder)
        sizes = {}
        for split in found.splits:
            columns, sizes[split] = found.encode(split, encoder)
            save(folder / split, columns)
        encoder.tokenizer.save(str(folder / "tokenizer.json"))
        return {
            "tokenizer": "tokenizer.json",
            "vocabulary": tokenizers.size(encoder.tokenizer),
            **encoder.special,
            "splits": sizes,
            "prompt": "def" if self.recipe.data == DEMO else found.prompt(),
            **found.facts(),
            "notes": found.notes,
        }

    def _opened(self, folder: Path | None = None) -> tuple[TextSet, Encoder]:
        if self.recipe.max_length < 2:
            raise DataError(f"--max-length {self.recipe.max_length}: a row needs at least 2 tokens")
        found = self.text_set()
        tokenizer, special = self._tokenizer(lambda size: tokenizers.train(found.texts(), size))
        encoder = Encoder(tokenizer, special, self.recipe.max_length, folder)
        found.open(encoder)
        return found, encoder
