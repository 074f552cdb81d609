"""Preference data: pairs of answers to a prompt, from folders, files, hub ids, or the demo."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import HeldOutShare
from isobatch.data import corpora, readers
from isobatch.data.base import ArraySource, Ragged
from isobatch.data.chat_formats import SkippedRowError, known_rows, template_values
from isobatch.data.preferences import pairs
from isobatch.data.preferences.encoder import AnswerEncoder, Rendered, Tokens, render
from isobatch.data.text import chat_templates
from isobatch.data.text.chat_templates import VERBATIM, ChatTemplate
from isobatch.data.text.plain_text import TokenizationSettings
from isobatch.data.text.row_fields import RowCounts, notes_of_unread
from isobatch.data.tokenized import Encoded, TokenizedData

ANSWERS = (pairs.CHOSEN, pairs.REJECTED)
DEMO_LINES = 4
"""Lines of an answer of the demo."""
_HEADER = re.compile(r"^ *def .*:$")


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferencesOptions:
    """The fields of preference data."""

    template: str = "auto"
    """How prompt and answer are written as text; auto is the tokenizer's own chat template, else alpaca for
    instructions, verbatim where prompt and answers are texts, and chatml. Texts that hold their prompt are
    verbatim unless another is named. alpaca, chatml, plain, verbatim, a family (qwen, llama3, gemma, mistral,
    phi3, zephyr), or a file that ends in .jinja."""
    template_kwargs: tuple[str, ...] | None = None
    """Variables of the chat template, as enable_thinking=false; `chat_template_kwargs` of a row go first."""
    vocab_size: int | None = None
    """Size of a tokenizer trained on the data; by default 8192, and 1024 for the demo."""
    data_config: str | None = None
    """The configuration of a hub data set that has several."""
    valid: HeldOutShare | str | None = None
    """Where the data has no validation split: a file that is it, or the share of the rows to draw for it at
    random, the same for every seed; by default the last 5 %."""


class PairSource(ArraySource):
    """Pairs of rows of tokens. A pair is as long as `rows_at_once` rows of its longer one."""

    names: ClassVar[tuple[str, str]] = ANSWERS
    rows_at_once: ClassVar[int] = 2

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self.rows_at_once * self._row_lengths(indices).max(1)

    def _row_lengths(self, indices: np.ndarray) -> np.ndarray:
        """(n, 2) lengths of both rows of these pairs."""
        columns = [self.columns[name] for name in self.names]
        return np.stack([c.lengths_of(indices) for c in columns if isinstance(c, Ragged)], axis=1)

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        """tokens (B, 2, T), learn of the same shape, and row_length (B, 2), chosen first; and the weights.

        T is at least `pad_to` / rows_at_once.
        """
        width = max(pad_to, int(self.lengths(indices).max(initial=2)))
        found = super().fetch(indices, -(-width // self.rows_at_once))
        tokens = np.stack([found.pop(name) for name in self.names], axis=1)
        learn = np.stack([found.pop(f"{name}.learn") for name in self.names], axis=1)
        return {**found, "tokens": tokens, "learn": learn, "row_length": self._row_lengths(indices)}


class Preferences(TokenizedData):
    """Rows with `prompt`, `chosen` and `rejected`. The demo is made of Python's own standard library.

    Columns: `chosen` and `rejected` (n, up to max_length), a prompt and an answer; `chosen.learn` and
    `rejected.learn`, uint8 of the same shapes, 1 where a token is an answer's; `token.weight` (n,), the
    tokens of the chosen answer.
    """

    Options: ClassVar[type] = PreferencesOptions
    version: ClassVar[int] = 7
    demo_vocabulary_size: ClassVar[int] = 1024
    wanted: ClassVar[tuple[str, str]] = ("pair", "prompt, chosen and rejected")
    """What a sample is, and the columns of rows."""
    source: ClassVar[type[PairSource]] = PairSource
    require_columns = staticmethod(pairs.require_columns)

    def check(self) -> None:
        chat_templates.check_name(self.options.template, (VERBATIM,))
        chat_templates.parse_values(self.options.template_kwargs or ())
        self._check_vocabulary_size()
        files = self._check_tables(
            f"{self.wanted[0]}s: give jsonl, json, csv, tsv or parquet with the columns {self.wanted[1]}"
        )
        for part in files.values():
            self.require_columns(readers.column_names(part), str(part.files[0]))

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        found["options"]["template"] = chat_templates.text_of(self.options.template)
        return found

    def open(self, folder: Path, split: str) -> ArraySource:
        return self.source.open(folder / split)

    def encode_splits(self) -> Encoded:
        rows = self._open_rows()
        first = next((row for _, row in known_rows(rows.splits["train"]())), None)
        if first is None:
            raise UserError(f"--data {self.recipe.data}: the train split is empty")
        name, default = self.options.template, pairs.default_template(first)
        if name == "auto" and pairs.holds_whole_texts(first):
            name = VERBATIM

        def texts() -> Iterator[str]:
            plain = chat_templates.tokenizer_training_template(name, default)
            found = self.texts(rows, "train", plain, RowCounts())
            return (segment.text for text in found for segment in sum(text.answers, text.prompt))

        tokenizer, special = self._open_or_train_tokenizer(texts)
        values = chat_templates.parse_values(self.options.template_kwargs or ())
        folder = self._tokenizer_folder()
        template = chat_templates.choose_template(name, default, tokenizer, special, folder, values)
        template = template if self.known is None else ChatTemplate(**self.known.extra["template"])
        settings = TokenizationSettings(tokenizer, special, self.recipe.max_length)
        encoder = AnswerEncoder(self, template, settings)
        order = ["valid"] if self.known else sorted(rows.splits, key=lambda split: split != "train")
        columns = {split: encoder.encode(split, rows) for split in order}
        extra = {
            **self._tokenizer_facts(tokenizer, special),
            "template": dataclasses.asdict(template),
            "prompts": encoder.shown,
            "notes": [*rows.notes, *encoder.notes, *encoder.total.field_notes()],
        }
        return columns, tokenizer, extra

    def _open_rows(self) -> corpora.Corpus:
        if self.recipe.data == corpora.DEMO:
            return corpora.demo_corpus(_pairs_of_files, step=2)
        share = corpora.share_of(self.options.valid)
        rows = corpora.open_rows(self.recipe.data, self._files(), self.options.data_config, share)
        self.require_columns(rows.columns, f"--data {self.recipe.data}")
        return rows

    def texts(
        self, rows: corpora.Corpus, split: str, template: ChatTemplate, counts: RowCounts
    ) -> Iterator[Rendered]:
        """Yield what each row of a split holds as text; count the rows that are skipped."""
        for where, row in known_rows(rows.splits[split]()):
            try:
                found, notes = self.read_row(row, where)
            except SkippedRowError as reason:
                counts.leave_out(reason)
                continue
            counts.add_fields(notes)
            values = template_values(row, where)
            for one in found:
                text, remarks = render(one, template, where, values), dict[str, None]()
                for answer, written in zip(one.answers, text.answers, strict=True):
                    said = template.texts(one.prompt + answer, where, values)
                    remarks |= dict.fromkeys(said.notes(text.prompt + written))
                counts.add_fields(remarks)
                yield text

    def read_row(self, row: Mapping[str, Any], where: str) -> pairs.ReadRow:
        """`where` names the row in errors.

        Raises UserError for a row of another shape, SkippedRowError for one with nothing to learn.
        """
        found, has_fields = pairs.parse_pair(row, where), not pairs.holds_whole_texts(row)
        return [found], notes_of_unread(row, pairs.main_columns(row), has_fields)

    def completed(self, found: Iterator[Tokens], split: str) -> Iterable[Tokens]:  # noqa: ARG002
        """The samples of a split, with what each has from others."""
        return found


def _pairs_of_files(files: list[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The demo: a function's head as prompt, its next lines as chosen, the same turned round as rejected."""
    for file in files:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        for number, line in enumerate(lines):
            body = lines[number + 1 : number + 1 + DEMO_LINES]
            if _HEADER.match(line) and len(body) == DEMO_LINES:
                chosen, rejected = ("".join(f"\n{one}" for one in way) for way in (body, body[::-1]))
                where = f"{file.name} line {number + 1}"
                yield where, {"prompt": line, "chosen": chosen, "rejected": rejected}
