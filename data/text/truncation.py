"""Which tokens of a row are learnt, and how a row is made to fit without losing all of them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Row(NamedTuple):
    """A conversation's tokens, and which of them are an answer's."""

    tokens: np.ndarray
    answer: np.ndarray


class Cut(NamedTuple):
    """A row that fits, and what that cost."""

    row: Row
    head: bool
    """Whether its beginning is lost."""
    answers: bool
    """Whether something of its answers is lost."""


def fit(row: Row, width: int, response_only: bool) -> Cut:
    """A row of at most `width` tokens that has something to learn.

    Of a first exchange that is too long the prompt loses its beginning, but no more than the answer needs,
    of which half a row is sure; what is still too much goes at the end.
    """
    whole = _without_tail(row) if response_only else row
    if len(whole.tokens) <= width:
        return Cut(whole, False, False)
    first = int(whole.answer.argmax())
    behind = np.flatnonzero(whole.answer[first:] == 0)
    answer = int(behind[0]) if len(behind) else len(whole.answer) - first
    room = min(answer, max(width - first, width // 2))
    start = max(0, first + room - width)
    kept = Row(*(part[start : start + width] for part in whole))
    kept = _without_tail(kept) if response_only else kept
    return Cut(kept, start > 0, bool(kept.answer.sum() < whole.answer.sum()))


def _without_tail(row: Row) -> Row:
    """The row up to its last answer's end: behind that there is nothing to learn."""
    stop = len(row.answer) - int(row.answer[::-1].argmax())
    return Row(*(part[:stop] for part in row))


def learnt_of(row: Row, response_only: bool) -> np.ndarray:
    """(tokens,) uint8: 1 where a token is to be predicted. Nothing stands before the first."""
    learn = row.answer.copy() if response_only else np.ones_like(row.answer)
    learn[:1] = 0
    return learn
