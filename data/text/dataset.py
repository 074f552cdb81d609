"""Text for language models: plain text, conversations with a mask of what is learnt, or a mixture."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import AboveZero, HeldOutShare
from isobatch.data.base import ArraySource
from isobatch.data.cleaning import CLEANING_VERSION, CleaningStep, parse_steps
from isobatch.data.corpora import DEMO
from isobatch.data.text import chat_templates, conversations, demo_stories
from isobatch.data.text.plain_text import TokenizationSettings
from isobatch.data.text.sources import SET_COLUMN, Mixture, TextSet, TextSetSpec, split_set_names
from isobatch.data.tokenized import Encoded, TokenizedData


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """The fields of text."""

    text_column: str | None = None
    """The column of csv, jsonl, json, parquet and hub data that holds plain text; by default text, unless
    the rows are conversations: instruction and output, messages, or conversations."""
    template: str = "auto"
    """How a conversation is written as text; auto is the tokenizer's own chat template, else alpaca for
    instructions and chatml for messages. alpaca, chatml, plain, a family (qwen, llama3, gemma, mistral, phi3,
    zephyr), or a file that ends in .jinja."""
    template_kwargs: tuple[str, ...] | None = None
    """Variables of the chat template, as enable_thinking=false; `chat_template_kwargs` of a row go first."""
    response_only: bool = True
    """Of conversations learn the assistant's tokens only; off learns the prompts too."""
    mix: tuple[AboveZero, ...] | None = None
    """The share of each set of --data a,b in what is learnt; by default their sizes decide."""
    clean: tuple[str, ...] | None = None
    """Steps over every text before it is tokenized: html,unicode,control,short=10,duplicates."""
    stride: int = 0
    """Held-out plain text is judged in windows of --max-length that begin every so many tokens, each on what
    none before it predicted; 0: they do not overlap."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the data; by default 8192, and 1024 for the demo."""
    data_config: str | None = None
    """The configuration of a hub data set that has several, such as wikitext-2-raw-v1."""
    valid: HeldOutShare | str | None = None
    """Where the data has no validation split: a file that is it, or the share of the rows to draw for it at
    random, the same for every seed (of a .txt file its end); by default the last 5 %."""


class Text(TokenizedData):
    """Text from folders, files, hub ids, or the demo: short stories that are made up.

    Columns: those of PlainText, of Conversations where the rows hold such, or of Mixture for several sets.
    """

    Options: ClassVar[type] = TextOptions
    cache_name: ClassVar[str] = "data.text.Text"
    demo_vocabulary_size: ClassVar[int] = 1024

    @cached_property
    def set_specs(self) -> list[TextSetSpec]:
        """The sets that --data names; called by their file's stem where those differ."""
        locations = split_set_names(self.recipe.data)
        short = [Path(location).stem for location in locations]
        names = short if len(locations) > 1 and len(set(short)) == len(short) else locations
        options = self.options
        if self.known is not None:  # a file that is to be measured
            options, locations = dataclasses.replace(options, valid=self.recipe.data), [self.recipe.data]
        return [
            TextSetSpec(location, name, self.recipe.format, options, is_only_set=len(locations) == 1)
            for location, name in zip(locations, names, strict=True)
        ]

    def check(self) -> None:
        options, data, set_specs = self.options, self.recipe.data, self.set_specs
        chat_templates.check_name(options.template)
        chat_templates.parse_values(options.template_kwargs or ())
        self._check_vocabulary_size()
        self._cleaning_steps()
        self._tokenizer_source()
        stride, length = options.stride, self.recipe.max_length
        if not 0 <= stride <= length:
            raise UserError(f"--stride {stride}: must be at least 1 and at most --max-length {length}")
        mix, sets = options.mix or (1.0,) * len(set_specs), len(set_specs)
        if len(mix) != sets:
            raise UserError(
                f"--mix {','.join(f'{share:g}' for share in mix)}: {len(mix)} shares for the {sets} of --data"
                f" {data}: give one for each, and name the sets as in --data a,b"
            )
        for spec in set_specs:
            spec.check()
        # A single set checks it itself; one of the hub is not fetched to find out.
        column, tables = options.text_column, [spec for spec in set_specs if spec.has_rows]
        if column and sets > 1 and all(s.path and column not in s.columns for s in tables):
            raise UserError(f"--text-column {column}: none of the sets of --data {data} has such a column")

    def _cleaning_steps(self) -> tuple[CleaningStep, ...]:
        return parse_steps(self.options.clean or ())

    def identity(self) -> dict[str, Any]:
        found, cleaning = super().identity(), self._cleaning_steps()
        found["options"]["template"] = chat_templates.text_of(self.options.template)
        for name in ("clean", "mix"):  # the steps have one order, and each set is prepared as a whole
            del found["options"][name]
        versions = [conversations.TOKENIZATION_VERSION, CLEANING_VERSION]
        return found | {"clean": [*map(str, cleaning)], "versions": versions}

    def _content_identity(self) -> Any:
        return [[spec.name * (len(self.set_specs) > 1), spec.content_identity()] for spec in self.set_specs]

    def encode_splits(self) -> Encoded:
        recipe, stride, steps = self.recipe, self.options.stride, self._cleaning_steps()
        if recipe.max_length < 2:
            raise UserError(f"--max-length {recipe.max_length}: a row needs at least 2 tokens")
        sets = [spec.open(steps, self._tokenizer_folder()) for spec in self.set_specs]
        found: TextSet | Mixture = sets[0] if len(sets) == 1 else Mixture(sets)
        if stride and all(isinstance(one, conversations.Conversations) for one in sets):
            raise UserError(f"--stride {stride}: is for running text; conversations are judged one by one")
        tokenizer, special = self._open_or_train_tokenizer(found.texts)
        settings = TokenizationSettings(tokenizer, special, recipe.max_length, stride, self.workshop)
        found.bind_tokenizer(settings)
        learnt = {} if self.known is None else self.known.extra
        if learnt.get("template") and isinstance(found, conversations.Conversations):
            found.template, found.eos = chat_templates.ChatTemplate(**learnt["template"]), learnt["eos"]
        columns, sizes = {}, {}
        for split in found.splits if self.known is None else ("valid",):
            columns[split], sizes[split] = found.encode(split, settings)
        extra = {
            **self._tokenizer_facts(tokenizer, special),
            "splits": sizes,
            "prompt": demo_stories.PROMPT if recipe.data == DEMO else found.prompt(),
            **found.facts(),
            "notes": found.notes,
        }
        return columns, tokenizer, extra

    def open(self, folder: Path, split: str) -> ArraySource:
        """The samples of a prepared split; those of a mixture have `parts`, the share of each set."""
        source = ArraySource.open(folder / split)
        if SET_COLUMN in source.columns:
            shares, sets = self.options.mix or (), np.asarray(source.columns[SET_COLUMN])
            sizes = np.bincount(sets, minlength=len(shares)).tolist()
            source.parts = tuple(zip(sizes, shares or map(float, sizes), strict=True))
        return source
