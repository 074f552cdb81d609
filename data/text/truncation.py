"""Truncation of conversations to the row length, and the mask of the tokens that are learnt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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


def truncate(row: TokenRow, max_length: int, response_only: bool) -> TruncatedRow:
    """Truncate a row to `max_length` tokens so that something remains to be learnt.

    The prompt before the first answer is cut from the left until that answer fits, but not to less than half
    of `max_length`. What is still too long is cut off at the end.
    """
    whole = _drop_after_last_answer(row) if response_only else row
    if len(whole.tokens) <= max_length:
        return TruncatedRow(whole, False, False)
    first = int(whole.answer_mask.argmax())
    after_answer = np.flatnonzero(whole.answer_mask[first:] == 0)
    answer = int(after_answer[0]) if len(after_answer) else len(whole.answer_mask) - first
    answer_room = min(answer, max(max_length - first, max_length // 2))
    start = max(0, first + answer_room - max_length)
    kept = TokenRow(*(part[start : start + max_length] for part in whole))
    kept = _drop_after_last_answer(kept) if response_only else kept
    return TruncatedRow(kept, start > 0, bool(kept.answer_mask.sum() < whole.answer_mask.sum()))


def _drop_after_last_answer(row: TokenRow) -> TokenRow:
    """The row up to the end of its last answer: after that there is nothing to learn."""
    stop = len(row.answer_mask) - int(row.answer_mask[::-1].argmax())
    return TokenRow(*(part[:stop] for part in row))


def learn_mask(row: TokenRow, response_only: bool) -> np.ndarray:
    """(tokens,) uint8: 1 where a token is to be predicted. The first never is: nothing precedes it."""
    learn = row.answer_mask.copy() if response_only else np.ones_like(row.answer_mask)
    learn[:1] = 0
    return learn
