"""Pairs of answers as tokens: two rows of each, which begin with the same prompt."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from isobatch.data.text.conversation_encoder import (
    BATCH_CONVERSATIONS,
    TokenRow,
    fit_turns,
    question_mask,
    token_rows,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tokenizers import Tokenizer

    from isobatch.data.preferences.pairs import PreferencePair
    from isobatch.data.text.chat_templates import ChatSegment, ChatTemplate
    from isobatch.data.text.plain_text import TokenizationSettings


class RenderedPair(NamedTuple):
    """A pair as text."""

    prompt: list[ChatSegment]
    answers: tuple[list[ChatSegment], list[ChatSegment]]
    """Chosen, rejected. They end with their last answer."""


class EncodedPair(NamedTuple):
    """A pair as tokens that fit."""

    rows: tuple[TokenRow, TokenRow]
    """Chosen, rejected: the prompt, and the answer behind it."""
    prompt_cut: bool
    """Whether the prompt lost its beginning."""
    answer_cut: bool
    """Whether an answer lost its end."""

    @property
    def differs(self) -> bool:
        """Whether the rows still differ."""
        one, other = (row.tokens for row in self.rows)
        return not np.array_equal(one, other)


def render_pair(pair: PreferencePair, template: ChatTemplate, where: str) -> RenderedPair:
    """A pair written by a template. Raises UserError where the template cannot tell answers from prompts."""
    both = [template.segments(pair.prompt + answer, where) for answer in (pair.chosen, pair.rejected)]
    # Each answer within the prompt is a segment, and so is the text before it.
    stop = 2 * sum(message["role"] == "assistant" for message in pair.prompt) + 1
    answers = [[*_up_to_last_answer(segments[stop:])] for segments in both]
    return RenderedPair(both[0][:stop], (answers[0], answers[1]))


def _up_to_last_answer(segments: Sequence[ChatSegment]) -> Sequence[ChatSegment]:
    last = max(number for number, segment in enumerate(segments) if segment.is_answer)
    return segments[: last + 1]


def encode_pairs(
    pairs: Iterable[RenderedPair], tokenization: TokenizationSettings, end_id: int
) -> Iterator[tuple[RenderedPair, EncodedPair]]:
    """Yield each pair with its tokens. Segments are tokenized separately; `end_id` ends an answer."""
    waiting, tokenizer = iter(pairs), tokenization.tokenizer
    while batch := list(itertools.islice(waiting, BATCH_CONVERSATIONS)):
        parts = [part for pair in batch for part in (pair.prompt, *pair.answers)]
        rows = token_rows(parts, tokenizer, end_id, tokenization.dtype)
        for pair in batch:
            prompt, chosen, rejected = next(rows), next(rows), next(rows)
            find_questions = partial(_droppable, pair.prompt, tokenizer)
            yield pair, fit_pair(prompt.tokens, chosen, rejected, find_questions, tokenization.max_length)


def _droppable(prompt: Sequence[ChatSegment], tokenizer: Tokenizer) -> np.ndarray:
    """(tokens,) bool: True where a token of a prompt is a message's, earlier answers' too."""
    whole = [s._replace(messages=((0, len(s.text)),)) if s.is_answer else s for s in prompt]
    return question_mask(whole, tokenizer)


def fit_pair(
    prompt: np.ndarray,
    chosen: TokenRow,
    rejected: TokenRow,
    find_questions: Callable[[], np.ndarray],
    max_length: int,
) -> EncodedPair:
    """Both rows with at most `max_length` tokens and the same prompt.

    The prompt loses its beginning until the longer answer fits, its messages before its template; an answer
    that alone fills the row loses its end, and the prompt keeps at most half of the row. The other one is
    whole where it fits.
    """
    half = max_length - min(len(prompt), max_length // 2)
    lengths = [len(answer.tokens) for answer in (chosen, rejected)]
    wanted = max(half if length >= max_length else length for length in lengths)
    whole = np.concatenate([prompt, np.zeros(wanted, prompt.dtype)])
    is_answer = np.arange(len(whole)) >= len(prompt)

    def droppable() -> np.ndarray:
        return np.append(find_questions(), np.zeros(wanted, bool))

    row = TokenRow(whole, is_answer.astype(np.uint8))
    kept = fit_turns(row, droppable, max_length, response_only=True)
    prompt = kept.row.tokens[kept.row.answer_mask == 0]
    rows = [_behind(prompt, answer, max_length - len(prompt)) for answer in (chosen, rejected)]
    return EncodedPair((rows[0], rows[1]), kept.prompt_cut, max(lengths) > max_length - len(prompt))


def _behind(prompt: np.ndarray, answer: TokenRow, room: int) -> TokenRow:
    """The row of a prompt and as much of an answer as there is room for."""
    return TokenRow(
        np.concatenate([prompt, answer.tokens[:room]]),
        np.concatenate([np.zeros(len(prompt), np.uint8), answer.answer_mask[:room]]),
    )
