"""Conversations as rows of tokens, with a mask of the tokens to be learnt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import chat_formats
from isobatch.data.base import Column, NoSamplesError, Ragged
from isobatch.data.chat_formats import Message, SkippedRowError
from isobatch.data.cleaning.pipeline import CleaningPipeline
from isobatch.data.cleaning.steps import REMEMBERING
from isobatch.data.corpora import overlap_notes
from isobatch.data.preparation.encoding import EncodingJob, encode_in_shards
from isobatch.data.preparation.spooled_array import SpooledColumns
from isobatch.data.readers import LocatedRows
from isobatch.data.text import chat_templates, row_fields
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.data.text.conversation_encoder import SHOWN_PROMPTS
from isobatch.data.text.row_fields import RowCounts

if TYPE_CHECKING:
    from isobatch.data.text.plain_text import TokenizationSettings

TOKENIZATION_VERSION = 4
"""Part of the cache key: raise it when the same rows become other tokens."""


@dataclass(slots=True)
class Conversations:
    """One set of conversations.

    Columns: `tokens` (n, up to max_length); `learn`, uint8 of the same shape, 1 where a token is to be
    predicted from those before it (never a row's first); `token.weight` (n,), the number of those.
    """

    FORM: ClassVar[str] = "conversations"
    name: str
    rows: Mapping[str, Callable[[], LocatedRows]]
    """Split -> a function that reads its rows."""
    chat_format: str
    """The columns of its rows, as `chat_formats.detect_chat_format` calls them."""
    template_name: str
    """--template."""
    default_template: str
    """The template that `auto` takes where the tokenizer has none."""
    response_only: bool
    folder: Path | None
    """The tokenizer's folder; None where it is trained."""
    form: str = FORM
    """What facts call the set: `conversations`, or `labels` where the answers are labels."""
    labels: list[str] = field(default_factory=list)
    label_tokens: list[list[int]] = field(default_factory=list)
    """The token ids of each label, with the end token."""
    remarks: list[str] = field(default_factory=list)
    """What the user should know of the rows."""
    cleaning: CleaningPipeline = field(default_factory=lambda: CleaningPipeline((), "conversations"))
    total: RowCounts = field(default_factory=RowCounts)
    """Of all splits."""
    most_turns: int = 0
    """Answers of the longest training conversation."""
    known: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    """Hashes of the training rows' tokens."""
    prompts: list[list[str]] = field(default_factory=list)
    """[prompt, answer] of the first validation conversations that are not truncated."""
    template: ChatTemplate | None = None
    """Set by `bind_tokenizer`, as are `eos` and `label_tokens`."""
    eos: int | None = None

    @property
    def notes(self) -> list[str]:
        return [*self.remarks, *self.total.field_notes(), *self.cleaning.notes()]

    @property
    def splits(self) -> Sequence[str]:
        """Training first: rows of the others are compared with it."""
        return sorted(self.rows, key=lambda split: split != "train")

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on."""
        template = chat_templates.tokenizer_training_template(
            self.default_template if self.template_name == "auto" else self.template_name
        )
        cleaning = self.cleaning.transforms_only()
        for where, messages in self._messages("train", RowCounts(), cleaning):
            yield from (segment.text for segment in template.segments(messages, where))

    def bind_tokenizer(self, tokenization: TokenizationSettings) -> None:
        """Choose the template for this tokenizer; to be called before `encode`."""
        self.template = chat_templates.choose_template(
            self.template_name,
            self.default_template,
            tokenization.tokenizer,
            tokenization.special_ids,
            self.folder,
        )
        self.eos = tokenization.tokenizer.token_to_id(self.template.tokens["eos_token"])
        found = tokenization.tokenizer.encode_batch(self.labels, add_special_tokens=False)
        self.label_tokens = [[*label.ids, self.template.end_id] for label in found]

    def encode(
        self, split: str, tokenization: TokenizationSettings
    ) -> tuple[dict[str, Column], dict[str, int]]:
        """(columns, sizes) of a split. Raises UserError where no conversation is left to learn from."""
        counts, spooled = RowCounts(), SpooledColumns(tokenization.spool_folder)
        given = (json.dumps(found) for found in self._messages(split, counts, self.cleaning))
        job = self._job(tokenization)
        for shard in encode_in_shards(job, f"{self.name}, {split}", given, tokenization.workshop):
            counts.update(shard.facts["counts"])
            spooled.add(shard.arrays)
            if split == "valid":
                self.prompts = [*self.prompts, *shard.facts["prompts"]][:SHOWN_PROMPTS]
            if split == "train":
                self.most_turns = max(self.most_turns, shard.facts["turns"])
        self.total.update(counts)
        found = spooled.arrays()
        self._remark(split, counts, found.get("hashes", np.empty(0, np.uint64)), tokenization.max_length)
        if not counts["rows"]:
            raise NoSamplesError(
                f"--data {self.name}: the {split} split has no conversation to learn from"
                + "".join(f"; {note}" for note in counts.notes(split, tokenization.max_length))
            )
        offsets = np.concatenate([[0], np.cumsum(found["lengths"], dtype=np.int64)])
        columns: dict[str, Column] = {
            "tokens": Ragged(found["tokens"], offsets, tokenization.special_ids.get("pad") or 0),
            "learn": Ragged(found["learn"], offsets),
            "token.weight": found["weights"],
        }
        return columns, counts.sizes()

    def _job(self, tokenization: TokenizationSettings) -> EncodingJob:
        assert self.template is not None, "bind_tokenizer comes first"
        settings = {
            "dtype": np.dtype(tokenization.dtype).str,
            "max_length": tokenization.max_length,
            "template": self.template.to_dict(),
            "response_only": self.response_only,
            # A row ends with its label: the accuracy is measured at the end of the row.
            "ends_with_answer": self.response_only or bool(self.labels),
        }
        place = "isobatch.data.text.conversation_encoder:ConversationEncoder"
        return EncodingJob(place, settings, tokenization.tokenizer)

    def _remark(self, split: str, counts: RowCounts, hashes: np.ndarray, max_length: int) -> None:
        """Remark on rows that were left out or cut, and on held-out rows that are in train."""
        if split == "train":
            self.known = np.unique(hashes)
        same = 0 if split == "train" else int(np.isin(hashes, self.known).sum())
        self.remarks += [*counts.notes(split, max_length), *overlap_notes(split, same, counts["rows"])]
        if same and not any(step.name in REMEMBERING for step in self.cleaning.steps):
            self.remarks.append("--clean duplicates leaves such rows out of training")

    def _messages(
        self, split: str, counts: RowCounts, cleaning: CleaningPipeline
    ) -> Iterator[tuple[str, list[Message]]]:
        """Yield (where, messages) of each conversation of a split, cleaned; count those that are skipped."""
        clean = cleaning.conversation_cleaner(self._held_out() if split == "train" else ())
        for where, row in self.rows[split]():
            try:
                messages, had_leading_answer = self._parse(row, where)
                cleaned = clean(messages)
                if cleaned is not None:
                    chat_formats.require_answers(cleaned)
            except SkippedRowError as reason:
                counts.leave_out(reason)
            else:
                if cleaned is not None:
                    counts["leading_answers"] += had_leading_answer
                    main = chat_formats.main_columns(row, self.chat_format)
                    counts.add_fields(row_fields.notes_of_unread(row, main))
                    answers = [n for n, m in enumerate(cleaned) if m["role"] == "assistant"]
                    behind = {m["role"] for m in cleaned[answers[-1] + 1 :]}
                    counts.add_fields(
                        f"a message by the {role} after the last answer is not learnt" for role in behind
                    )
                    yield where, cleaned[: answers[-1] + 1]

    def _parse(self, row: Mapping[str, Any], where: str) -> tuple[list[Message], bool]:
        """The messages of a row without answers before its first question, and whether there were any."""
        row_fields.check_fields(row, where)
        if not self.response_only and row_fields.has_weights(row):
            raise UserError(f"--response-only off: {where} says by weights what is learnt: leave one out")
        messages = chat_formats.parse_messages(row, where, self.chat_format)
        row_fields.require_text_only(messages, where)
        asked = next((n for n, m in enumerate(messages) if m["role"] == "user"), len(messages))
        kept = [m for m in messages[:asked] if m["role"] != "assistant"] + messages[asked:]
        if not any(m["role"] == "assistant" for m in kept):
            raise SkippedRowError("no question before the answer")
        return kept, len(kept) < len(messages)

    def _held_out(self) -> Iterator[list[Message]]:
        """The conversations that are not trained on."""
        for split in self.splits:
            for where, row in self.rows[split]() if split != "train" else ():
                with contextlib.suppress(SkippedRowError):
                    yield self._parse(row, where)[0]

    def facts(self) -> dict[str, Any]:
        """What Facts should know of the set."""
        assert self.template is not None, "bind_tokenizer comes first"
        return {
            "form": self.form,
            "eos": self.eos,
            "template": self.template.to_dict(),
            "response_only": self.response_only,
            "prompts": self.prompts,
            "turns": self.most_turns,
            **({"labels": self.labels, "label_tokens": self.label_tokens} if self.labels else {}),
        }

    def prompt(self) -> str:
        """The first prompt of the validation split; empty where there is none."""
        return self.prompts[0][0] if self.prompts else ""
