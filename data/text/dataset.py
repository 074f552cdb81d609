"""Text for language models: plain text in blocks, conversations with a mask of what is learnt, or several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import tokenizers
from isobatch.data.base import ArraySource, Columns, load, save
from isobatch.data.cleaning import near_duplicates, pipeline
from isobatch.data.cleaning.steps import CleaningStep, parse_steps
from isobatch.data.corpora import DEMO
from isobatch.data.text import chat_templates, conversations
from isobatch.data.text.mixture import SET, Mixture
from isobatch.data.text.plain_text import Encoder
from isobatch.data.text.sources import TEXT, Given, TextSet, names_of
from isobatch.data.tokenized import TokenizedData

SMALLEST_VOCABULARY = 257


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
    mix: tuple[float, ...] | None = None
    """The share of each set of --data a,b in what is learnt; by default their sizes decide."""
    clean: tuple[str, ...] | None = None
    """Steps over every text before it is tokenized: html,unicode,control,short=10,duplicates,near=0.8."""
    stride: int = 0
    """Held-out plain text is judged in windows of --max-length that begin every so many tokens, each on what
    none before it predicted; 0: they do not overlap."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the data; by default 8192, and 1024 for the demo."""
    data_config: str | None = None
    """The configuration of a hub data set that has several, such as wikitext-2-raw-v1."""


class Text(TokenizedData):
    """Text from folders, files, hub ids, or the demo: source code of Python's own standard library.

    Columns: those of PlainText; of Conversations where the rows are such; of Mixture for several sets.
    """

    Options: ClassVar[type] = TextOptions
    cache_name: ClassVar[str] = "data.text.Text"
    demo_vocabulary_size: ClassVar[int] = 1024

    @property
    def given(self) -> list[Given]:
        """The sets that --data names."""
        places = names_of(self.recipe.data)
        short = [Path(place).stem for place in places]
        names = short if len(places) > 1 and len(set(short)) == len(short) else places
        return [
            Given(place, name, self.recipe.format, self.options, alone=len(places) == 1)
            for place, name in zip(places, names, strict=True)
        ]

    def check(self) -> None:
        size = self.options.vocab_size
        if not 0 <= self.options.stride <= self.recipe.max_length:
            raise UserError(
                f"--stride {self.options.stride}: must be at least 1 and at most --max-length"
                f" {self.recipe.max_length}"
            )
        if size is not None and size < SMALLEST_VOCABULARY:
            raise UserError(
                f"--vocab-size {size}: must be at least {SMALLEST_VOCABULARY}: 256 bytes and an end token"
            )
        if any(step.name == "near" for step in self._steps()):
            near_duplicates.require_datasketch()
        self._tokenizer_source()
        given = self.given
        self._check_mix(len(given))
        for one in given:
            one.check()
        self._check_column(given)

    def _check_column(self, given: list[Given]) -> None:
        """Of several sets at least one has the column that was named; one alone was asked for its own."""
        column = self.options.text_column
        tables = [one for one in given if one.has_rows]
        if column is not None and len(given) > 1 and not any(one.has_column(column) for one in tables):
            raise UserError(
                f"--text-column {column}: none of the sets of --data {self.recipe.data} has such a column"
            )

    def _check_mix(self, sets: int) -> None:
        mix = self.options.mix
        if mix is None:
            return
        typed = f"--mix {','.join(f'{share:g}' for share in mix)}"
        if sets == 1:
            raise UserError(f"{typed}: --data {self.recipe.data} is one set: name several, as in --data a,b")
        if len(mix) != sets:
            raise UserError(f"{typed}: {len(mix)} shares for the {sets} sets of --data: give one for each")
        if not all(share > 0 and math.isfinite(share) for share in mix):
            raise UserError(f"{typed}: every share must be above 0; leave a set out of --data to do without")

    def _steps(self) -> tuple[CleaningStep, ...]:
        return parse_steps(self.options.clean or ())

    def identity(self) -> dict[str, Any]:
        given = self.given
        contents = [one.content() for one in given]
        return {
            "data": contents[0] if len(given) == 1 else contents,
            "format": self.recipe.format,
            "tokenizer": self._tokenizer_source().identity(),
            "max_length": self.recipe.max_length,
            "text_column": self.options.text_column or TEXT,
            "vocab_size": self._vocabulary_size(),
            **({"stride": self.options.stride} if self.options.stride else {}),
            **self._answers_identity(given),
            **self._cleaning_identity(),
        }

    def _answers_identity(self, given: list[Given]) -> dict[str, Any]:
        """What answers depend on beside. A hub data set, which is not at hand, may hold some."""
        if all(one.kind() == TEXT for one in given) and len(given) == 1:
            return {}
        options, template = self.options, chat_templates.identity(self._tokenizer_source().path)
        found = [conversations.RULES, options.template, options.response_only, template]
        return {"conversations": found} | ({"sets": [one.name for one in given]} if len(given) > 1 else {})

    def _cleaning_identity(self) -> dict[str, Any]:
        steps = self._steps()
        version = [near_duplicates.require_datasketch()] if any(step.name == "near" for step in steps) else []
        return {"clean": [pipeline.CLEANING_VERSION, *map(str, steps), *version]} if steps else {}

    def text_set(self) -> TextSet | Mixture:
        """The texts, with a validation split."""
        folder = self._tokenizer_folder()
        sets = [one.open(self._steps(), folder) for one in self.given]
        return sets[0] if len(sets) == 1 else Mixture(sets)

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
            "vocabulary": tokenizers.vocabulary_size(encoder.tokenizer),
            **encoder.special,
            "splits": sizes,
            "prompt": "def" if self.recipe.data == DEMO else found.prompt(),
            **found.facts(),
            "notes": found.notes,
        }

    def _opened(self, folder: Path | None = None) -> tuple[TextSet | Mixture, Encoder]:
        if self.recipe.max_length < 2:
            raise UserError(f"--max-length {self.recipe.max_length}: a row needs at least 2 tokens")
        found = self.text_set()
        sets = found.sets if isinstance(found, Mixture) else [found]
        if self.options.stride and all(isinstance(one, conversations.Conversations) for one in sets):
            raise UserError(
                f"--stride {self.options.stride}: is for running text; conversations are judged one by one"
            )
        tokenizer, special = self._open_or_train_tokenizer(
            lambda size: tokenizers.train_byte_level_bpe(found.texts(), size)
        )
        encoder = Encoder(tokenizer, special, self.recipe.max_length, self.options.stride, folder)
        found.open(encoder)
        return found, encoder

    def open(self, folder: Path, split: str) -> ArraySource:
        """The samples of a prepared split; of several sets, with the share of each."""
        source = ArraySource(load(folder / split))
        if SET in source.columns:
            sizes = np.bincount(
                np.asarray(source.columns[SET]), minlength=len(self.options.mix or ())
            ).tolist()
            source.parts = tuple(zip(sizes, self.options.mix or map(float, sizes), strict=True))
        return source
