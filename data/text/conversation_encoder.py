"""Conversations become rows of tokens, cut to fit, with a mask of what is learnt; in any process."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isobatch.data.preparation.encoding import EncodedShard, text_hash
from isobatch.data.text.chat_templates import ChatSegment, ChatTemplate
from isobatch.data.text.plain_text import count_lines
from isobatch.data.text.row_fields import RowCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tokenizers import Tokenizer

SHOWN_PROMPTS = 3
"""Validation prompts that facts keep, to be answered by the trained model."""
BATCH_CONVERSATIONS = 512
"""Conversations that are tokenized together."""


class TokenRow(NamedTuple):
    """A conversation as tokens."""

    tokens: np.ndarray
    """(tokens,) ids."""
    answer_mask: np.ndarray
    """(tokens,) 1 where a token belongs to an answer, else 0."""


class TruncatedRow(NamedTuple):
    """A row that fits, and what was cut off."""

    row: TokenRow
    prompt_cut: bool
    """Whether the beginning is cut off."""
    answer_cut: bool
    """Whether tokens of an answer are cut off."""
    turns_left_out: bool = False
    """Whether turns after the first are left out."""

    @property
    def is_cut(self) -> bool:
        return self.prompt_cut or self.answer_cut or self.turns_left_out


class ConversationEncoder:
    """Renders, tokenizes and truncates conversations, each given as the JSON of [where, messages].

    A shard has `tokens` and `learn` (all tokens,), and `lengths`, `weights` and `hashes` of rows. Its facts:
    `counts`; the most `turns`; the first [prompt, answer] that are not truncated, `prompts`.
    """

    def __init__(self, tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
        self.tokenizer, self.dtype = tokenizer, np.dtype(settings["dtype"])
        self.template = ChatTemplate.from_dict(settings["template"])
        self.max_length = settings["max_length"]
        self.response_only, self.ends_with_answer = settings["response_only"], settings["ends_with_answer"]

    def __call__(self, texts: list[str]) -> EncodedShard:
        counts, turns = RowCounts(), 0
        prompts: list[list[str]] = []
        hashes: list[int] = []
        tokens, masks = [np.empty(0, self.dtype)], [np.empty(0, np.uint8)]
        for conversation, row in self._rows(texts, counts):
            find_questions = partial(question_mask, conversation, self.tokenizer)
            cut = fit_turns(row, find_questions, self.max_length, self.ends_with_answer)
            learn = learn_mask(cut.row, self.response_only)
            if not learn.any():
                counts.leave_out("no token to learn")
                continue
            self._add_counts(counts, conversation, cut, learn)
            if len(prompts) < SHOWN_PROMPTS and not cut.is_cut:
                prompts.append([conversation[0].text, conversation[1].text.strip()])
            turns = max(turns, sum(part.is_answer for part in conversation))
            hashes.append(text_hash(row.tokens.tobytes()))
            tokens.append(cut.row.tokens)
            masks.append(learn)
        arrays = {
            "tokens": np.concatenate(tokens),
            "learn": np.concatenate(masks),
            "lengths": np.array([len(mask) for mask in masks[1:]], np.uint32),
            "weights": np.array([mask.sum() for mask in masks[1:]], np.int32),
            "hashes": np.array(hashes, np.uint64),
        }
        return EncodedShard(arrays, {"counts": counts, "turns": turns, "prompts": prompts})

    def _rows(self, texts: list[str], counts: RowCounts) -> Iterator[tuple[list[ChatSegment], TokenRow]]:
        """Yield each conversation with its tokens; count what became of its fields."""
        for start in range(0, len(texts), BATCH_CONVERSATIONS):
            batch = [json.loads(text) for text in texts[start : start + BATCH_CONVERSATIONS]]
            conversations = [self.template.segments(messages, where) for where, messages in batch]
            rows = token_rows(conversations, self.tokenizer, self.template.end_id, self.dtype)
            for (_, messages), conversation, row in zip(batch, conversations, rows, strict=True):
                counts.add_fields(self.template.notes_of_fields(messages, conversation))
                yield conversation, row

    def _add_counts(
        self, counts: RowCounts, conversation: list[ChatSegment], cut: TruncatedRow, learn: np.ndarray
    ) -> None:
        """Count a row that is learnt from; words and bytes are those of the texts that are learnt."""
        answers = int(cut.row.answer_mask.sum())
        kept = cut.row.answer_mask.astype(bool) if self.response_only else np.ones(len(learn), bool)
        if cut.is_cut:
            texts = [self.tokenizer.decode(cut.row.tokens[kept].tolist())]
        elif self.response_only:
            texts = [p.text for p in conversation if p.is_learnt]
        else:
            texts = ["".join(p.text for p in conversation)]
        counts.update(
            rows=1,
            prompts_cut=int(cut.prompt_cut),
            answers_cut=int(cut.answer_cut),
            turns_left_out=int(cut.turns_left_out),
            prompt_tokens=len(learn) - answers,
            response_tokens=answers,
            predicted=int(learn.sum()),
            tokens=int(kept.sum()),
            words=sum(len(text.split()) for text in texts),
            lines=sum(map(count_lines, texts)),
            bytes=sum(len(text.encode()) for text in texts),
        )


def token_rows(
    conversations: Sequence[Sequence[ChatSegment]], tokenizer: Tokenizer, end_id: int, dtype: Any
) -> Iterator[TokenRow]:
    """Yield each conversation as tokens; `end_id` ends an answer.

    Segments are tokenized separately, so that no token spans the border of prompt and answer.
    """
    texts = [segment.text for conversation in conversations for segment in conversation]
    encodings = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    for conversation in conversations:
        ids: list[int] = []
        answer_mask: list[int] = []
        for segment in conversation:
            found = next(encodings).ids + [end_id] * segment.is_answer
            ids += found
            answer_mask += [int(segment.is_learnt)] * len(found)
        yield TokenRow(np.array(ids, dtype), np.array(answer_mask, np.uint8))


def question_mask(conversation: Sequence[ChatSegment], tokenizer: Tokenizer) -> np.ndarray:
    """(tokens,) bool: True where a token of a prompt is a message's and not the template's."""
    found: list[bool] = []
    for segment in conversation:
        encoding = tokenizer.encode(segment.text, add_special_tokens=False)
        found += [any(a <= start < b for a, b in segment.messages) for start, _ in encoding.offsets]
        found += [False] * segment.is_answer  # the token that ends an answer
    return np.array(found)


def fit_turns(
    row: TokenRow, find_questions: Callable[[], np.ndarray], max_length: int, response_only: bool
) -> TruncatedRow:
    """Truncate a row to `max_length` tokens: questions before templates, and answers last.

    Turns are kept from the first on while they fit, each with its whole answer. To make room a question loses
    its beginning, and keeps its end and its template; the first also loses its template, from the left, where
    that leaves no room for a question. A first answer that alone fills the row loses its end, and its prompt
    keeps at most half of the row.

    `find_questions` gives (tokens,) bool, True where a token of a prompt is not the template's.
    """
    whole = _drop_after_last_answer(row) if response_only else row
    if len(whole.tokens) <= max_length:
        return TruncatedRow(whole, False, False)
    is_question = find_questions()
    kept: list[np.ndarray] = []
    room, prompt_cut, answer_cut, left_out = max_length, False, False, False
    for number, (prompt, answer) in enumerate(_turns(whole.answer_mask)):
        if number == 0 and len(answer) >= max_length:  # something must precede what is learnt
            kept_answer = answer[: max_length - min(len(prompt), max_length // 2)]
            answer, answer_cut = kept_answer, len(kept_answer) < len(answer)
        shorter = _cut_question(prompt, is_question, room - len(answer))
        if shorter is None and number > 0:
            left_out = True
            break
        if shorter is None:
            shorter = prompt[len(prompt) - (room - len(answer)) :]
        prompt_cut |= len(shorter) < len(prompt)
        kept += [shorter, answer]
        room -= len(shorter) + len(answer)
    places = np.concatenate(kept)
    return TruncatedRow(TokenRow(*(part[places] for part in whole)), prompt_cut, answer_cut, left_out)


def _turns(answer_mask: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The places of each turn's prompt and answer; what follows the last answer has an empty one."""
    borders = np.flatnonzero(np.diff(answer_mask, prepend=0, append=0 if answer_mask[-1] else 1))
    parts = np.split(np.arange(len(answer_mask)), borders)
    return zip(parts[::2], parts[1::2], strict=False)


def _cut_question(prompt: np.ndarray, is_question: np.ndarray, room: int) -> np.ndarray | None:
    """The places of a prompt without the first of its question; None where no question would be left."""
    excess, question = len(prompt) - room, prompt[is_question[prompt]]
    if excess <= 0:
        return prompt
    return np.setdiff1d(prompt, question[:excess]) if excess < len(question) else None


def _drop_after_last_answer(row: TokenRow) -> TokenRow:
    """The row up to the end of its last answer: after that there is nothing to learn."""
    stop = len(row.answer_mask) - int(row.answer_mask[::-1].argmax())
    return TokenRow(*(part[:stop] for part in row))


def learn_mask(row: TokenRow, response_only: bool) -> np.ndarray:
    """(tokens,) uint8: 1 where a token is to be predicted. The first never is: nothing precedes it."""
    learn = row.answer_mask.copy() if response_only else np.ones_like(row.answer_mask)
    learn[:1] = 0
    return learn
