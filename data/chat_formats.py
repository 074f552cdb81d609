"""Chat formats: rows with Alpaca's columns, or with a list of messages, parsed into messages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.core.package import table_beside
from isobatch.data.tables.delimited import USUAL_COLUMNS, simple_name

Message = dict[str, Any]
"""`role` and `content`, texts, as chat templates read them. An answer may have `reasoning_content`, the
thought before it; `tool_calls`, as OpenAI has them, but with arguments as an object; and UNLEARNT, an empty
text: it is read, and not learnt. A tool's result may have `name` and `tool_call_id`; a user's message
`input`, what it is about: the template `alpaca` parts the two, and every other one gets them as one text
(`ChatTemplate.placed`)."""
UNLEARNT = "unlearnt"

ROLES = ("system", "user", "assistant", "tool")
THOUGHT = "reasoning_content"
THOUGHT_KEYS = (THOUGHT, "reasoning", "thinking")
"""Fields of an answer, and types of a part of it, with what was thought before."""
CALL_KEYS = ("tool_calls", "function_call")
CALL_ROLES = ("function_call", "tool_call")
"""Roles of ShareGPT's whose text is a call, or a list of them, as JSON."""
RESULT_KEYS = ("name", "tool_call_id")
MESSAGE_KEYS = ("role", "content", "from", "value", *THOUGHT_KEYS, *CALL_KEYS)
"""The fields of a message: as OpenAI calls them, and as ShareGPT does."""
TOOL_COLUMNS = ("tools", "functions")
VALUES_COLUMN = "chat_template_kwargs"
"""An object of a row: further variables of the chat template."""
WEIGHT_KEYS = ("weight", "loss_weight", "loss_mask", "train", "training", "loss")
"""Fields of a message that say whether it is learnt."""
NO_MEDIA = "only text is learnt: leave such rows out"
_TABLES = table_beside(__file__)
NOT_READ: dict[str, str] = _TABLES["not_read"]
"""Roles, fields of a message, or types of a part of its content -> what is said of them."""
ROLE_ALIASES: dict[str, str] = _TABLES["roles"]
ALPACA_COLUMNS = ("instruction", "output")
ALPACA_ANSWERS = ("output", "response", "completion", "answer")
"""Columns of an instruction's answer; the first that a row has is read."""
SYSTEM_COLUMNS = ("system", "system_prompt", "system_message")
HISTORY = "history"
"""Earlier questions and answers, as pairs or messages; a text is read as an input."""
INPUT_COLUMNS = (HISTORY, "input", "context")
"""Columns beside a question of any form with what it is about, in the order in which they are written."""
CHAT_COLUMNS = ("messages", "conversations", "conversation")
ANSWERS_OF = USUAL_COLUMNS["answers"]
"""Columns of a question -> of its answer; both are texts, or lists of messages as TRL has them."""
KNOWN = {simple_name(name): name for name in USUAL_COLUMNS["read"]["columns"]}
"""Simple name -> a column that rows of any kind are read from."""
_BETWEEN = " -> "
ACCEPTED = (
    "--text-column names that of plain text; conversations are read from `messages`, `instruction` and"
    " `output`, `prompt` and `completion`, `question` and `answer`, `Frage` and `Antwort`, ...: call them so"
)


class SkippedRowError(Exception):
    """A row has nothing to learn from. The reader counts it, with this reason, and goes on."""


def known_names(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the columns of KNOWN under these names, however they are written, as `Question` or
    `system-prompt`. One whose name is there already stays.
    """
    known = {name: KNOWN.get(simple_name(str(name)), name) for name in row}
    return {name if known[name] in row else known[name]: value for name, value in row.items()}


def known_rows(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Located rows with `known_names`."""
    return ((where, known_names(row)) for where, row in rows)


def detect_chat_format(columns: Sequence[str]) -> str | None:
    """The name of the format: the column of messages, `instruction`, or `question -> answer` of the columns
    that hold them; None for plain text.

    One of Alpaca's two columns is enough, but where there is a `text` column both are needed.
    """
    columns = [*known_names(dict.fromkeys(columns))]
    if chats := [name for name in CHAT_COLUMNS if name in columns]:
        return chats[0]
    alpaca = [name for name in ALPACA_COLUMNS if name in columns]
    if len(alpaca) == 2:
        return "instruction"
    if "text" in columns:
        return None
    if "instruction" in columns:
        return "instruction"
    asked = (
        f"{name}{_BETWEEN}{answer}"
        for name, answers in ANSWERS_OF.items()
        for answer in answers
        if {name, answer} <= {*columns}
    )
    return next(asked, "instruction" if alpaca else None)


def main_columns(row: Mapping[str, Any], chat_format: str) -> tuple[str, ...]:
    """The columns of a row that make its format: of the question and the answer, or that of messages."""
    question, _, answer = chat_format.partition(_BETWEEN)
    if chat_format == "instruction":
        answer = next((name for name in ALPACA_ANSWERS if name in row), "output")
    return (question, answer) if answer else (question,)


def parse_messages(row: Mapping[str, Any], where: str, chat_format: str) -> list[Message]:
    """The messages of a row. `where` names the row in errors.

    Raises UserError for a row of another shape, SkippedRowError for one without an answer.
    """
    main = main_columns(row, chat_format)
    messages = with_fields(row, _parse_columns(row, main, where), main)
    require_answers(messages)
    if chat_format == "instruction" and not any(map(asks_something, messages[-2:-1])):
        raise SkippedRowError("an empty instruction")
    return messages


def parse_question(row: Mapping[str, Any], where: str, chat_format: str) -> list[Message]:
    """The messages of a row up to the last question; an answer behind it is left out.

    Raises UserError for a row of another shape, or without a question.
    """
    main = main_columns(row, chat_format)
    messages = with_fields(row, _parse_columns(row, main[:1], where), main)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not any(map(asks_something, messages[-1:])):
        raise UserError(f"{where}: asks nothing: its last message must be a question")
    return messages


def require_answers(messages: Sequence[Message]) -> None:
    """Raise SkippedRowError where no message is the assistant's, one of those is empty, or none is learnt."""
    answers = [m for m in messages if m["role"] == "assistant"]
    if not answers:
        raise SkippedRowError("no answer")
    if not all(answer["content"].strip() or "tool_calls" in answer for answer in answers):
        raise SkippedRowError("an empty answer")
    if all(UNLEARNT in answer for answer in answers):
        raise SkippedRowError("no answer to learn, as their weights are 0")


def asks_something(message: Message) -> bool:
    """Whether a message has a text or an input."""
    return bool((message["content"] + message.get("input", "")).strip())


def texts_beside(row: Mapping[str, Any], main: Sequence[str]) -> dict[str, str]:
    """Column -> its text, of those known columns beside the main ones that have one."""
    columns = [name for name in (*SYSTEM_COLUMNS, *INPUT_COLUMNS) if name not in main]
    return {name: row[name] for name in columns if isinstance(row.get(name), str) and row[name].strip()}


def history_beside(row: Mapping[str, Any], main: Sequence[str]) -> list[Message]:
    """The earlier messages of a row; none where its history has another shape."""
    if not (turns := row.get(HISTORY)) or HISTORY in main:
        return []
    if isinstance(turns, list) and all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
        said = ((role, text or "") for pair in turns for role, text in zip(ROLES[1:3], pair, strict=True))
        turns = [{"role": role, "content": text} for role, text in said]
    with contextlib.suppress(UserError):
        return parse_message_list({HISTORY: turns}, HISTORY, HISTORY)
    return []


def with_fields(row: Mapping[str, Any], messages: Sequence[Message], main: Sequence[str]) -> list[Message]:
    """The messages of a row with what its other known columns say.

    A system text comes first, before one that the messages have; the history follows; the first question that
    is the row's own gets the rest as its `input`. `main`: the columns that the messages are from.
    """
    beside, found = texts_beside(row, main), list(messages)
    told = [beside.pop(name) for name in SYSTEM_COLUMNS if name in beside]
    asked = next((number for number, m in enumerate(found) if m["role"] == "user"), None)
    if beside and asked is not None:
        found[asked] = found[asked] | {"input": "\n".join(beside.values())}
    own = [m["content"] for m in found[:1] if m["role"] == "system"]
    system = "\n\n".join(dict.fromkeys([*told, *own]))
    first = [{"role": "system", "content": system}] if told or own else []
    return [*first, *history_beside(row, main), *found[len(own) :]]


def _parse_columns(row: Mapping[str, Any], columns: Sequence[str], where: str) -> list[Message]:
    """The messages in the columns of a question and its answer, or in one that holds both."""
    messages: list[Message] = []
    for name, role in zip(columns, ROLES[1:3], strict=False):
        found = read_column(row, name, where)
        messages += [{"role": role, "content": found}] if isinstance(found, str) else found
    return messages


def read_column(row: Mapping[str, Any], name: str, where: str) -> str | list[Message]:
    """The text in a column, or its messages. Raises UserError for what is neither."""
    value = require_field(row, name, where)
    if isinstance(value, list | Mapping) or name in CHAT_COLUMNS:
        return parse_message_list(row, name, where)
    if not isinstance(value, str | None):
        raise UserError(f"{where}: {name} holds {type(value).__name__}, not text or a list of messages")
    return value or ""


def require_field(row: Mapping[str, Any], name: str, where: str) -> Any:
    """A field of a row. Raises UserError where it has none of this name."""
    if name not in row:
        raise UserError(f"{where}: has no {name}{nearest_hint(name, list(row))}; it has: {key_names(row)}")
    return row[name]


def key_names(row: Mapping[str, Any]) -> str:
    """The names of a row's columns, for messages."""
    return ", ".join(map(str, list(row)[:20])) or "nothing"


def turns_in(value: Any) -> Any:
    """The messages of a column as a list: an object is one, or has a list for each field. Else the value."""
    if isinstance(value, Mapping):
        columns = list(value.values())
        if isinstance(value.get("role") or value.get("from"), str):
            return [value]
        if columns and all(isinstance(v, list) for v in columns) and len(set(map(len, columns))) == 1:
            return [dict(zip(value, fields, strict=True)) for fields in zip(*columns, strict=True)]
    return value


def parse_message_list(row: Mapping[str, Any], column: str, where: str) -> list[Message]:
    """The messages in a column of a row. `where` names the row. Raises UserError where they are none."""
    turns = turns_in(require_field(row, column, where))
    if not isinstance(turns, list | None):
        raise UserError(f"{where}: {column} holds {type(turns).__name__}, not a list of messages")
    if turns and column not in CHAT_COLUMNS and all(isinstance(turn, str) for turn in turns):
        raise UserError(f"{where}: {column} holds a list of {len(turns)} texts, not one: make a row of each")
    place = where if column in CHAT_COLUMNS else f"{where}: {column}"
    found = [_parse_message(turn, f"{place}: message {number}") for number, turn in enumerate(turns or [], 1)]
    _require_calls(found, place)
    return found


def _require_calls(messages: Sequence[Message], place: str) -> None:
    """Raise UserError for a tool's result that answers no call; a call may be written as text."""
    caller: Message = {}
    for number, message in enumerate(messages, 1):
        if message["role"] != "tool":
            caller = message
            continue
        calls = caller.get("tool_calls", [])
        ids = {call["id"] for call in calls if "id" in call} | {message.get("tool_call_id")}
        as_text = caller.get("role") == "assistant" and {"{", "<"} & {*caller["content"]}
        if not (calls or as_text) or (len(ids) > len(calls) > 0 and None not in ids):
            raise UserError(
                f"{place}: message {number} is a tool's result without a call: the answer before it needs"
                " `tool_calls`, or leave the row out"
            )


def _parse_message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise UserError(f'{where} is {type(turn).__name__}, not an object with "role" and "content"')
    role = _found(turn, "role", "from", where)
    if not isinstance(role, str):
        raise UserError(f"{where}: role holds {type(role).__name__}, not text")
    if (known := ROLE_ALIASES.get(role.lower(), role.lower())) not in ROLES:
        hint = nearest_hint(role, [*ROLES, *ROLE_ALIASES])
        raise UserError(f"{where} is by {role!r}{hint}: a role is one of {', '.join(ROLES)}")
    message: Message = {"role": known, "content": ""}
    thoughts = [turn[k] for k in THOUGHT_KEYS if isinstance(turn.get(k), str) and turn[k].strip()]
    calls = [turn[k] for k in CALL_KEYS if turn.get(k)]
    given = turn.get("content") if turn.get("content") is not None else turn.get("value")
    if role.lower() in CALL_ROLES:
        calls.append(_found(turn, "content", "value", where))
    elif given is not None or not calls:
        parts = _parts(_found(turn, "content", "value", where), known, where)
        thoughts += [text for kind, text in parts if kind in THOUGHT_KEYS]
        calls += [text for kind, text in parts if kind in CALL_ROLES]
        message["content"] = "".join(text for kind, text in parts if kind == "text")
    if known == "assistant":
        message |= {THOUGHT: "\n\n".join(dict.fromkeys(thoughts))} if thoughts else {}
        if found := [call for one in calls for call in _calls(one, where)]:
            message["tool_calls"] = found
        return message | ({} if _is_learnt(turn, where) else {UNLEARNT: ""})
    _is_learnt(turn, where)
    return message | {k: str(turn[k]) for k in RESULT_KEYS if known == "tool" and turn.get(k)}


def _found(turn: Mapping[str, Any], name: str, other: str, where: str) -> Any:
    """What is under `name`, or under `other` as ShareGPT calls it; of null an empty text."""
    found = turn.get(name) if turn.get(name) is not None else turn.get(other)
    if {name, other}.isdisjoint(turn):
        raise UserError(f"{where} has no {name} (or {other}); it has: {key_names(turn)}")
    return "" if found is None else found


def _parts(value: Any, role: str, where: str) -> list[tuple[str, str]]:
    """(type, text) of each part of a content. A tool's result may be any JSON."""
    if isinstance(value, str):
        return [("text", value)]
    is_parts = isinstance(value, list) and all(
        isinstance(p, str) or (isinstance(p, Mapping) and "type" in p) for p in value if p
    )
    if role == "tool" and not is_parts:
        return [("text", json.dumps(value, ensure_ascii=False))]
    if not isinstance(value, list):
        raise UserError(f"{where}: content holds {type(value).__name__}, not text")
    found = []
    for part in value:
        fields = part if isinstance(part, Mapping) else {"text": part}
        kind = str(fields.get("type", "text"))
        names = ("text", "value", "content", kind)
        text = next((fields[name] for name in names if fields.get(name) is not None), None)
        is_known = kind == "text" or (role == "assistant" and kind in (*THOUGHT_KEYS, *CALL_ROLES))
        if not is_known or not isinstance(text, str | Mapping) or (kind == "text" and text != str(text)):
            raise UserError(f"{where}: a part of its content is {kind!r}: {NOT_READ.get(kind, NO_MEDIA)}")
        found.append((kind, text))
    return found  # type: ignore[return-value]  # a call may be an object


def _from_json(value: Any, where: str) -> Any:
    """A value that may be given as JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise UserError(f"{where} is no JSON ({error}): mend it, or leave the row out") from None


def _calls(given: Any, where: str) -> list[dict[str, Any]]:
    """The calls in a value: one or a list of them, or the JSON of that."""
    return _each(_call, _from_json(given, f"{where}: its call"), f"{where}: call")


def _each(parse: Callable[[Any, str], dict[str, Any]], given: Any, where: str) -> list[dict[str, Any]]:
    """What is parsed of one value, or of each in a list."""
    values = given if isinstance(given, list) else [given]
    return [parse(one, f"{where} {number}") for number, one in enumerate(values, 1)]


ARGUMENTS = ("arguments", "parameters", "input")
"""A call's arguments, as OpenAI, Llama and Anthropic name them."""


def _call(given: Any, where: str) -> dict[str, Any]:
    call = _from_json(given, where)
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else function
    if not isinstance(name, str) or not name.strip():
        raise UserError(f'{where} has no name: a call is {{"name": ..., "arguments": {{...}}}}')
    fields = function if isinstance(function, Mapping) else call
    given = next((fields[name] for name in ARGUMENTS if fields.get(name) is not None), None)
    arguments = _from_json(given or {}, f"{where}: its arguments")
    if not isinstance(arguments, Mapping):
        raise UserError(f"{where}: its arguments hold {type(arguments).__name__}, not an object")
    own = {"id": str(call["id"])} if call.get("id") else {}
    return own | {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def template_values(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a row gives the chat template beside its messages: `tools`, and those of VALUES_COLUMN.

    A tool is {"type": "function", "function": {"name", "description", "parameters"}}, as OpenAI has it; one
    that is only its function becomes such. Raises UserError for another shape.
    """
    values = _from_json(row.get(VALUES_COLUMN) or {}, f"{where}: {VALUES_COLUMN}")
    if not isinstance(values, Mapping) or {"messages", "add_generation_prompt", "tools"} & values.keys():
        raise UserError(f"{where}: {VALUES_COLUMN} is an object of variables that the chat template reads")
    tools: list[Any] = []
    for name in TOOL_COLUMNS:
        found = _from_json(row.get(name) or [], f"{where}: {name}")
        tools += _each(_tool, found, f"{where}: {name}: tool")
    return {k: v for k, v in values.items() if v is not None} | ({"tools": tools} if tools else {})


def _tool(given: Any, where: str) -> dict[str, Any]:
    tool = _from_json(given, where)
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        form = '{"name": ..., "description": ..., "parameters": ...}'
        raise UserError(f"{where} has no name: a tool is {form}")
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _is_learnt(turn: Mapping[str, Any], where: str) -> bool:
    """Whether a message's weight lets it be learnt."""
    given = {key: turn[key] for key in WEIGHT_KEYS if turn.get(key) is not None}
    for key, value in given.items():
        if value not in (0, 1):
            raise UserError(f"{where}: {key} is {value!r}: an answer is learnt or not, so give 1 or 0")
    return all(given.values())
