"""Conversations as rows of tokens, with a mask of those to be learnt."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from isobatch.core.errors import UserError
from isobatch.data import chat_formats
from isobatch.data.base import Column, Ragged
from isobatch.data.chat_formats import Message, SkippedRowError
from isobatch.data.cleaning.pipeline import CleaningPipeline
from isobatch.data.readers import LocatedRows
from isobatch.data.text import chat_templates
from isobatch.data.text.chat_templates import Piece, Template
from isobatch.data.text.plain_text import Encoder, Spool
from isobatch.data.text.truncation import Cut, Row, fit, learnt_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RULES = 2
"""Raise it when the same rows become other tokens: old caches are then left alone."""
SHOWN_PROMPTS = 3
BATCH = 512
"""Conversations tokenized together."""
Read = Callable[[Mapping[str, Any], str], list[Message]]


@dataclass(slots=True)
class Tally:
    """What a split's conversations came to."""

    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    greetings: int = 0
    """Conversations that began with an answer to nothing."""
    heads: int = 0
    answers: int = 0
    tokens: int = 0
    response_tokens: int = 0
    learnt: int = 0
    predicted: int = 0
    words: int = 0
    bytes: int = 0

    def sizes(self) -> dict[str, int]:
        return {
            "tokens": self.learnt,
            "predicted": self.predicted,
            "words": self.words,
            "bytes": self.bytes,
            "conversations": self.rows,
            "prompt_tokens": self.tokens - self.response_tokens,
            "response_tokens": self.response_tokens,
        }

    def notes(self, split: str, width: int) -> Iterator[str]:
        """What a person should know, a line each."""
        if self.left_out:
            reasons = ", ".join(f"{count:,} with {reason}" for reason, count in self.left_out.most_common())
            yield f"{split}: rows left out: {reasons}"
        if self.greetings:
            yield f"{split}: {self.greetings:,} conversations began with an answer to nothing: it is left out"
        for count, what in (
            (self.heads, "the prompt loses its beginning"),
            (self.answers, "answers are cut"),
        ):
            if count:
                yield f"{split}: in {count:,} of {self.rows:,} rows {what} to fit --max-length {width}"


@dataclass(slots=True)
class Conversations:
    """One set of conversations.

    Columns: `tokens` (n, up to width); `learn`, uint8 of the same shape, 1 where a token is to be predicted
    from those before it (never a row's first); `token.weight` (n,), the number of those.
    """

    FORM: ClassVar[str] = "conversations"
    name: str
    rows: Mapping[str, Callable[[], LocatedRows]]
    """Split -> its rows."""
    read: Read
    """Row and where it stands -> its messages."""
    wanted: str
    """--template."""
    by_default: str
    """The template where `auto` finds none of the tokenizer's own."""
    response_only: bool
    folder: Path | None
    """Where the tokenizer lies, if it lies somewhere."""
    form: str = FORM
    """`labels` where the answers are labels."""
    labels: list[str] = field(default_factory=list)
    label_tokens: list[list[int]] = field(default_factory=list)
    """Each label's tokens, with the end."""
    remarks: list[str] = field(default_factory=list)
    """What a person should know of the rows."""
    cleaning: CleaningPipeline = field(default_factory=lambda: CleaningPipeline((), "conversations"))
    prompts: list[list[str]] = field(default_factory=list)
    """Of the validation split: [prompt, answer] of the first that are whole."""
    template: Template | None = None
    eos: int | None = None

    @property
    def notes(self) -> list[str]:
        return [*self.remarks, *self.cleaning.notes()]

    @property
    def splits(self) -> Sequence[str]:
        return list(self.rows)

    def texts(self) -> Iterator[str]:
        """What a tokenizer is trained on."""
        template = chat_templates.for_training(self.by_default if self.wanted == "auto" else self.wanted)
        for pieces in self._pieces("train", template, Tally(), self.cleaning.transforms_only()):
            yield from (piece.text for piece in pieces)

    def open(self, encoder: Encoder) -> None:
        """Choose the template, now that the tokenizer is known."""
        self.template = chat_templates.choose(
            self.wanted, self.by_default, encoder.tokenizer, encoder.special, self.folder
        )
        self.eos = encoder.tokenizer.token_to_id(self.template.tokens["eos_token"])
        found = encoder.tokenizer.encode_batch(self.labels, add_special_tokens=False)
        self.label_tokens = [[*label.ids, self.template.end_id] for label in found]

    def encode(self, split: str, encoder: Encoder) -> tuple[dict[str, Column], dict[str, int]]:
        """A split's columns and sizes."""
        assert self.template is not None, "open comes first"
        tally, lengths, weights = Tally(), [0], []
        tokens, learnt = Spool(encoder.kind, encoder.spool), Spool(np.uint8, encoder.spool)
        pieces = self._pieces(split, self.template, tally, self.cleaning)
        for conversation, row in _encoded(pieces, encoder, self.template.end_id):
            # A label is a row's end, where the accuracy looks for it.
            cut = fit(row, encoder.width, self.response_only or bool(self.labels))
            learn = learnt_of(cut.row, self.response_only)
            if not learn.any():
                tally.left_out["no token to learn"] += 1
                continue
            self._count(tally, conversation, cut, learn, encoder.tokenizer)
            if split == "valid" and len(self.prompts) < SHOWN_PROMPTS and not (cut.head or cut.answers):
                self.prompts.append([conversation[0].text, conversation[1].text.strip()])
            tokens.add(cut.row.tokens)
            learnt.add(learn)
            lengths.append(len(learn))
            weights.append(int(learn.sum()))
        self.remarks += tally.notes(split, encoder.width)
        if not weights:
            raise UserError(
                f"--data {self.name}: the {split} split has no conversation to learn from"
                + "".join(f"; {note}" for note in tally.notes(split, encoder.width))
            )
        offsets = np.cumsum(lengths, dtype=np.int64)
        columns: dict[str, Column] = {
            "tokens": Ragged(tokens.array(), offsets, encoder.special.get("pad") or 0),
            "learn": Ragged(learnt.array(), offsets),
            "token.weight": np.array(weights, np.int32),
        }
        return columns, tally.sizes()

    def _pieces(
        self, split: str, template: Template, tally: Tally, cleaning: CleaningPipeline
    ) -> Iterator[list[Piece]]:
        clean = cleaning.conversation_cleaner()
        for where, row in self.rows[split]():
            try:
                messages, greeted = _from_question(self.read(row, where))
                cleaned = clean(messages)
                if cleaned is not None:
                    chat_formats.require_answers(cleaned)
            except SkippedRowError as reason:
                tally.left_out[str(reason)] += 1
            else:
                if cleaned is not None:
                    tally.greetings += greeted
                    yield template.pieces(cleaned, where)

    def _count(
        self, tally: Tally, conversation: list[Piece], cut: Cut, learn: np.ndarray, tokenizer: Tokenizer
    ) -> None:
        tally.rows += 1
        tally.heads += cut.head
        tally.answers += cut.answers
        tally.tokens += len(learn)
        tally.response_tokens += int(cut.row.answer.sum())
        tally.predicted += int(learn.sum())
        kept = cut.row.answer.astype(bool) if self.response_only else np.ones(len(learn), bool)
        tally.learnt += int(kept.sum())
        if cut.head or cut.answers:
            texts = [tokenizer.decode(cut.row.tokens[kept].tolist())]
        elif self.response_only:
            texts = [p.text for p in conversation if p.answer]
        else:
            texts = ["".join(p.text for p in conversation)]
        tally.words += sum(len(text.split()) for text in texts)
        tally.bytes += sum(len(text.encode()) for text in texts)

    def facts(self) -> dict[str, Any]:
        assert self.template is not None, "open comes first"
        return {
            "form": self.form,
            "eos": self.eos,
            "template": self.template.to_dict(),
            "response_only": self.response_only,
            "prompts": self.prompts,
            **({"labels": self.labels, "label_tokens": self.label_tokens} if self.labels else {}),
        }

    def prompt(self) -> str:
        """The first held-out prompt."""
        return self.prompts[0][0] if self.prompts else ""


def _from_question(messages: list[Message]) -> tuple[list[Message], bool]:
    """The conversation from its first question on, and whether answers to nothing stood before it."""
    asked = next((n for n, m in enumerate(messages) if m["role"] == "user"), len(messages))
    kept = [m for m in messages[:asked] if m["role"] != "assistant"] + messages[asked:]
    if not any(m["role"] == "assistant" for m in kept):
        raise SkippedRowError("no question before the answer")
    return kept, len(kept) < len(messages)


def _encoded(
    conversations: Iterable[list[Piece]], encoder: Encoder, end: int
) -> Iterator[tuple[list[Piece], Row]]:
    """Each conversation with its row: pieces are tokenized apart, so that no token spans their border."""
    waiting, kind = iter(conversations), encoder.kind
    while batch := list(itertools.islice(waiting, BATCH)):
        texts = [piece.text for conversation in batch for piece in conversation]
        encodings = iter(encoder.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for conversation in batch:
            ids: list[int] = []
            answer: list[int] = []
            for piece in conversation:
                found = next(encodings).ids + ([end] if piece.answer else [])
                ids += found
                answer += [int(piece.answer)] * len(found)
            yield conversation, Row(np.array(ids, kind), np.array(answer, np.uint8))
