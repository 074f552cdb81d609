"""Truncation of conversations to the row length, and the mask of the tokens that are learnt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
