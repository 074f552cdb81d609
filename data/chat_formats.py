"""Chat formats: rows with Alpaca's columns, or with a list of messages, parsed into messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isobatch.core.errors import UserError
from isobatch.data.readers import did_you_mean

Message = dict[str, str]
"""`role` and `content`, as chat templates read them; a user's message of an Alpaca row has `input` too."""

ROLES = ("system", "user", "assistant")
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
ROLE_ALIASES |= {"model": "assistant", "developer": "system"}
ALPACA_COLUMNS = ("instruction", "output")
ALPACA_ANSWERS = ("output", "response", "completion", "answer")
"""Columns of an instruction's answer; the first that a row has is read."""
ALPACA_INPUTS = ("input", "context")
CHAT_COLUMNS = ("messages", "conversations", "conversation")
ANSWERS_OF = {
    "prompt": ("completion", "response", "answer", "output"),
    "question": ("answer", "response", "output"),
    "query": ("response", "answer"),
    "input": ("output", "target", "response"),
    "problem": ("solution",),
    "user": ("assistant",),
    "human": ("assistant",),
}
"""Columns of a question -> of its answer; both are texts, or lists of messages as TRL has them."""
_NAMED_BY_QUESTION = {"prompt": "completion", "question": "answer"}
"""Pairs of columns whose format is called by the question alone."""
_BETWEEN = " -> "
ACCEPTED = (
    "conversations are read from the columns `messages` or `conversations`, `instruction` and `output`,"
    " `prompt` and `completion`, `question` and `answer` and others; --question-column and --answer-column"
    " name them"
)


class SkippedRowError(Exception):
    """A row has nothing to learn from. The reader counts it, with this reason, and goes on."""


def detect_chat_format(columns: Sequence[str]) -> str | None:
    """The name of the format: the column of messages, `instruction`, or as `pair_format` calls it; None for
    plain text.

    One of Alpaca's two columns is enough, but where there is a `text` column both are needed.
    """
    chats = [name for name in CHAT_COLUMNS if name in columns]
    if chats:
        return chats[0]
    alpaca = [name for name in ALPACA_COLUMNS if name in columns]
    if len(alpaca) == 2:
        return "instruction"
    if "text" in columns:
        return None
    if "instruction" in columns:
        return "instruction"
    asked = (
        pair_format(name, answer)
        for name, answers in ANSWERS_OF.items()
        for answer in answers
        if {name, answer} <= {*columns}
    )
    return next(asked, "instruction" if alpaca else None)


def pair_format(question: str, answer: str) -> str:
    """The format of rows with these columns."""
    return question if _NAMED_BY_QUESTION.get(question) == answer else f"{question}{_BETWEEN}{answer}"


def _pair_columns(chat_format: str) -> tuple[str, str] | None:
    """(column of the question, of the answer) of a format that has them."""
    if answer := _NAMED_BY_QUESTION.get(chat_format):
        return chat_format, answer
    question, between, answer = chat_format.partition(_BETWEEN)
    return (question, answer) if between else None


def parse_messages(row: Mapping[str, Any], where: str, chat_format: str) -> list[Message]:
    """The messages of a row. `where` names the row in errors.

    Raises UserError for a row of another shape, SkippedRowError for one without an answer.
    """
    if chat_format == "instruction":
        messages = _parse_alpaca(row, where)
    elif columns := _pair_columns(chat_format):
        question = _parse_part(row, columns[0], "user", where)
        messages = [*question, *_parse_part(row, columns[1], "assistant", where)]
    else:
        messages = parse_message_list(row, chat_format, where)
    require_answers(messages)
    return messages


def parse_question(row: Mapping[str, Any], where: str, chat_format: str) -> list[Message]:
    """The messages of a row up to the last question; an answer behind it is left out.

    Raises UserError for a row of another shape, or without a question.
    """
    if chat_format == "instruction":
        asked = {"role": "user", "content": _text_field(row, "instruction", where)}
        messages = [asked | {"input": _alpaca_input(row, where)}]
    elif columns := _pair_columns(chat_format):
        messages = _parse_part(row, columns[0], "user", where)
    else:
        messages = parse_message_list(row, chat_format, where)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or not any(messages[-1].get(name, "").strip() for name in ("content", "input")):
        raise UserError(f"{where}: asks nothing: its last message must be a question")
    return messages


def require_answers(messages: Sequence[Message]) -> None:
    """Raise SkippedRowError where no message is the assistant's, or one of those is empty."""
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    if not answers:
        raise SkippedRowError("no answer")
    if not all(answer.strip() for answer in answers):
        raise SkippedRowError("an empty answer")


def _parse_alpaca(row: Mapping[str, Any], where: str) -> list[Message]:
    instruction, given = _text_field(row, "instruction", where), _alpaca_input(row, where)
    answer = _text_field(row, next((name for name in ALPACA_ANSWERS if name in row), "output"), where)
    if not answer.strip():
        raise SkippedRowError("an empty answer")
    if not (instruction + given).strip():
        raise SkippedRowError("an empty instruction")
    asked = {"role": "user", "content": instruction, "input": given}
    return [asked, {"role": "assistant", "content": answer}]


def _alpaca_input(row: Mapping[str, Any], where: str) -> str:
    """What an instruction is about; empty where the row has nothing but spaces."""
    column = next((name for name in ALPACA_INPUTS if name in row), None)
    given = _text_field(row, column, where) if column else ""
    return given if given.strip() else ""


def _parse_part(row: Mapping[str, Any], name: str, role: str, where: str) -> list[Message]:
    """The messages in a column of questions or answers; a text is one message of this role."""
    if isinstance(row.get(name), list):
        return parse_message_list(row, name, where)
    return [{"role": role, "content": _text_field(row, name, where)}]


def _text_field(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise UserError(f"{where}: has no {name}{did_you_mean(name, list(row))}; it has: {key_names(row)}")
    text = row[name]
    if not isinstance(text, str | None):
        raise UserError(f"{where}: {name} holds {type(text).__name__}, not text")
    return text or ""


def key_names(row: Mapping[str, Any]) -> str:
    """The names of a row's columns, for messages."""
    return ", ".join(map(str, list(row)[:20])) or "nothing"


def parse_message_list(row: Mapping[str, Any], column: str, where: str) -> list[Message]:
    """The messages in a column of a row. `where` names the row. Raises UserError where they are none."""
    if column not in row:
        raise UserError(
            f"{where}: has no {column}{did_you_mean(column, list(row))}; it has: {key_names(row)}"
        )
    turns = row[column]
    if isinstance(turns, Mapping):  # `datasets` gives a list of objects as an object of lists
        turns = [dict(zip(turns, values, strict=True)) for values in zip(*turns.values(), strict=True)]
    if not isinstance(turns, list | None):
        raise UserError(f"{where}: {column} holds {type(turns).__name__}, not a list of messages")
    return [_parse_message(turn, f"{where}: message {number}") for number, turn in enumerate(turns or [], 1)]


def _parse_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise UserError(f'{where} is {type(turn).__name__}, not an object with "role" and "content"')
    role, content = _string_field(turn, "role", "from", where), _string_field(turn, "content", "value", where)
    if (known := ROLE_ALIASES.get(role.lower(), role.lower())) not in ROLES:
        names = [*ROLES, *ROLE_ALIASES]
        raise UserError(
            f"{where} is by {role!r}{did_you_mean(role, names)}: a role is one of {', '.join(ROLES)}"
        )
    return {"role": known, "content": content}


def _string_field(turn: Mapping[str, Any], name: str, other: str, where: str) -> str:
    """The text under `name`, or under `other` as ShareGPT calls it."""
    found = turn.get(name) if turn.get(name) is not None else turn.get(other)
    if found is None:
        raise UserError(f"{where} has no {name} (or {other}); it has: {key_names(turn)}")
    if not isinstance(found, str):
        raise UserError(f"{where}: {name} holds {type(found).__name__}, not text")
    return found
