"""The sets of text that --data names: where each is, what kind of rows it has, and opening it."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import chat_formats, corpora, readers
from isobatch.data.base import Column, Ragged
from isobatch.data.cleaning import CleaningStep
from isobatch.data.preparation.spooled_array import SpooledColumns
from isobatch.data.tables.delimited import simple_name
from isobatch.data.text import demo_stories
from isobatch.data.text.conversations import SHOWN_PROMPTS, Conversations
from isobatch.data.text.plain_text import PlainText, TokenizationSettings
from isobatch.data.tokenized import check_elsewhere, path_of

TEXT = "text"
"""Plain text, and the column of it where none is named."""
SET_COLUMN = "set"
"""The column of a mixture with the number of a sample's set."""
TextSet = PlainText | Conversations


def split_set_names(data: str) -> list[str]:
    """The sets of --data, which commas separate; a path that exists is one set, even if it has commas.

    Raises UserError where a name is empty.
    """
    # Path.exists would raise PermissionError.
    if os.path.exists(Path(data).expanduser()):  # noqa: PTH110
        return [data]
    names = [name.strip() for name in data.split(",")]
    if not all(names):
        raise UserError(f"--data {data}: one of the names between the commas is empty")
    return names


def detect_row_kind(columns: Sequence[str], options: Any, is_only_set: bool, data: str = "") -> str:
    """The kind of rows: TEXT, or the format of conversations. `data`: the set's name in errors.

    The column that the user names (`options`: TextOptions) decides first. Raises UserError for pairs of
    answers.
    """
    if options.text_column is not None and (is_only_set or options.text_column in columns):
        return TEXT
    if {"chosen", "rejected"} <= chat_formats.known_names(dict.fromkeys(columns)).keys():
        raise UserError(
            f"--data {data}: its rows are pairs of answers (chosen, rejected): --task dpo or orpo learns from"
            " them; call the columns prompt and completion to learn one of them"
        )
    return chat_formats.detect_chat_format(columns) or TEXT


@dataclass(frozen=True)
class TextSetSpec:
    """One set of --data, with the flags that say how to read it."""

    location: str
    """A path, a hub id, or `demo`."""
    name: str
    """Its name in notes and facts."""
    file_format: str | None
    options: Any
    is_only_set: bool = True
    """Whether --data names no other."""

    @cached_property
    def path(self) -> Path | None:
        return path_of(self.location)

    @cached_property
    def files(self) -> dict[str, readers.SplitFiles]:
        """The files of each split, none of the demo and of a hub data set.

        A share of a mixture's sets is held out of those without a validation split.
        """
        valid = self.options.valid
        if self.path is None:
            return {}
        if self.is_only_set:
            return corpora.find_splits(self.path, self.file_format, self.options)
        if isinstance(valid, str):
            raise UserError(f"--valid {valid}: --data names several sets: give a share such as 0.1")
        return readers.find_splits(self.path, self.file_format, self.options)

    @property
    def has_rows(self) -> bool:
        """Whether it has columns: neither the demo nor a .txt file has."""
        return not self.files["train"].is_stream if self.files else self.location != corpora.DEMO

    @cached_property
    def columns(self) -> list[str]:
        """The names of its columns, where they are known without fetching it."""
        return readers.column_names(self.files["train"]) if self.files and self.has_rows else []

    def check(self) -> None:
        """Raise UserError where the set cannot be found or read."""
        options, parts = self.options, self.files
        if not parts:
            check_elsewhere(self.location, options.valid)
            return
        readers.require_content(parts["train"])
        if self.has_rows and self._detect_kind(self.columns) == TEXT:
            column = self._text_column(self.columns)
            flag = "--text-column" if options.text_column == column else ""
            for part in parts.values():
                readers.require_column(part, column, flag, chat_formats.ACCEPTED)

    def _detect_kind(self, columns: Sequence[str]) -> str:
        return detect_row_kind(columns, self.options, self.is_only_set, self.location)

    def _text_column(self, columns: Sequence[str]) -> str:
        """The name of the column of plain text."""
        named = self.options.text_column
        usual = next((name for name in columns if simple_name(name) == TEXT), TEXT)
        return named if named is not None and (self.is_only_set or named in columns) else usual

    def content_identity(self) -> Any:
        """What its texts depend on, as JSON: hashes of the files; the name of a hub data set."""
        if self.location == corpora.DEMO:
            return ["stories", demo_stories.VERSION]
        if self.path is None:
            return [self.location, self.options.data_config]
        return readers.content_hashes(self.files)

    def open(self, steps: Sequence[CleaningStep], folder: Path | None) -> TextSet:
        """Its texts, with a validation split; `folder` is the tokenizer's, None where it is trained."""
        if self.location == corpora.DEMO:
            return PlainText(self.name, demo_stories.demo_stories(), steps)
        share = corpora.share_of(self.options.valid)
        if not self.has_rows:
            return PlainText(self.name, corpora.corpus_from_files(self.files, share), steps)
        table = corpora.open_rows(self.location, self.files, self.options.data_config, share)
        kind = self._detect_kind(table.columns)
        if kind == TEXT:
            column = self._text_column(table.columns)
            columns = dict.fromkeys(table.columns)
            chat_formats.require_field(columns, column, f"--text-column: {self.location}")
            return PlainText(self.name, dataclasses.replace(table, column=column), steps)
        said = f"the rows are read as conversations ({kind}): --text-column {TEXT} reads plain text"
        remarks = [*table.notes, *([said] if TEXT in table.columns else [])]
        return Conversations(self.name, table.splits, kind, self.options, folder, steps, remarks)


class Mixture:
    """Several sets of text.

    Columns: `tokens`, `learn` and `token.weight` as of Conversations (of plain text all tokens of a block but
    the first are learnt), and `set` (n,) int64, the number of a sample's set.
    """

    def __init__(self, sets: Sequence[TextSet]) -> None:
        self.sets = sets
        self.chats = [s for s in sets if isinstance(s, Conversations)]
        """The sets that have answers."""
        self.splits = [split for split in readers.SPLIT_NAMES if any(split in s.splits for s in sets)]
        self.samples: list[dict[str, int]] = [{} for _ in sets]
        self.sizes: list[dict[str, dict[str, int]]] = [{} for _ in sets]

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on: of each set as many characters, until it ends."""
        return interleave_by_characters([s.texts() for s in self.sets])

    def bind_tokenizer(self, settings: TokenizationSettings) -> None:
        """Let every set choose its template for this tokenizer."""
        for one in self.sets:
            one.bind_tokenizer(settings)

    def encode(self, split: str, settings: TokenizationSettings) -> tuple[dict[str, Column], dict[str, int]]:
        """(columns, sizes) of a split; the sizes are summed over the sets."""
        spooled = SpooledColumns(settings.workshop.folder)
        total: Counter[str] = Counter()
        for number, one in enumerate(self.sets):
            if split in one.splits:
                columns, sizes = one.encode(split, settings)
                rows, learn = columns["tokens"], columns.get("learn")
                assert isinstance(rows, Ragged)
                arrays = {"tokens": rows.values, "lengths": rows.lengths}
                arrays["learn"] = learn.values if isinstance(learn, Ragged) else _all_but_first(rows)
                arrays["weights"] = np.asarray(columns["token.weight"])
                spooled.add({**arrays, SET_COLUMN: np.full(len(rows), number, np.int64)})
                self.samples[number][split], self.sizes[number][split] = len(rows), sizes
                total.update(sizes)
        found = spooled.arrays()
        pad = settings.special_ids.get("pad") or 0
        return {
            "tokens": Ragged.of_lengths(found["tokens"], found["lengths"], pad),
            "learn": Ragged.of_lengths(found["learn"], found["lengths"]),
            "token.weight": found["weights"],
            SET_COLUMN: found[SET_COLUMN],
        }, dict(total)

    def facts(self) -> dict[str, Any]:
        """What Facts should know: the template that all share, prompts of all sets, and each set's own."""
        shared = ("eos", "template", "response_only")
        common = {name: self.chats[0].facts()[name] for name in shared} if self.chats else {}
        groups = itertools.zip_longest(*(s.prompts for s in self.chats))
        prompts = [prompt for group in groups for prompt in group if prompt is not None][:SHOWN_PROMPTS]
        sets = []
        for one, samples, sizes in zip(self.sets, self.samples, self.sizes, strict=True):
            own = {key: value for key, value in one.facts().items() if key in ("template", "prompts")}
            sets.append({"name": one.name, "form": one.form, "samples": samples, "splits": sizes, **own})
        return {"form": "mixture", **common, "prompts": prompts, "sets": sets}

    @property
    def notes(self) -> list[str]:
        """What the user should know, one line each, with the set's name."""
        return [f"{s.name}: {note}" for s in self.sets for note in s.notes]

    def prompt(self) -> str:
        """A prompt to try the model with: of a conversation if there is any, else words of plain text."""
        return next((found for s in (*self.chats, *self.sets) if (found := s.prompt())), "")


def _all_but_first(rows: Ragged) -> np.ndarray:
    """(all tokens,) uint8: 1 but for the first token of a row."""
    mask = np.ones(len(rows.values), np.uint8)
    mask[rows.offsets[:-1]] = 0
    return mask


def interleave_by_characters(streams: Iterable[Iterator[str]]) -> Iterator[str]:
    """The texts of all streams, each time from the one that has given the fewest characters so far."""
    waiting = [(0, number, stream) for number, stream in enumerate(streams)]
    while waiting:
        given, number, stream = heapq.heappop(waiting)
        if (text := next(stream, None)) is not None:
            heapq.heappush(waiting, (given + max(1, len(text)), number, stream))
            yield text
