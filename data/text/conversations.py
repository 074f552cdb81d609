"""Conversations as rows of tokens, with a mask of the tokens to be learnt."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from isobatch.data import chat_formats
from isobatch.data.base import Column, NoSamplesError, Ragged
from isobatch.data.chat_formats import Message, SkippedRowError
from isobatch.data.cleaning.pipeline import CleaningPipeline
from isobatch.data.cleaning.steps import REMEMBERING
from isobatch.data.corpora import overlap_notes
from isobatch.data.readers import LocatedRows
from isobatch.data.spooled_array import SpooledArray
from isobatch.data.text import chat_templates
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.data.text.plain_text import count_lines
from isobatch.data.text.truncation import TokenRow, TruncatedRow, fit_turns, learn_mask, truncate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from isobatch.data.text.chat_templates import ChatSegment
    from isobatch.data.text.plain_text import TokenizationSettings

TOKENIZATION_VERSION = 2
"""Part of the cache key: raise it when the same rows become other tokens."""
SHOWN_PROMPTS = 3
"""Validation prompts that facts keep, to be answered by the trained model."""
BATCH_CONVERSATIONS = 512
"""Conversations that are tokenized together."""
ParseMessages = Callable[[Mapping[str, Any], str], list[Message]]
"""(row, where it lies) -> its messages."""


@dataclass(slots=True)
class ConversationCounts:
    """Counts of a split's conversations."""

    rows: int = 0
    """Conversations that are learnt from."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> rows that are not."""
    leading_answers: int = 0
    """Conversations that began with an answer before any question; it is dropped."""
    prompts_cut: int = 0
    answers_cut: int = 0
    turns_left_out: int = 0
    tokens: int = 0
    response_tokens: int = 0
    learnt: int = 0
    """Tokens of the texts that are learnt."""
    predicted: int = 0
    """Those of them that are predicted: without the first of a row."""
    words: int = 0
    lines: int = 0
    """Ends of lines in the texts that are learnt; an answer's end is one."""
    bytes: int = 0
    in_train: int = 0
    """Held-out conversations that are in train too."""

    def sizes(self) -> dict[str, int]:
        """The counts that facts keep, by the names they have there."""
        return {
            "tokens": self.learnt,
            "predicted": self.predicted,
            "words": self.words,
            "bytes": self.bytes,
            "conversations": self.rows,
            "prompt_tokens": self.tokens - self.response_tokens,
            "response_tokens": self.response_tokens,
        }

    def notes(self, split: str, max_length: int) -> Iterator[str]:
        """What the user should know, one line each."""
        if self.left_out:
            reasons = ", ".join(f"{count:,} with {reason}" for reason, count in self.left_out.most_common())
            yield f"{split}: rows left out: {reasons}"
        if self.leading_answers:
            what = "conversations began with an answer to nothing: it is left out"
            yield f"{split}: {self.leading_answers:,} {what}"
        for count, what in (
            (self.prompts_cut, "the prompt loses its beginning"),
            (self.answers_cut, "answers are cut"),
            (self.turns_left_out, "later turns are left out"),
        ):
            if count:
                yield f"{split}: in {count:,} of {self.rows:,} rows {what} to fit --max-length {max_length}"


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
    parse: ParseMessages
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
    most_turns: int = 0
    """Answers of the longest training conversation."""
    known: set[int] = field(default_factory=set)
    """Hashes of the training rows' tokens."""
    prompts: list[list[str]] = field(default_factory=list)
    """[prompt, answer] of the first validation conversations that are not truncated."""
    template: ChatTemplate | None = None
    """Set by `bind_tokenizer`, as are `eos` and `label_tokens`."""
    eos: int | None = None

    @property
    def notes(self) -> list[str]:
        return [*self.remarks, *self.cleaning.notes()]

    @property
    def splits(self) -> Sequence[str]:
        """Training first: rows of the others are compared with it."""
        return sorted(self.rows, key=lambda split: split != "train")

    def texts(self) -> Iterator[str]:
        """The texts that a tokenizer is trained on."""
        template = chat_templates.tokenizer_training_template(
            self.default_template if self.template_name == "auto" else self.template_name
        )
        for segments in self._render_segments(
            "train", template, ConversationCounts(), self.cleaning.transforms_only()
        ):
            yield from (segment.text for segment in segments)

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
        assert self.template is not None, "bind_tokenizer comes first"
        counts, lengths, weights = ConversationCounts(), [0], []
        tokens = SpooledArray(tokenization.dtype, tokenization.spool_folder)
        learn_masks = SpooledArray(np.uint8, tokenization.spool_folder)
        segments = self._render_segments(split, self.template, counts, self.cleaning)
        for conversation, row in _encode_conversations(segments, tokenization, self.template.end_id):
            cut = self._truncate(conversation, row, tokenization)
            learn = learn_mask(cut.row, self.response_only)
            if not learn.any():
                counts.left_out["no token to learn"] += 1
                continue
            self._add_counts(counts, conversation, cut, learn, tokenization.tokenizer)
            if split == "valid" and len(self.prompts) < SHOWN_PROMPTS and not cut.is_cut:
                self.prompts.append([conversation[0].text, conversation[1].text.strip()])
            found = hash(row.tokens.tobytes())
            if split == "train":
                self.known.add(found)
                self.most_turns = max(self.most_turns, sum(part.is_answer for part in conversation))
            counts.in_train += split != "train" and found in self.known
            tokens.add(cut.row.tokens)
            learn_masks.add(learn)
            lengths.append(len(learn))
            weights.append(int(learn.sum()))
        self.remarks += counts.notes(split, tokenization.max_length)
        self.remarks += overlap_notes(split, counts.in_train, counts.rows)
        if counts.in_train and not any(step.name in REMEMBERING for step in self.cleaning.steps):
            self.remarks.append("--clean duplicates leaves such rows out of training")
        if not weights:
            raise NoSamplesError(
                f"--data {self.name}: the {split} split has no conversation to learn from"
                + "".join(f"; {note}" for note in counts.notes(split, tokenization.max_length))
            )
        offsets = np.cumsum(lengths, dtype=np.int64)
        columns: dict[str, Column] = {
            "tokens": Ragged(tokens.array(), offsets, tokenization.special_ids.get("pad") or 0),
            "learn": Ragged(learn_masks.array(), offsets),
            "token.weight": np.array(weights, np.int32),
        }
        lines = {"lines": counts.lines} if tokenization.rules >= 2 else {}
        return columns, counts.sizes() | lines

    def _render_segments(
        self, split: str, template: ChatTemplate, counts: ConversationCounts, cleaning: CleaningPipeline
    ) -> Iterator[list[ChatSegment]]:
        """Yield each conversation of a split, cleaned and rendered; count those that are skipped."""
        clean = cleaning.conversation_cleaner(self._held_out() if split == "train" else ())
        for where, row in self.rows[split]():
            try:
                messages, had_leading_answer = _drop_leading_answers(self.parse(row, where))
                cleaned = clean(messages)
                if cleaned is not None:
                    chat_formats.require_answers(cleaned)
            except SkippedRowError as reason:
                counts.left_out[str(reason)] += 1
            else:
                if cleaned is not None:
                    counts.leading_answers += had_leading_answer
                    yield template.segments(cleaned, where)

    def _held_out(self) -> Iterator[list[Message]]:
        """The conversations that are not trained on."""
        for split in self.splits:
            for where, row in self.rows[split]() if split != "train" else ():
                with contextlib.suppress(SkippedRowError):
                    yield _drop_leading_answers(self.parse(row, where))[0]

    def _truncate(
        self, conversation: list[ChatSegment], row: TokenRow, tokenization: TokenizationSettings
    ) -> TruncatedRow:
        # A row ends with its label: the accuracy is measured at the end of the row.
        ends_with_answer = self.response_only or bool(self.labels)
        if tokenization.rules < 2:
            return truncate(row, tokenization.max_length, ends_with_answer)
        find_questions = partial(question_mask, conversation, tokenization.tokenizer)
        return fit_turns(row, find_questions, tokenization.max_length, ends_with_answer)

    def _add_counts(
        self,
        counts: ConversationCounts,
        conversation: list[ChatSegment],
        cut: TruncatedRow,
        learn: np.ndarray,
        tokenizer: Tokenizer,
    ) -> None:
        """Count a row that is learnt from; words and bytes are those of the texts that are learnt."""
        counts.rows += 1
        counts.prompts_cut += cut.prompt_cut
        counts.answers_cut += cut.answer_cut
        counts.turns_left_out += cut.turns_left_out
        counts.tokens += len(learn)
        counts.response_tokens += int(cut.row.answer_mask.sum())
        counts.predicted += int(learn.sum())
        kept = cut.row.answer_mask.astype(bool) if self.response_only else np.ones(len(learn), bool)
        counts.learnt += int(kept.sum())
        if cut.is_cut:
            texts = [tokenizer.decode(cut.row.tokens[kept].tolist())]
        elif self.response_only:
            texts = [p.text for p in conversation if p.is_answer]
        else:
            texts = ["".join(p.text for p in conversation)]
        counts.words += sum(len(text.split()) for text in texts)
        counts.lines += sum(map(count_lines, texts))
        counts.bytes += sum(len(text.encode()) for text in texts)

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


def _drop_leading_answers(messages: list[Message]) -> tuple[list[Message], bool]:
    """The conversation without answers before its first question, and whether there were any."""
    asked = next((n for n, m in enumerate(messages) if m["role"] == "user"), len(messages))
    kept = [m for m in messages[:asked] if m["role"] != "assistant"] + messages[asked:]
    if not any(m["role"] == "assistant" for m in kept):
        raise SkippedRowError("no question before the answer")
    return kept, len(kept) < len(messages)


def _encode_conversations(
    conversations: Iterable[list[ChatSegment]], tokenization: TokenizationSettings, end_id: int
) -> Iterator[tuple[list[ChatSegment], TokenRow]]:
    """Yield each conversation with its tokens.

    Segments are tokenized separately, so that no token spans the border of prompt and answer.
    """
    waiting, dtype = iter(conversations), tokenization.dtype
    while batch := list(itertools.islice(waiting, BATCH_CONVERSATIONS)):
        texts = [segment.text for conversation in batch for segment in conversation]
        encodings = iter(tokenization.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for conversation in batch:
            ids: list[int] = []
            answer_mask: list[int] = []
            for segment in conversation:
                found = next(encodings).ids + ([end_id] if segment.is_answer else [])
                ids += found
                answer_mask += [int(segment.is_answer)] * len(found)
            yield conversation, TokenRow(np.array(ids, dtype), np.array(answer_mask, np.uint8))


def question_mask(conversation: Sequence[ChatSegment], tokenizer: Tokenizer) -> np.ndarray:
    """(tokens,) bool: True where a token of a prompt is a message's and not the template's."""
    found: list[bool] = []
    for segment in conversation:
        encoding = tokenizer.encode(segment.text, add_special_tokens=False)
        found += [any(a <= start < b for a, b in segment.messages) for start, _ in encoding.offsets]
        found += [False] * segment.is_answer  # the token that ends an answer
    return np.array(found)
