"""Prompts with answers as text by a chat template, and as rows of tokens that fit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data.base import Column, Ragged
from isobatch.data.corpora import Corpus, TrainingRows
from isobatch.data.preferences.pairs import LABEL, AnsweredPrompt
from isobatch.data.preparation.encoding import text_hash
from isobatch.data.text import conversations
from isobatch.data.text.chat_templates import ChatSegment, ChatTemplate
from isobatch.data.text.conversations import TokenRow
from isobatch.data.text.plain_text import TokenizationSettings
from isobatch.data.text.row_fields import RowCounts

if TYPE_CHECKING:
    from isobatch.data.chat_formats import Message
    from isobatch.data.preferences.dataset import Preferences  # noqa: TC004  no class here has flags

Rendered = AnsweredPrompt[ChatSegment]


class Tokens(NamedTuple):
    """A prompt and answers as tokens, not yet cut."""

    text: Rendered
    prompt: np.ndarray
    groups: list[list[TokenRow]]
    """Answers that are cut together; first the sample's own, which are learnt."""

    def fit(self, settings: TokenizationSettings) -> list[tuple[list[TokenRow], set[str]]]:
        """What `fit_answers` makes of each group."""

        def find_questions() -> np.ndarray:
            """Tokens of messages, earlier answers' too."""
            prompt = [
                s._replace(messages=((0, len(s.text)),)) if s.is_answer else s for s in self.text.prompt
            ]
            return conversations.question_mask(prompt, settings.tokenizer)

        return [fit_answers(self.prompt, g, find_questions, settings.max_length) for g in self.groups]


def render(
    messages: AnsweredPrompt[Message], template: ChatTemplate, where: str, values: Mapping[str, Any]
) -> Rendered:
    """Written by a template with these variables; answers end with their last one.

    Raises UserError where the template cannot tell answers from prompts.
    """
    turns = sum(message["role"] == "assistant" for message in messages.prompt)
    parts = []
    for answer in messages.answers:
        segments = template.texts(messages.prompt + answer, where, values).segments()
        stop = next(n for n, segment in enumerate(segments) if segment.turn >= turns)
        end = max(n for n, segment in enumerate(segments) if segment.is_answer)
        parts.append((segments[:stop], segments[stop : end + 1]))
    prompt = [part._replace(is_context=part.is_answer) for part in parts[0][0]]  # its answers are not learnt
    return AnsweredPrompt(prompt, [answer for _, answer in parts], messages.is_good)


def tokenize(texts: Iterator[Rendered], end_id: int, settings: TokenizationSettings) -> Iterator[Tokens]:
    """Yield each text with its tokens. Segments are tokenized separately."""
    while batch := list(itertools.islice(texts, conversations.BATCH_CONVERSATIONS)):
        parts = [part for text in batch for part in (text.prompt, *text.answers)]
        rows = conversations.token_rows(parts, settings.tokenizer, end_id, settings.dtype)
        for text in batch:
            prompt, *answers = itertools.islice(rows, 1 + len(text.answers))
            yield Tokens(text, prompt.tokens, [answers])


def fit_answers(
    prompt: np.ndarray, answers: Sequence[TokenRow], find_questions: Callable[[], np.ndarray], max_length: int
) -> tuple[list[TokenRow], set[str]]:
    """(a row of at most `max_length` tokens for each answer, all with the same prompt; the names of CUTS that
    this took).

    The prompt loses its beginning until the longest answer fits, its messages before its template; an answer
    that alone fills the row loses its end, and the prompt keeps at most half of the row. Any other is whole
    where it fits.
    """
    half = max_length - min(len(prompt), max_length // 2)
    lengths = [len(answer.tokens) for answer in answers]
    room = max_length - max(half if length >= max_length else length for length in lengths)
    kept = np.arange(len(prompt))
    if len(prompt) > room:
        shorter = conversations.cut_question(kept, find_questions(), room)
        kept = kept[len(prompt) - room :] if shorter is None else shorter
    left = max_length - len(kept)
    before, unlearnt = prompt[kept], np.zeros(len(kept), np.uint8)
    rows = [
        TokenRow(np.append(before, one.tokens[:left]), np.append(unlearnt, one.answer_mask[:left]))
        for one in answers
    ]
    cuts = {"prompts_cut": len(kept) < len(prompt), "answers_cut": max(lengths) > left}
    return rows, {name for name, was_cut in cuts.items() if was_cut}


@dataclass
class AnswerEncoder:
    """Encodes the splits of one data set, training first: the others are compared with it."""

    data: Preferences
    template: ChatTemplate
    settings: TokenizationSettings
    notes: list[str] = field(default_factory=list)
    """What the user should know, one line each."""
    shown: list[list[str]] = field(default_factory=list)
    """[prompt, good answer] of the first validation samples, to be answered by the trained model."""
    total: RowCounts = field(default_factory=RowCounts)
    known: TrainingRows = field(default_factory=TrainingRows)

    def encode(self, split: str, rows: Corpus) -> dict[str, Column]:
        """The columns of a split. Raises UserError where no row is left to learn from."""
        counts, hashes = RowCounts(), list[int]()
        kept, labels = list[list[TokenRow]](), list[bool]()
        texts = self.data.texts(rows, split, self.template, counts)
        for one in self.data.completed(tokenize(texts, self.template.end_id, self.settings), split):
            text, ((own, cuts), *more) = one.text, one.fit(self.settings)
            learnt = [row.tokens.tobytes() for row in own]
            if len({*learnt}) < len(learnt):
                counts.leave_out("answers that begin alike and are cut")
                continue
            kept.append([*own, *(row for others, _ in more for row in others)])
            labels += [] if text.is_good is None else [text.is_good]
            hashes.append(text_hash(b"".join(learnt)))
            counts.update(cuts, rows=1)
            is_shown = split == "valid" and not cuts and text.is_good is not False
            if is_shown and len(self.shown) < conversations.SHOWN_PROMPTS:
                asked = "".join(segment.text for segment in text.prompt)
                self.shown.append([asked, text.answers[0][0].text.strip()])
        self.total.update(counts)
        notes = [*counts.notes(split, self.settings.max_length)]
        self.notes += [*notes, *self.known.compare(split, np.array(hashes, np.uint64))]
        if not hashes:
            none, reasons = self.data.wanted[0], "".join(f"; {note}" for note in notes)
            said = f"the {split} split has no {none} to learn from{reasons}"
            raise UserError(f"--data {self.data.recipe.data}: {said}")
        columns = self._columns(kept)
        if labels:
            good = labels.count(True)
            self.notes.append(f"{split}: {good:,} good answers, {len(labels) - good:,} bad ones")
            columns[LABEL] = np.array(labels, np.uint8)
        return columns

    def _columns(self, kept: list[list[TokenRow]]) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        masks = [[conversations.learn_mask(row, True) for row in rows] for rows in kept]
        for number, name in enumerate(self.data.source.names):
            pad = self.settings.special_ids.get("pad") or 0
            columns[name] = Ragged.from_rows([rows[number].tokens for rows in kept], pad)
            columns[f"{name}.learn"] = Ragged.from_rows([mask[number] for mask in masks])
        columns["token.weight"] = np.array([mask.sum() for mask, *_ in masks], np.int32)
        columns["text.weight"] = np.array([len(mask) - 1 for mask, *_ in masks], np.int32)
        return columns
