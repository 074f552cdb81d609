"""Rows with `prompt`, `chosen` and `rejected` as pairs of conversations that begin alike.

Each column is text, or a list of messages. Where `chosen` and `rejected` hold whole conversations, what they
have in common is the prompt.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.data import chat_formats
from isobatch.data.chat_formats import Message, SkippedRowError, key_names, read_column
from isobatch.data.text import row_fields
from isobatch.data.text.chat_templates import VERBATIM

PROMPT, CHOSEN, REJECTED, LABEL = "prompt", "chosen", "rejected", "label"
PROMPT_COLUMNS = (PROMPT, "instruction", "question", "query", *chat_formats.CHAT_COLUMNS, "input")
"""Columns of the prompt; the first that a row has is read."""
Turns = str | list[Message]
"""What a column holds."""
Part = TypeVar("Part")


class AnsweredPrompt(NamedTuple, Generic[Part]):
    """A prompt with answers to it, as messages or as segments of text.

    An answer may go on with further questions and answers.
    """

    prompt: list[Part]
    answers: list[list[Part]]
    """The chosen one and the rejected one; or the one that is judged."""
    is_good: bool | None = None
    """Whether the judged one is."""


ReadRow = tuple[list[AnsweredPrompt[Message]], list[str]]
"""What a row holds, and notes of its fields that are not read."""


def parse_pair(row: Mapping[str, Any], where: str) -> AnsweredPrompt[Message]:
    """The pair in a row. `where` names the row in errors.

    Raises UserError for a row of another shape, SkippedRowError for one with nothing to prefer.
    """
    row_fields.check_fields(row, where)
    chosen, rejected = read_column(row, CHOSEN, where), read_column(row, REJECTED, where)
    column = _prompt_column(row)
    prompt = read_column(row, column, where) if column else None
    if isinstance(prompt, list) and column in chat_formats.CHAT_COLUMNS:
        while prompt and prompt[-1]["role"] == "assistant":  # it may hold the chosen answer too
            prompt = prompt[:-1]
    if isinstance(chosen, str) and isinstance(rejected, str):
        pair = _pair_of_texts(prompt, chosen, rejected)
    elif isinstance(chosen, list) and isinstance(rejected, list):
        pair = _pair_of_messages(prompt, chosen, rejected)
    else:
        raise UserError(f"{where}: {CHOSEN} and {REJECTED} must both be text, or both lists of messages")
    if pair.answers[0] == pair.answers[1]:
        raise SkippedRowError("the same answer twice")
    for answer in pair.answers:
        if not answer or answer[0]["role"] != "assistant":
            raise SkippedRowError("answers to different prompts")
        chat_formats.require_answers(answer)
    earlier = chat_formats.history_beside(row, main_columns(row))
    if any(m["role"] == "assistant" and not m["content"].strip() for m in earlier):
        raise SkippedRowError("an empty answer")
    if not holds_whole_texts(row):
        pair = pair._replace(prompt=chat_formats.with_fields(row, pair.prompt, main_columns(row)))
    if not any(map(chat_formats.asks_something, pair.prompt)):
        if PROMPT in row:
            raise SkippedRowError("an empty prompt")
        raise UserError(
            f"{where}: has no {PROMPT}{nearest_hint(PROMPT, list(row))}, and {CHOSEN} and {REJECTED} begin"
            f" with none; it has: {key_names(row)}"
        )
    return pair


def holds_whole_texts(row: Mapping[str, Any]) -> bool:
    """Whether `chosen` and `rejected` are texts that hold their prompt."""
    return isinstance(row.get(CHOSEN), str) and _prompt_column(row) is None


def default_template(row: Mapping[str, Any]) -> str:
    """The template for rows like this one where the tokenizer has none.

    That of instructions or messages; VERBATIM where a text goes on as an answer, with nothing beside it.
    """
    column = _prompt_column(row)
    names = (CHOSEN, *chat_formats.ANSWERS_OF[PROMPT])
    answer = next((row[name] for name in names if row.get(name) is not None), None)
    is_text = isinstance(answer, str | None) and column in (PROMPT, None)
    alone = not {*chat_formats.SYSTEM_COLUMNS, *chat_formats.INPUT_COLUMNS} & row.keys()
    return "alpaca" if column == "instruction" else VERBATIM if is_text and alone else "chatml"


def _prompt_column(row: Mapping[str, Any]) -> str | None:
    return next((name for name in PROMPT_COLUMNS if row.get(name) is not None), None)


def main_columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of a row that make it a pair."""
    return _prompt_column(row) or PROMPT, CHOSEN, REJECTED


def require_columns(names: Sequence[str], where: str) -> None:
    """Raise UserError unless both answers are among the columns. `where` names their file."""
    names = [*chat_formats.known_names(dict.fromkeys(names))]
    single = chat_formats.detect_chat_format(names) is not None
    refused = not {*row_fields.JUDGED, *chat_formats.NOT_READ}.isdisjoint(names)  # there as well
    for column in (CHOSEN, REJECTED):
        if column not in names:
            hint = "" if single else nearest_hint(column, names)
            raise UserError(
                f"{where}: has no column {column}{hint}; it has: {', '.join(names[:20]) or 'nothing'}"
                + "; --task causal-lm is for single answers" * (single and not refused)
            )


def _pair_of_texts(prompt: Turns | None, chosen: str, rejected: str) -> AnsweredPrompt[Message]:
    if prompt is None:
        # What both begin with, up to the last white space in it: answers begin with whole words.
        common = os.path.commonprefix([chosen, rejected])  # noqa: RUF071  of any texts, not of paths
        prompt = "".join(f"{common}.".rsplit(maxsplit=1)[:-1])
    if isinstance(prompt, str) and prompt and chosen.startswith(prompt) and rejected.startswith(prompt):
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    answers = [[{"role": "assistant", "content": text}] for text in (chosen, rejected)]
    return AnsweredPrompt(_as_messages(prompt), answers)


def _pair_of_messages(
    prompt: Turns | None, chosen: list[Message], rejected: list[Message]
) -> AnsweredPrompt[Message]:
    given = _as_messages(prompt or "")
    both = list(zip(chosen[:-1], rejected[:-1], strict=False))
    count = next((n for n, (one, other) in enumerate(both) if one != other), len(both))
    shared = chosen[:count]
    is_whole = all(message in shared for message in given)
    return AnsweredPrompt(shared if is_whole else given + shared, [chosen[count:], rejected[count:]])


def _as_messages(prompt: Turns) -> list[Message]:
    if isinstance(prompt, list):
        return prompt
    return [{"role": "user", "content": prompt}] if prompt.strip() else []
