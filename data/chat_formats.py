"""Rows that hold conversations: Alpaca's columns, or chats as messages. Each becomes a list of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from isobatch.core.errors import UserError
from isobatch.data.readers import nearest

Message = dict[str, str]
"""`role` and `content`, as chat templates read them; of Alpaca's rows also `input`."""

ROLES = ("system", "user", "assistant")
ALIASES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
ALIASES |= {"model": "assistant", "developer": "system"}
ALPACA = ("instruction", "output")
CHATS = ("messages", "conversations")


class LeftOut(Exception):
    """A row without anything to learn: counted, not an error."""


def form_of(columns: Sequence[str]) -> str | None:
    """`messages`, `conversations` or `instruction`: the column that marks the rows; None for plain text.

    Beside a `text` column Alpaca's other column must be there too.
    """
    chats = [name for name in CHATS if name in columns]
    if chats:
        return chats[0]
    alpaca = [name for name in ALPACA if name in columns]
    return "instruction" if len(alpaca) == 2 or (alpaca and "text" not in columns) else None


def messages_of(row: Mapping[str, Any], where: str, form: str) -> list[Message]:
    """A row's conversation. UserError for rows that cannot be; LeftOut for those without an answer."""
    messages = _alpaca(row, where) if form == "instruction" else _chat(row, form, where)
    require_answers(messages)
    return messages


def require_answers(messages: Sequence[Message]) -> None:
    """Raise LeftOut where an answer is missing or empty."""
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    if not answers:
        raise LeftOut("no answer")
    if not all(answer.strip() for answer in answers):
        raise LeftOut("an empty answer")


def _alpaca(row: Mapping[str, Any], where: str) -> list[Message]:
    fields = {name: _text(row, name, where) for name in ALPACA}
    given = _text(row, "input", where) if "input" in row else ""
    if not fields["output"].strip():
        raise LeftOut("an empty answer")
    if not (fields["instruction"] + given).strip():
        raise LeftOut("an empty instruction")
    asked = {"role": "user", "content": fields["instruction"], "input": given if given.strip() else ""}
    return [asked, {"role": "assistant", "content": fields["output"]}]


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise UserError(f"{where}: has no {name}{nearest(name, list(row))}; it has: {_names(row)}")
    text = row[name]
    if not isinstance(text, str | None):
        raise UserError(f"{where}: {name} holds {type(text).__name__}, not text")
    return text or ""


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, list(row)[:20])) or "nothing"


def _chat(row: Mapping[str, Any], column: str, where: str) -> list[Message]:
    if column not in row:
        raise UserError(f"{where}: has no {column}{nearest(column, list(row))}; it has: {_names(row)}")
    turns = row[column]
    if isinstance(turns, Mapping):  # how `datasets` gives a sequence of objects
        turns = [dict(zip(turns, values, strict=True)) for values in zip(*turns.values(), strict=True)]
    if not isinstance(turns, list | None):
        raise UserError(f"{where}: {column} holds {type(turns).__name__}, not a list of messages")
    return [_message(turn, f"{where}: message {number}") for number, turn in enumerate(turns or [], 1)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise UserError(f'{where} is {type(turn).__name__}, not an object with "role" and "content"')
    role, content = _either(turn, "role", "from", where), _either(turn, "content", "value", where)
    if (known := ALIASES.get(role.lower(), role.lower())) not in ROLES:
        names = [*ROLES, *ALIASES]
        raise UserError(f"{where} is by {role!r}{nearest(role, names)}: a role is one of {', '.join(ROLES)}")
    return {"role": known, "content": content}


def _either(turn: Mapping[str, Any], name: str, other: str, where: str) -> str:
    found = turn.get(name) if turn.get(name) is not None else turn.get(other)
    if found is None:
        raise UserError(f"{where} has no {name} (or {other}); it has: {_names(turn)}")
    if not isinstance(found, str):
        raise UserError(f"{where}: {name} holds {type(found).__name__}, not text")
    return found
