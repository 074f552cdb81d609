"""The sets of text that --data names: where each lies, and what kind of rows it has."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isobatch.core.errors import UserError
from isobatch.data import chat_formats, corpora, hub, labelled, readers, tokenizers
from isobatch.data.chat_formats import Message
from isobatch.data.cleaning.pipeline import CleaningPipeline
from isobatch.data.cleaning.steps import CleaningStep
from isobatch.data.corpora import DEMO, RowCorpus
from isobatch.data.text.conversations import Conversations
from isobatch.data.text.plain_text import PlainText
from isobatch.data.tokenized import path_of

TEXT = "text"
"""Plain text, and the column of it where none is named."""
LABELS = "labels"
TextSet = PlainText | Conversations


def names_of(data: str) -> list[str]:
    """The sets of --data, separated by commas; a path that has commas itself is one."""
    if os.path.exists(Path(data).expanduser()):
        return [data]
    names = [name.strip() for name in data.split(",")]
    if not all(names):
        raise UserError(f"--data {data}: one of the names between the commas is empty")
    return names


def kind_of(columns: Sequence[str], text_column: str | None, alone: bool) -> str:
    """TEXT, LABELS, or the column that marks conversations.

    A text column that was named comes first. A set of its own is not taken for labelled texts: its label may
    be anything.
    """
    if text_column is not None and (alone or text_column in columns):
        return TEXT
    if form := chat_formats.detect_chat_format(columns):
        return form
    usual = [
        any(name in columns for name in names) for names in (labelled.TEXT_COLUMNS, labelled.LABEL_COLUMNS)
    ]
    return LABELS if all(usual) and not alone else TEXT


@dataclass(frozen=True, slots=True)
class Given:
    """One set, with the flags that say how to read it."""

    place: str
    """A path, a hub id, or the demo."""
    name: str
    """What notes and facts call it."""
    form: str | None
    options: Any
    alone: bool = True
    """Whether it is the only one."""

    @property
    def path(self) -> Path | None:
        return path_of(self.place)

    @property
    def is_demo(self) -> bool:
        return self.place == DEMO

    def check(self) -> None:
        """Raise UserError where it cannot be had or read."""
        if self.is_demo:
            corpora.demo_files()
        elif self.path is None:
            hub.require_dataset(self.place)
        else:
            self._check_files(self.path)

    def _check_files(self, path: Path) -> None:
        parts = readers.find_splits(path, self.form)
        if not any(file.stat().st_size for file in parts["train"].files):
            raise UserError(f"--data {path}: {parts['train'].files[0]} is empty")
        if self.kind() == TEXT:
            for part in parts.values():
                if not part.is_stream:
                    readers.require_column(part, self._column(readers.column_names(parts["train"])))

    def kind(self) -> str | None:
        """The kind of its rows; None where only fetching it would tell."""
        if self.is_demo:
            return TEXT
        if self.path is None:
            return None
        part = readers.find_splits(self.path, self.form)["train"]
        return TEXT if part.is_stream else self._kind_of(readers.column_names(part))

    def _kind_of(self, columns: Sequence[str]) -> str:
        return kind_of(columns, self.options.text_column, self.alone)

    def _column(self, columns: Sequence[str]) -> str:
        """The column of plain text."""
        named = self.options.text_column
        return named if named is not None and (self.alone or named in columns) else TEXT

    @property
    def has_rows(self) -> bool:
        """Whether it has columns: not the demo, nor a stream of text."""
        if self.path is None:
            return not self.is_demo
        return not readers.find_splits(self.path, self.form)["train"].is_stream

    def has_column(self, column: str) -> bool:
        """Whether its rows have such a column; a hub data set, which is not at hand, may."""
        return self.path is None or column in readers.column_names(
            readers.find_splits(self.path, self.form)["train"]
        )

    def content(self) -> Any:
        """Hashes of the files; a hub data set, whose files are not at hand, goes by its name."""
        if self.is_demo:
            return [platform.python_version(), *(tokenizers.file_hash(f) for f in corpora.demo_files())]
        if self.path is None:
            return [self.place, self.options.data_config]
        return readers.content_hashes(readers.find_splits(self.path, self.form))

    def open(self, steps: Sequence[CleaningStep], folder: Path | None) -> TextSet:
        """Its texts, with a validation split; `folder` is where the tokenizer lies."""
        if self.is_demo:
            return PlainText(self.name, corpora.demo_corpus(), steps)
        kind = self.kind()
        if self.path is not None and kind == TEXT:
            parts = readers.find_splits(self.path, self.form)
            column = self._column([] if parts["train"].is_stream else readers.column_names(parts["train"]))
            return PlainText(self.name, corpora.corpus_from_files(parts, column), steps)
        table = self._table()
        kind = kind or self._kind_of(table.columns)
        if kind == TEXT:
            config, column = self.options.data_config, self._column(table.columns)
            return PlainText(self.name, corpora.corpus_from_hub(self.place, config, column), steps)
        return self._labelled(table, steps) if kind == LABELS else self._chats(table, kind, steps, folder)

    def _table(self) -> RowCorpus:
        if self.path is None:
            return corpora.rows_from_hub(self.place, self.options.data_config)
        return corpora.rows_from_files(readers.find_splits(self.path, self.form))

    def _chats(
        self, table: RowCorpus, kind: str, steps: Sequence[CleaningStep], folder: Path | None
    ) -> Conversations:
        remarks = [*table.notes]
        if TEXT in table.columns:
            remarks.append(
                f"the rows are read as conversations ({kind}): --text-column {TEXT} reads plain text"
            )
        return Conversations(
            name=self.name,
            rows=table.splits,
            read=partial(chat_formats.parse_messages, chat_format=kind),
            wanted=self.options.template,
            by_default="alpaca" if kind == "instruction" else "chatml",
            response_only=self.options.response_only,
            folder=folder,
            remarks=remarks,
            cleaning=CleaningPipeline(steps, "conversations"),
        )

    def _labelled(self, table: RowCorpus, steps: Sequence[CleaningStep]) -> Conversations:
        """Texts whose answer is their label, as it is written."""
        names = labelled.find_columns(self.place, table.columns)
        splits, remarks = labelled.rows_per_split(self.place, self.path, self.form, self.options.data_config)
        examples = {split: list(labelled.read_examples(rows(), names)) for split, rows in splits.items()}
        remarks += labelled.drop_unlabelled_test(examples)
        plain = f"--text-column {names.text} reads plain text"
        try:
            labels = labelled.class_names(examples, names, self.place)
        except UserError as error:
            raise UserError(f"{error}; {plain}") from None
        return Conversations(
            name=self.name,
            form=LABELS,
            rows={split: partial(_rows, found) for split, found in examples.items()},
            read=_question,
            wanted="plain",
            by_default="plain",
            response_only=self.options.response_only,
            folder=None,
            labels=labels,
            remarks=[f"the rows are texts with a label ({names.label}): {plain}", *remarks],
            cleaning=CleaningPipeline(steps, "conversations"),
        )


def _rows(examples: list[labelled.Example]) -> Any:
    return (
        (e.where, {"text": "\n".join(filter(None, (e.text, e.pair))), "label": e.label}) for e in examples
    )


def _question(row: Mapping[str, Any], where: str) -> list[Message]:
    return [{"role": "user", "content": row["text"]}, {"role": "assistant", "content": row["label"]}]
