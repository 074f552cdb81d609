"""The sets of text that --data names: where each is, what kind of rows it has, and opening it."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.data import chat_formats, corpora, held_out, readers
from isobatch.data.cleaning.pipeline import CleaningPipeline
from isobatch.data.corpora import DEMO, Corpus, RowCorpus
from isobatch.data.labelled.classes import SplitClasses, class_names, drop_unlabelled_test
from isobatch.data.labelled.rows import (
    LABEL_COLUMNS,
    TEXT_COLUMNS,
    ColumnNames,
    find_columns,
    read_examples,
)
from isobatch.data.text import demo_stories
from isobatch.data.text.conversations import Conversations
from isobatch.data.text.plain_text import PlainText
from isobatch.data.tokenized import check_elsewhere, path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from isobatch.data.cleaning.steps import CleaningStep
    from isobatch.data.readers import LocatedRows, SplitFiles

TEXT = "text"
"""Plain text, and the column of it where none is named."""
LABELS = "labels"
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
    """The kind of rows: TEXT, LABELS, or the format of conversations. `data`: the set's name in errors.

    Columns that the user names (`options`: TextOptions) decide first. The only set of --data is never taken
    for labelled texts, because its column `label` may be anything. Raises UserError for pairs of answers.
    """
    text_column, pair = options.text_column, (options.question_column, options.answer_column)
    if text_column is not None and (is_only_set or text_column in columns):
        return TEXT
    if pair[0] is not None and (is_only_set or {*pair} <= {*columns}):
        return chat_formats.pair_format(*pair)
    if {"chosen", "rejected"} <= {*columns}:
        raise UserError(
            f"--data {data}: its rows are pairs of answers (chosen, rejected): --task dpo or orpo learns from"
            " them; --question-column and --answer-column read two columns"
        )
    if chat_format := chat_formats.detect_chat_format(columns):
        return chat_format
    usual = [any(name in columns for name in names) for names in (TEXT_COLUMNS, LABEL_COLUMNS)]
    return LABELS if all(usual) and not is_only_set else TEXT


@dataclass(frozen=True, slots=True)
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

    @property
    def path(self) -> Path | None:
        return path_of(self.location)

    @property
    def is_demo(self) -> bool:
        return self.location == DEMO

    def check(self) -> None:
        """Raise UserError where the set cannot be found or read."""
        if self.path is None:
            check_elsewhere(self.location, self.options.valid)
        else:
            self._check_files(self.path)

    def _files(self, path: Path) -> dict[str, SplitFiles]:
        """The files of each split. A share of a mixture's sets is held out of those without such a split."""
        valid = self.options.valid
        if self.is_only_set:
            return held_out.find_splits(path, self.file_format, valid, self.options)
        if isinstance(valid, str):
            raise UserError(f"--valid {valid}: --data names several sets: give a share such as 0.1")
        return readers.find_splits(path, self.file_format, self.options)

    def _check_files(self, path: Path) -> None:
        parts = self._files(path)
        if not any(file.stat().st_size for file in parts["train"].files):
            raise UserError(f"--data {path}: {parts['train'].files[0]} is empty")
        if self.options.question_column is not None and self.is_only_set:
            self._require_pair(parts)
        elif self.kind() == TEXT:
            for part in parts.values():
                if not part.is_stream:
                    column = self._text_column(readers.column_names(parts["train"]))
                    flag = "--text-column" if self.options.text_column == column else ""
                    readers.require_column(part, column, flag, chat_formats.ACCEPTED)

    def _require_pair(self, parts: Mapping[str, SplitFiles]) -> None:
        """Raise UserError unless all files have the columns of questions and answers."""
        for part in parts.values():
            if part.is_stream:
                raise UserError(f"--question-column: {part.files[0]} is running text, without columns")
            readers.require_column(part, self.options.question_column, "--question-column")
            readers.require_column(part, self.options.answer_column, "--answer-column")

    def kind(self) -> str | None:
        """The kind of its rows; None for a hub data set, which must be fetched first."""
        if self.is_demo:
            return TEXT
        if self.path is None:
            return None
        part = readers.find_splits(self.path, self.file_format, self.options)["train"]
        return TEXT if part.is_stream else self._detect_kind(readers.column_names(part))

    def _detect_kind(self, columns: Sequence[str]) -> str:
        return detect_row_kind(columns, self.options, self.is_only_set, self.location)

    def _text_column(self, columns: Sequence[str]) -> str:
        """The name of the column of plain text."""
        named = self.options.text_column
        return named if named is not None and (self.is_only_set or named in columns) else TEXT

    @property
    def has_rows(self) -> bool:
        """Whether it has columns: neither the demo nor a .txt file has."""
        if self.path is None:
            return not self.is_demo
        return not readers.find_splits(self.path, self.file_format, self.options)["train"].is_stream

    def has_column(self, column: str) -> bool:
        """Whether its rows have this column; True for a hub data set, which is not fetched to find out."""
        return self.path is None or column in readers.column_names(
            readers.find_splits(self.path, self.file_format, self.options)["train"]
        )

    def content_identity(self) -> Any:
        """What its texts depend on, as JSON: hashes of the files; the name of a hub data set."""
        if self.is_demo:
            return ["stories", demo_stories.VERSION]
        if self.path is None:
            return [self.location, self.options.data_config]
        return readers.content_hashes(self._files(self.path))

    def open(self, steps: Sequence[CleaningStep], folder: Path | None) -> TextSet:
        """Its texts, with a validation split; `folder` is the tokenizer's, None where it is trained."""
        if self.is_demo:
            return PlainText(self.name, demo_stories.demo_stories(), steps)
        if self.path is not None and not self.has_rows:
            return PlainText(self.name, corpora.corpus_from_files(self._files(self.path), self._share), steps)
        table = self._open_rows()
        kind = self._detect_kind(table.columns)
        if kind == TEXT:
            column = self._text_column(table.columns)
            chat_formats.require_field(
                dict.fromkeys(table.columns), column, f"--text-column: {self.location}"
            )
            return PlainText(self.name, Corpus(table.splits, notes=table.notes, column=column), steps)
        return (
            self._open_labelled(table, steps)
            if kind == LABELS
            else self._open_conversations(table, kind, steps, folder)
        )

    def _open_rows(self) -> RowCorpus:
        if self.path is None:
            return corpora.rows_from_hub(self.location, self.options.data_config, self._share)
        return corpora.rows_from_files(self._files(self.path), self._share)

    @property
    def _share(self) -> float | None:
        return held_out.share_of(self.options.valid)

    def _open_conversations(
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
            chat_format=kind,
            template_name=self.options.template,
            default_template="alpaca" if kind == "instruction" else "chatml",
            response_only=self.options.response_only,
            folder=folder,
            remarks=remarks,
            cleaning=CleaningPipeline(steps, "conversations"),
        )

    def _open_labelled(self, table: RowCorpus, steps: Sequence[CleaningStep]) -> Conversations:
        """Labelled texts as conversations: the text asks, and the label as written is the answer."""
        names, splits, remarks = (
            find_columns(self.location, table.columns),
            dict(table.splits),
            [*table.notes],
        )
        if table.is_held_out and self._share is None:
            every = partial(_chained, splits["train"], splits["valid"])
            splits["train"], splits["valid"] = (partial(_twentieth, every, is_it) for is_it in (False, True))
            remarks[0] = "there is no validation split: every twentieth row of the training data is it"
        classes = {split: SplitClasses.read(read_examples(rows(), names)) for split, rows in splits.items()}
        remarks += drop_unlabelled_test(classes)
        plain = f"--text-column {names.text} reads plain text"
        try:
            labels = class_names(classes, names, self.location)
        except UserError as error:
            raise UserError(f"{error}; {plain}") from None
        return Conversations(
            name=self.name,
            form=LABELS,
            rows={split: partial(_labelled_rows, splits[split], names) for split in classes},
            chat_format="prompt",
            template_name="plain",
            default_template="plain",
            response_only=self.options.response_only,
            folder=None,
            labels=labels,
            remarks=[f"the rows are texts with a label ({names.label}): {plain}", *remarks],
            cleaning=CleaningPipeline(steps, "conversations"),
        )


def _chained(*parts: Callable[[], LocatedRows]) -> LocatedRows:
    return itertools.chain.from_iterable(rows() for rows in parts)


def _twentieth(rows: Callable[[], LocatedRows], wanted: bool) -> LocatedRows:
    """Each twentieth row, or all others where those are not wanted."""
    one_in = readers.VALIDATION_ONE_IN
    return (row for number, row in enumerate(rows(), 1) if (number % one_in == 0) == wanted)


def _labelled_rows(rows: Callable[[], LocatedRows], names: ColumnNames) -> LocatedRows:
    return (
        (e.where, {"prompt": "\n".join(filter(None, (e.text, e.pair))), "completion": e.label})
        for e in read_examples(rows(), names)
    )
