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
CHAT_COLUMNS = ("messages", "conversations")
ANSWER_OF = {"prompt": "completion", "question": "answer"}
"""Columns of a question -> of its answer; both are texts, or lists of messages as TRL has them."""
ACCEPTED = (
    "conversations are read from the columns `messages` or `conversations`, `instruction` and `output`,"
    " `prompt` and `completion`, or `question` and `answer`"
)


class SkippedRowError(Exception):
    """A row has nothing to learn from. The reader counts it, with this reason, and goes on."""


def detect_chat_format(columns: Sequence[str]) -> str | None:
    """The column that marks the format: `messages`, `conversations`, `instruction`, or one of ANSWER_OF; None
    for plain text.

    One of Alpaca's two columns is enough, but where there is a `text` column both are needed.
    """
    chats = [name for name in CHAT_COLUMNS if name in columns]
    if chats:
        return chats[0]
    alpaca = [name for name in ALPACA_COLUMNS if name in columns]
    if len(alpaca) == 2 or (alpaca and "text" not in columns):
        return "instruction"
    asked = (name for name, answer in ANSWER_OF.items() if {name, answer} <= {*columns})
    return None if "text" in columns else next(asked, None)


def parse_messages(row: Mapping[str, Any], where: str, chat_format: str) -> list[Message]:
    """The messages of a row. `where` names the row in errors.

    Raises UserError for a row of another shape, SkippedRowError for one without an answer.
    """
    if chat_format == "instruction":
        messages = _parse_alpaca(row, where)
    elif chat_format in ANSWER_OF:
        question = _parse_part(row, chat_format, "user", where)
        messages = [*question, *_parse_part(row, ANSWER_OF[chat_format], "assistant", where)]
    else:
        messages = parse_message_list(row, chat_format, where)
    require_answers(messages)
    return messages


def parse_question(row: Mapping[str, Any], where: str, chat_format: str) -> list[Message]:
    """The messages of a row up to the last question; an answer behind it is left out.

    Raises UserError for a row of another shape, or without a question.
    """
    if chat_format == "instruction":
        given = _text_field(row, "input", where) if "input" in row else ""
        asked = {"role": "user", "content": _text_field(row, "instruction", where)}
        messages = [asked | {"input": given if given.strip() else ""}]
    elif chat_format in ANSWER_OF:
        messages = _parse_part(row, chat_format, "user", where)
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
    fields = {name: _text_field(row, name, where) for name in ALPACA_COLUMNS}
    given = _text_field(row, "input", where) if "input" in row else ""
    if not fields["output"].strip():
        raise SkippedRowError("an empty answer")
    if not (fields["instruction"] + given).strip():
        raise SkippedRowError("an empty instruction")
    asked = {"role": "user", "content": fields["instruction"], "input": given if given.strip() else ""}
    return [asked, {"role": "assistant", "content": fields["output"]}]


def _parse_part(row: Mapping[str, Any], name: str, role: str, where: str) -> list[Message]:
    """The messages in a column of ANSWER_OF; a text is one message of this role."""
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
