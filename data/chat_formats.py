"""Chat formats: rows with Alpaca's columns, or with a list of messages, parsed into messages."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from isobatch.core.errors import UserError
from isobatch.data.readers import did_you_mean

Message = dict[str, str]
"""`role` and `content`, as chat templates read them. A user's message may have `input`, what it is about: the
template `alpaca` parts the two, and every other one gets them as one text (`ChatTemplate.placed`)."""

ROLES = ("system", "user", "assistant")
MESSAGE_KEYS = (("role", "from"), ("content", "value"))
"""The fields of a message: as OpenAI calls each, and as ShareGPT does."""
ROLE_ALIASES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
ROLE_ALIASES |= {"model": "assistant", "developer": "system"}
ALPACA_COLUMNS = ("instruction", "output")
ALPACA_ANSWERS = ("output", "response", "completion", "answer")
"""Columns of an instruction's answer; the first that a row has is read."""
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
HISTORY = "history"
"""Earlier questions and answers, as pairs or messages; a text is read as an input."""
INPUT_COLUMNS = (HISTORY, "input", "context")
"""Columns beside a question of any form with what it is about, in the order in which they are written."""
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
    main = main_columns(row, chat_format)
    if chat_format == "instruction":
        messages = _parse_alpaca(row, where, main[1])
    elif len(main) == 2:
        question = _parse_part(row, main[0], "user", where)
        messages = [*question, *_parse_part(row, main[1], "assistant", where)]
    else:
        messages = parse_message_list(row, chat_format, where)
    require_answers(messages)
    messages = with_fields_beside(row, messages, main)
    require_answers(messages)
    return messages


def main_columns(row: Mapping[str, Any], chat_format: str) -> tuple[str, ...]:
    """The columns of a row that make its format: of the question and the answer, or that of messages."""
    if chat_format == "instruction":
        return "instruction", next((name for name in ALPACA_ANSWERS if name in row), "output")
    return _pair_columns(chat_format) or (chat_format,)


def parse_question(row: Mapping[str, Any], where: str, chat_format: str) -> list[Message]:
    """The messages of a row up to the last question; an answer behind it is left out.

    Raises UserError for a row of another shape, or without a question.
    """
    main = main_columns(row, chat_format)
    if chat_format == "instruction":
        messages = [{"role": "user", "content": _text_field(row, "instruction", where)}]
    elif len(main) == 2:
        messages = _parse_part(row, main[0], "user", where)
    else:
        messages = parse_message_list(row, chat_format, where)
    messages = with_fields_beside(row, messages, main)
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


def _parse_alpaca(row: Mapping[str, Any], where: str, answer_column: str) -> list[Message]:
    instruction, answer = _text_field(row, "instruction", where), _text_field(row, answer_column, where)
    given = [_text_field(row, name, where) for name in INPUT_COLUMNS if name in row and name != HISTORY]
    if not answer.strip():
        raise SkippedRowError("an empty answer")
    if not "".join([instruction, *given]).strip():
        raise SkippedRowError("an empty instruction")
    return [{"role": "user", "content": instruction}, {"role": "assistant", "content": answer}]


def _texts_beside(row: Mapping[str, Any], main: Collection[str]) -> dict[str, str]:
    """Column -> its text, of those known columns beside the main ones that have one."""
    columns = [name for name in (*SYSTEM_COLUMNS, *INPUT_COLUMNS) if name not in main]
    return {name: row[name] for name in columns if isinstance(row.get(name), str) and row[name].strip()}


def _history_beside(row: Mapping[str, Any], main: Collection[str]) -> list[Message]:
    """The earlier messages of a row; none where its history has another shape."""
    turns = None if HISTORY in main else row.get(HISTORY)
    if isinstance(turns, list) and all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
        roles = ("user", "assistant")
        said = [
            {"role": r, "content": text or ""} for pair in turns for r, text in zip(roles, pair, strict=True)
        ]
        is_text = all(isinstance(message["content"], str) for message in said)
        return [m for m in said if m["role"] == "assistant" or m["content"].strip()] if is_text else []
    with contextlib.suppress(UserError):
        return parse_message_list(row, HISTORY, HISTORY) if turns else []
    return []


def with_fields_beside(
    row: Mapping[str, Any], messages: Sequence[Message], main: Collection[str]
) -> list[Message]:
    """The messages of a row with what its other known columns say.

    A system text comes first, before one that the messages have; the history follows; the first question that
    is the row's own gets the rest as its `input`. `main`: the columns that the messages are from.
    """
    beside, found = _texts_beside(row, main), list(messages)
    told = [text for name, text in beside.items() if name in SYSTEM_COLUMNS]
    given = "\n".join(text for name, text in beside.items() if name not in SYSTEM_COLUMNS)
    first = next((n for n, m in enumerate(found) if m["role"] != "system"), len(found))
    if given:
        asked = next((n for n, m in enumerate(found) if m["role"] == "user"), None)
        if asked is None:
            found.insert(first, {"role": "user", "content": given})
        else:
            found[asked] = found[asked] | {"input": given}
    found[first:first] = _history_beside(row, main)
    if told:
        texts = [*told, *(m["content"] for m in found[:1] if first)]
        found[: min(first, 1)] = [{"role": "system", "content": "\n\n".join(dict.fromkeys(texts))}]
    return found


def unread_fields(row: Mapping[str, Any], main: Collection[str], reads_beside: bool = True) -> list[str]:
    """The fields of a row that say something and that none of its messages holds; each name once.

    `reads_beside`: whether the messages have passed `with_fields_beside`.
    """
    read = [*main]
    if reads_beside:
        read += [*_texts_beside(row, main), *([HISTORY] if _history_beside(row, main) else [])]
    names = [str(name) for name, value in row.items() if name not in read and _says_something(value)]
    turns = [(name, turn) for name in read for turn in _turns(row.get(name))]
    names += [f"{name}.{key}" for name, turn in turns for key in _unread_keys(turn)]
    return list(dict.fromkeys(names))


def _says_something(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else value not in (None, [], {})


def _turns(value: Any) -> list[Mapping[str, Any]]:
    found = [value] if isinstance(value, Mapping) else value if isinstance(value, list) else []
    return [turn for turn in found if isinstance(turn, Mapping)]


def _unread_keys(turn: Mapping[str, Any]) -> Iterator[str]:
    read = [_key_of(turn, *names) for names in MESSAGE_KEYS]
    return (str(key) for key, value in turn.items() if key not in read and _says_something(value))


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
        lists = any(isinstance(values, list) for values in turns.values())  # else a message by itself
        objects = zip(*turns.values(), strict=True) if lists else [turns.values()]
        turns = [dict(zip(turns, values, strict=True)) for values in objects]
    if not isinstance(turns, list | None):
        raise UserError(f"{where}: {column} holds {type(turns).__name__}, not a list of messages")
    return [_parse_message(turn, f"{where}: message {number}") for number, turn in enumerate(turns or [], 1)]


def _parse_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise UserError(f'{where} is {type(turn).__name__}, not an object with "role" and "content"')
    role, content = (_string_field(turn, *names, where) for names in MESSAGE_KEYS)
    if (known := ROLE_ALIASES.get(role.lower(), role.lower())) not in ROLES:
        names = [*ROLES, *ROLE_ALIASES]
        raise UserError(
            f"{where} is by {role!r}{did_you_mean(role, names)}: a role is one of {', '.join(ROLES)}"
        )
    return {"role": known, "content": content}


def _string_field(turn: Mapping[str, Any], name: str, other: str, where: str) -> str:
    """The text under `name`, or under `other` as ShareGPT calls it."""
    found = turn.get(_key_of(turn, name, other))
    if found is None:
        raise UserError(f"{where} has no {name} (or {other}); it has: {key_names(turn)}")
    if not isinstance(found, str):
        raise UserError(f"{where}: {name} holds {type(found).__name__}, not text")
    return found


def _key_of(turn: Mapping[str, Any], name: str, other: str) -> str:
    """Which of two names of a field a message uses."""
    return name if turn.get(name) is not None else other
