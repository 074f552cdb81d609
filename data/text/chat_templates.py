"""Chat templates: write a conversation as text, in segments that are answers or prompts.

A template is Jinja, rendered as transformers does: the tokenizer's own, or one of four that are built in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.data import tokenizers
from isobatch.data.chat_formats import THOUGHT, UNLEARNT
from isobatch.data.text import jinja_sandbox

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from isobatch.data.chat_formats import Message
    from isobatch.data.text.jinja_sandbox import Rendered

TURN_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom|>", "[SEP]")
"""Usual tokens at the end of a turn, for tokenizers whose settings name no end of text."""

_ALPACA = """\
{{ BEGIN }}{% if not messages or messages[0].role != 'system' %}Below is an instruction that describes a task\
{% if messages and messages[0].input %}, paired with an input that provides further context{% endif %}. \
Write a response that appropriately completes the request.{{ '\\n\\n' }}{% endif %}\
{% for message in messages %}{% if message.role == 'assistant' %}### Response:
{{ message.content }}{{ eos_token }}{{ '\\n\\n' }}{% elif message.role == 'user' %}### Instruction:
{{ message.content }}{{ '\\n\\n' }}{% if message.input %}### Input:
{{ message.input }}{{ '\\n\\n' }}{% endif %}{% else %}{{ message.content }}{{ '\\n\\n' }}\
{% endif %}{% endfor %}{% if add_generation_prompt %}### Response:{{ '\\n' }}{% endif %}"""
"""Stanford Alpaca's wording (train.py, PROMPT_DICT), with the line break of its published texts."""

_CHATML = """\
{{ BEGIN }}{% if tools %}<|im_start|>system{{ '\\n' }}{% if messages[0].role == 'system' %}\
{{ messages[0].content + '\\n\\n' }}{% endif %}# Tools

You may call functions. Their signatures are within <tools></tools>:
<tools>{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n' }}</tools>

For each call, return a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call>{{ END }}{{ '\\n' }}{% endif %}\
{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}\
<|im_start|>{{ 'user' if message['role'] == 'tool' else message['role'] }}{{ '\\n' }}\
{% if message['role'] == 'tool' %}<tool_response>{{ '\\n' + message['content'] + '\\n' }}</tool_response>\
{% else %}{{ message['content'] }}{% if 'input' in message %}{{ '\\n' + message['input'] }}{% endif %}\
{% for call in (message['tool_calls'] if 'tool_calls' in message else []) %}\
{{ '\\n' if not loop.first or message['content'][-1:] not in ('', '\\n') else '' }}\
<tool_call>{{ '\\n' }}{{ call.function | tojson }}{{ '\\n' }}</tool_call>{% endfor %}{% endif %}\
{{ END }}{{ '\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"""
"""Tools as Qwen 2.5 and Hermes have them. In the sandbox a subscript takes a third of an attribute's time."""

_PLAIN = """\
{{ BEGIN }}{% for message in messages %}{{ message.content }}\
{% if message.input %}{{ '\\n' + message.input }}{% endif %}\
{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"""

_VERBATIM = """\
{{ BEGIN }}{% for message in messages %}{{ message.content }}\
{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"""

VERBATIM = "verbatim"
"""The name of the template that writes nothing between the messages."""
_TURNS = """\
{{ BEGIN }}{% for message in messages %}{% if message.role == 'user' %}USER\
{% elif message.role == 'assistant' %}ANSWER{% else %}SYSTEM{% endif %}{% endfor %}\
{% if add_generation_prompt %}ASK{% endif %}"""


def _family(user: str, answer: str, system: str = "") -> str:
    """A template of turns, in each of which TEXT is the message's; an answer begins where its TEXT does.

    Without `system` it has no place for a system text, and refuses it.
    """
    refuses = "{{ raise_exception('no place for a system text') }}"
    parts = {
        "USER": user,
        "ANSWER": answer,
        "SYSTEM": system or refuses,
        "ASK": answer.partition("TEXT")[0].rstrip(" "),
    }
    text = _TURNS
    for name, part in parts.items():
        text = text.replace(name, part.replace("\n", "{{ '\\n' }}"))
    return text.replace("TEXT", "{{ message.content }}")


_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\nTEXT{{{{ END }}}}"
BUILT_IN = {
    **{"alpaca": _ALPACA, "chatml": _CHATML, "plain": _PLAIN, VERBATIM: _VERBATIM, "qwen": _CHATML},
    "llama3": _family(*map(_HEADER.format, ("user", "assistant", "system"))),
    "gemma": _family(*map("<start_of_turn>{}\nTEXT{{{{ END }}}}\n".format, ("user", "model"))),
    "phi3": _family(*map("<|{}|>\nTEXT{{{{ END }}}}\n".format, ("user", "assistant", "system"))),
    "zephyr": _family(*map("<|{}|>\nTEXT{{{{ eos_token }}}}\n".format, ("user", "assistant", "system"))),
    "mistral": _family("[INST] TEXT [/INST]", " TEXT{{ eos_token }}"),
}
"""By name; the last ones are short forms of what the families of models were trained with."""
ENDS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}
ENDS |= dict.fromkeys(("chatml", "qwen"), TURN_END_TOKENS[0])
"""The token that ends a turn, in a vocabulary that has it; else the end of a text does."""
CHOICES = "alpaca|chatml|plain"
TEMPLATE_FILE = ".jinja"
OWN_TEXTS = frozenset(
    text.replace("{{ BEGIN }}", begin).replace("{{ END }}", end)
    for name, text in BUILT_IN.items()
    for begin in ("{{ bos_token }}", "")
    for end in {ENDS.get(name, ""), "{{ eos_token }}", ""}
)
"""Every form of the built-in templates: a received run may call any text by their names."""


def check_name(name: str, own: Sequence[str] = ()) -> None:
    """Raise UserError where --template is neither a name, one of a task's `own` too, nor a file."""
    names = ["auto", *(n for n in BUILT_IN if n != VERBATIM), *own]
    if name.endswith(TEMPLATE_FILE):
        if not Path(name).expanduser().is_file():
            raise UserError(f"--template {name}: there is no such file")
    elif name not in names:
        raise UserError(
            f"--template {name}{nearest_hint(name, names)}: must be one of {', '.join(names)}, or a file that"
            f" ends in {TEMPLATE_FILE}"
        )


def text_of(name: str) -> str:
    """What a --template stands for in a cache's key: the text of a file, else the name."""
    return Path(name).expanduser().read_text(encoding="utf-8") if name.endswith(TEMPLATE_FILE) else name


def parse_values(given: Sequence[str]) -> dict[str, Any]:
    """--template-kwargs NAME=VALUE,... as variables; true, false and numbers are such. Raises UserError."""
    values: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        is_ours = name in ("messages", "tools", "add_generation_prompt") or name.endswith("_token")
        if not equals or not name.isidentifier() or is_ours:
            raise UserError(f"--template-kwargs {one}: write NAME=VALUE, as in enable_thinking=false")
        values[name] = value
        with contextlib.suppress(ValueError):
            values[name] = json.loads(value.lower() if value.lower() in ("true", "false") else value)
    return values


def _reads(jinja: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", jinja) is not None


def with_defaults(jinja: str, values: Mapping[str, Any]) -> str:
    """A template in which these variables have values of their own, where none is given.

    So the saved tokenizer, `chat` and `serve` write prompts as training did. Raises UserError for a variable
    that it does not read.
    """
    for name in values:
        if not _reads(jinja, name):
            raise UserError(f"--template-kwargs {name}: the chat template does not read it: leave it out")
    return (
        "".join(
            f"{{% set {name} = {json.dumps(value)} if {name} is not defined else {name} %}}"
            for name, value in values.items()
        )
        + jinja
    )


def template_file(folder: Path | None) -> Path | None:
    """The chat_template.jinja beside a tokenizer, which comes before what its settings say."""
    found = folder and (folder if folder.is_dir() else folder.parent) / tokenizers.CHAT_TEMPLATE_FILE
    return found if found and found.is_file() else None


def read_tokenizer_template(folder: Path) -> str | None:
    """The template in chat_template.jinja beside a tokenizer, else in tokenizer_config.json; or None."""
    if file := template_file(folder):
        return file.read_text(encoding="utf-8")
    settings = (folder if folder.is_dir() else folder.parent) / "tokenizer_config.json"
    found = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    template = found.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {t.get("name"): t.get("template") for t in template}.get("default")
    return template if isinstance(template, str) and template.strip() else None


TOKENIZER_TEMPLATE = "tokenizer"
"""The name of a template that came with the tokenizer."""
_PROBE_ANSWER = "0a1b2c the answer 3d4e5f"
_PROBE_TURN = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": _PROBE_ANSWER}]
EVERYWHERE = 1 << 31
NOTHING: Mapping[str, Any] = {}
OR_CHATML = ", or choose --template chatml, which writes tools and calls"
MOVED = "the chat template has no place for the system text, which is put before the question"


class ChatSegment(NamedTuple):
    """A part of a rendered conversation: an answer of the assistant, or the text before or after one.

    An answer's text lacks what ends it, which is appended to its tokens.
    """

    text: str
    is_answer: bool
    messages: tuple[tuple[int, int], ...] = ()
    """Where the messages' own texts begin and end in a prompt; what lies between is the template's."""
    is_context: bool = False
    """Whether it is an answer that is read, and not learnt."""
    end: str | None = None
    """The text that ends an answer; None for the template's `end`."""
    turn: int = -1
    """Of an answer, the number of the assistant's message."""

    @property
    def is_learnt(self) -> bool:
        return self.is_answer and not self.is_context


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How conversations are written as text. Its fields suffice to write prompts as in training."""

    name: str
    """One of BUILT_IN, a file; or tokenizer, for the tokenizer's own."""
    jinja: str
    """The template; also valid as `chat_template` of a transformers tokenizer."""
    end: str
    """The token that ends an answer."""
    end_id: int
    """Its id."""
    closing: str = ""
    """The text that the template writes after an answer, ending with `end`; empty where it writes none."""
    tokens: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Variables of the template: bos_token, eos_token, ..."""
    ends: Sequence[str] = field(default=(), hash=False)
    """Special tokens that the template writes: one of them ends an answer or a call."""

    def placed(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as this template writes all of them.

        An `input` joins its question's text, but for the template that parts the two. A system text for which
        the template has no place is put before the question that follows.
        """
        kept = [self._written(message) for message in messages]
        systems = [number for number, message in enumerate(kept) if message["role"] == "system"]
        for number in [n for n in reversed(systems) if n >= _system_places(self)]:
            told = kept.pop(number)["content"]
            asked = [n for n, m in enumerate(kept) if n >= number and m["role"] == "user"]
            place = slice(asked[0], asked[0] + 1) if asked else slice(number, number)
            kept[place] = [_message("user", "\n\n", told, *(m["content"] for m in kept[place]))]
        return kept

    def _written(self, message: Message) -> Message:
        """A message with the fields that the template reads: a thought may be one, or the answer's beginning;
        arguments an object, or JSON text.
        """
        found = dict(message)
        if not (self.name == "alpaca" and self.jinja in OWN_TEXTS):
            found = _message(found["role"], "\n", found["content"], found.pop("input", "")) | {
                k: v for k, v in found.items() if k not in ("role", "content")
            }
        if THOUGHT in found and not _READS_THOUGHTS.search(self.jinja):
            thought, content = found.pop(THOUGHT), found["content"]
            found["content"] = f"<think>\n{thought.strip()}\n</think>\n\n{content}"
        if THOUGHT in found:
            found["thinking"] = found[THOUGHT]
        if "tool_calls" in found and _reads_text_calls(self):
            found["tool_calls"] = _calls_as_text(found["tool_calls"])
        return found

    def notes_of_fields(self, messages: Sequence[Message], written: Sequence[ChatSegment]) -> list[str]:
        """A note of each kind of message that the text of a conversation has elsewhere, or not."""
        placed, text = self.placed(messages), "".join(segment.text for segment in written)
        before, after = ([m["role"] for m in one].count("system") for one in (messages, placed))
        lost = [m for m in placed if not _is_in(m["content"], text)]
        kinds = {("thoughts (<think>)" if "</think>" in m["content"] else "text", m["role"]) for m in lost}
        kinds |= {("thoughts (<think>)", m["role"]) for m in placed if not _is_in(m.get(THOUGHT, ""), text)}
        notes = [
            f"the chat template leaves out {what} of a message by the {role}" for what, role in sorted(kinds)
        ]
        return [MOVED, *notes] if after < before else notes

    def samples(
        self, messages: Sequence[Message], where: str, values: Mapping[str, Any] = NOTHING
    ) -> list[list[ChatSegment]]:
        """A conversation in segments, so that every answer is learnt once, and as the model is to give it.

        An answer begins where its prompt, rendered for generation, ends. Many templates drop an earlier
        answer's thought, or write it otherwise, once the conversation goes on. Such an answer is learnt in a
        sample of its own, which ends with it; elsewhere it is context.

        `where` names the conversation in errors; `values` are further variables, as `template_values` gives
        them. Raises UserError where the template cannot write it.
        """
        placed = self.placed(messages)
        wanted = {n for n, m in enumerate(placed) if m["role"] == "assistant" and UNLEARNT not in m}
        found: list[list[ChatSegment]] = []
        end = len(placed)
        while wanted or not found:
            segments, learnt = self.split(placed[:end], where, values, wanted)
            found += [segments] if learnt or not wanted else []
            wanted -= learnt
            end = max(wanted, default=0) + 1
        return found

    def segments(
        self, messages: Sequence[Message], where: str, values: Mapping[str, Any] = NOTHING
    ) -> list[ChatSegment]:
        """A conversation in segments, once, with the answers as they stand in the whole."""
        placed = self.placed(messages)
        return self.split(placed, where, values, None)[0]

    def prompt_segments(
        self, messages: Sequence[Message], where: str = "the prompt", values: Mapping[str, Any] = NOTHING
    ) -> list[ChatSegment]:
        """The segments up to where the next answer begins; to be tokenized one by one, as in training."""
        found = self.split(self.placed(messages), where, values, None, for_answer=True)[0]
        ended = ([p] if p.end is None else [_prompt_segment(t, ()) for t in (p.text, p.end)] for p in found)
        return [part for parts in ended for part in parts]

    def split(
        self,
        messages: Sequence[Message],
        where: str,
        values: Mapping[str, Any],
        wanted: set[int] | None,
        for_answer: bool = False,
    ) -> tuple[list[ChatSegment], set[int]]:
        """(segments, the numbers of the messages that are learnt in them), of those `wanted`; None: of all.

        Messages that are `placed`.
        """
        asked = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        rendered = self._render(messages, where, values, for_answer, asked)
        for name in values:
            if not _reads(self.jinja, name):
                way_out = "leave it out" + OR_CHATML * (name == "tools")
                raise UserError(f"{where}: the chat template does not read `{name}`: {way_out}")
        segments, learnt, position, read = [], set(), 0, 0
        for turn, (number, (start, rest)) in enumerate(zip(asked, rendered.prompts, strict=True)):
            thinks = (rendered.text[:start] + rest).rfind(_THINK)
            if 0 <= thinks <= start < thinks + len(_THINK):  # the answer may begin with < too
                start, rest = thinks, rendered.text[thinks:start] + rest
            is_last, spans = number == len(messages) - 1, self._spans_of(rendered, turn)
            if rendered.spans:
                answer = self._marked(rendered.text, spans)
            else:
                alone = rendered.text if is_last and not for_answer else ""
                answer = self._answer(
                    messages[: number + 1], rendered.text, start, rest, alone, where, values
                )
            is_there = answer is not None or (is_last and not for_answer)
            for call in messages[number].get("tool_calls", ()) if is_there else ():
                if (name := call["function"]["name"]) not in (answer.text if answer else ""):
                    raise UserError(
                        f"{where}: the chat template leaves out the call of {name}: leave the row out"
                        + OR_CHATML
                    )
            if answer is None or answer.start < position:
                if is_last and not for_answer:
                    raise _cannot_split_error(where)
                continue  # a part of the next prompt
            as_asked = is_last or bool(rendered.spans) or not rest.strip()
            keeps = is_last or _holds_thought(answer.text, messages[number]) or not _keeps_thoughts(self)
            is_whole = as_asked and keeps
            asks = as_asked if wanted is None else is_whole and number in wanted
            learns = asks and UNLEARNT not in messages[number]
            learnt |= {number} if learns and is_whole else set()
            before = rendered.text[position : answer.start] + answer.lead
            segments += [
                _prompt_segment(before, messages[read:number]),
                # What is not learnt may be cut as a question may.
                ChatSegment(answer.text, True, (), False, answer.end, turn)
                if learns
                else ChatSegment(answer.text, True, ((0, len(answer.text)),), True, answer.end, turn),
            ]
            position, read = answer.stop, number + 1
        return [*segments, _prompt_segment(rendered.text[position:], messages[read:])], learnt

    def _spans_of(self, rendered: Rendered, turn: int) -> list[tuple[int, int]]:
        """The parts that the template marks of an answer: those between its prompt and the next one."""
        starts = [start for start, _ in rendered.prompts]
        if len(rendered.spans) == len(starts):
            return [rendered.spans[turn]]
        stop = (*starts, len(rendered.text))[turn + 1]
        return [(a, b) for a, b in rendered.spans if starts[turn] <= a < stop]

    def _marked(self, text: str, spans: Sequence[tuple[int, int]]) -> _Answer | None:
        """The answer in marked parts; what ends it is learnt too where the marks leave that out."""
        if not spans:
            return None
        start, stop = spans[0][0], spans[-1][1]
        body, end = self._without_end(text[start:stop])
        if end is None:
            after = self.closing if text.startswith(self.closing, stop) else ""
            return _Answer(start, text[start:stop], self._end(after or None), stop + len(after))
        return _Answer(start, body, self._end(text[start + len(body) : stop]), stop)

    def _answer(
        self,
        messages: Sequence[Message],
        text: str,
        start: int,
        rest: str,
        alone: str,
        where: str,
        values: Mapping[str, Any],
    ) -> _Answer | None:
        """The answer that the last of `messages` is, in a text that may go on; None where it is not found.

        Its prompt ends at `start`, but for the `rest`. `alone`: the text that ends with it, if it is known.
        """
        content = messages[-1]["content"].strip()
        begin = start + len(text[start:]) - len(text[start:].lstrip())
        if (
            content
            and "tool_calls" not in messages[-1]
            and text.startswith(content, begin)
            and not rest.strip()
        ):
            stop = begin + len(content)
            if self.closing and text.startswith(self.closing, stop):
                begin = begin if rest else start
                return _Answer(
                    start, text[begin:stop], self._end(self.closing), stop + len(self.closing), rest
                )
        alone = alone or self._render(messages, where, values).text
        is_same = alone.startswith(text[:start])
        body, end = self._without_end(alone[start:]) if is_same else ("", None)
        if not body.strip():
            return None
        size = len(alone[start:]) if end is None else len(body) + len(end)
        if rest.strip() and text != alone:
            return self._without_lead(text, start, body, end)
        if rest.strip():
            said = body.rpartition("</think>")[2]
            if rest.rstrip().endswith("</think>"):  # the prompt says that nothing was thought
                body = said.lstrip()
            elif _THOUGHT_BEGINS.fullmatch(rest):
                body = f"{_thought(messages[-1])}\n</think>\n\n{said.lstrip()}"
            else:
                return None
            return _Answer(start, body, self._end(end), start + size, lead=rest)
        if text.startswith(body + (end or ""), start):
            stop = start + len(body) + len(end or "")
            return _Answer(start, body.lstrip() if rest else body, self._end(end), stop, lead=rest)
        return self._without_lead(text, start, body, end)

    def _without_lead(self, text: str, start: int, body: str, end: str | None) -> _Answer | None:
        """An answer that is written without its thought, or with another end, where the text goes on."""
        body = body.rpartition("</think>")[2].strip()
        place = text.find(body, start)
        if not body or place < 0:
            return None
        stop = place + len(body)
        behind = len(text) - len(text[stop:].lstrip())  # white space of the answer stands before its end
        if any(one and text.startswith(one, behind) for one in (end, self.closing)):
            stop = behind
        ends = [one for one in (end, self.closing, *self.ends) if one and text.startswith(one, stop)]
        after = ends[0] if ends else None
        return _Answer(start, text[start:stop], self._end(after), stop + len(after or ""))

    def _end(self, end: str | None) -> str | None:
        return None if end == self.end else end

    def _without_end(self, text: str) -> tuple[str, str | None]:
        """(the text before the special tokens that end it, those tokens; None where there are none).

        Of several groups with white space between them the first one ends it.
        """
        names, body, end, left = {self.closing, self.end, *self.ends} - {""}, text.rstrip(), "", text
        while token := max((n for n in names if left.rstrip().endswith(n)), key=len, default=""):
            is_new = left != left.rstrip()
            left = left.rstrip()
            end = token + ("" if is_new else end)
            left = left.removesuffix(token)
            body = left
        return body, end or None

    def render(self, messages: Sequence[Message], where: str = "", for_answer: bool = False) -> str:
        """The text of messages that are `placed`, or up to where the answer to them begins."""
        return self._render(messages, where, NOTHING, for_answer).text

    def _render(
        self,
        messages: Sequence[Message],
        where: str,
        values: Mapping[str, Any],
        for_answer: bool = False,
        stops: Sequence[int] = (),
    ) -> Rendered:
        said = {"messages": list(messages), "add_generation_prompt": for_answer}
        variables = {**self.tokens, **values, **said}
        try:
            return jinja_sandbox.render(self.jinja, variables, self.jinja in OWN_TEXTS, stops)
        except jinja_sandbox.ChatTemplateError as error:
            raise UserError(
                f"{where}: the tokenizer's chat template refuses this conversation ({error}): mend it, or"
                f" choose --template {CHOICES}"
            ) from None


class _Answer(NamedTuple):
    """Where an answer stands in a text."""

    start: int
    text: str
    end: str | None
    """As `ChatSegment.end`."""
    stop: int
    """Where the text goes on behind it."""
    lead: str = ""
    """The end of its prompt, which the text does not have."""


_READS_THOUGHTS = re.compile(rf"{THOUGHT}|[.'\"]thinking\b")
_THINK = "<think>"
_THOUGHT_BEGINS = re.compile(r"\s*(<think>\s*)?")
"""What a prompt may end with that a template does not write with the answer: the model goes on from there."""


def _thought(message: Message) -> str:
    """What an answer's author thought before it."""
    before, is_there, _ = message["content"].rpartition("</think>")
    return str(message.get(THOUGHT, before.rpartition("<think>")[2] if is_there else "")).strip()


@functools.lru_cache(maxsize=64)
def _keeps_thoughts(template: ChatTemplate) -> bool:
    """Whether a template writes the thought of an answer that nothing follows."""
    answer = {**_PROBE_TURN[1], THOUGHT: "2g3h4i so 5j6k7l"}
    return answer[THOUGHT] in template.render(template.placed([_PROBE_TURN[0], answer]))


def _holds_thought(text: str, message: Message) -> bool:
    """Whether a text has an answer's thought, which the answer itself may say again."""
    said = message["content"].rpartition("</think>")[2] + json.dumps(message.get("tool_calls", ""))
    thought, text, said = ("".join(one.split()) for one in (_thought(message), text, said))
    return not thought or text.count(thought) > said.count(thought)


def _calls_as_text(calls: Sequence[Any]) -> list[Any]:
    """Calls with their arguments as JSON text."""
    functions = [call["function"] for call in calls]
    texts = [json.dumps(f["arguments"], ensure_ascii=False) for f in functions]
    return [
        {**call, "function": {**call["function"], "arguments": text}}
        for call, text in zip(calls, texts, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _reads_text_calls(template: ChatTemplate) -> bool:
    """Whether a template needs a call's arguments as text: it fails on an object, or prints it."""
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for calls in ([call], _calls_as_text([call])):
        with contextlib.suppress(UserError):
            text = template.render(
                [_PROBE_TURN[0], {"role": "assistant", "content": "", "tool_calls": calls}]
            )
            if "{'a': 1}" not in text:  # an object that is written as Python's, not as JSON
                return calls != [call]
    return False


def _is_in(part: str, text: str) -> bool:
    """Whether a text holds another, white space aside."""
    if part.strip() in text or json.dumps(part.strip(), ensure_ascii=False)[1:-1] in text:
        return True
    return "".join(part.split()) in "".join(text.split())


def _message(role: str, between: str, *texts: str) -> Message:
    return {"role": role, "content": between.join(filter(str.strip, texts))}


@functools.lru_cache(maxsize=64)
def _system_places(template: ChatTemplate) -> int:
    """Of how many messages, from the first on, a template writes one by the system: 0, 1 or EVERYWHERE.

    It may refuse it, leave it out, or write it so that answers cannot be told from prompts; a unique one that
    is rendered shows it.
    """
    turn, system = _PROBE_TURN, {"role": "system", "content": "6a7b8c be kind 9d0e1f"}

    def writes(messages: list[Message], splits: bool) -> bool:
        with contextlib.suppress(UserError):
            text = template.render([*messages, turn[0]], for_answer=True)
            found = template.split([*messages, turn[0]], "a probe", NOTHING, None, for_answer=True)[1]
            answers = sum(m["role"] == "assistant" for m in messages)
            return (not splits or len(found) == answers) and text.count(system["content"]) == messages.count(
                system
            )
        return False

    splits = writes([*turn, *turn], splits=True)
    begins = writes([system, *turn, *turn], splits)
    return EVERYWHERE if begins and writes([*turn, system, *turn], splits) else int(begins)


def _prompt_segment(text: str, messages: Sequence[Message]) -> ChatSegment:
    """A prompt, with the places of the texts of these messages in it."""
    places, position = [], 0
    for content in (m.get(name, "").strip() for m in messages for name in ("content", "input")):
        start = text.find(content, position) if content else -1
        if start >= 0:
            position = start + len(content)
            places.append((start, position))
    return ChatSegment(text, False, tuple(places))


def _cannot_split_error(where: str) -> UserError:
    return UserError(
        f"{where}: the tokenizer's chat template writes this conversation otherwise once it goes on, so that"
        f" answers cannot be told from prompts: choose --template {CHOICES}, or give it generation marks"
    )


def choose_template(
    name: str,
    default: str,
    tokenizer: Tokenizer,
    special: Mapping[str, int | None],
    folder: Path | None,
    values: Mapping[str, Any] = NOTHING,
) -> ChatTemplate:
    """The template called `name`; `auto` is the tokenizer's own where it has one, else `default`.

    `special` are the ids of special tokens, `folder` is the tokenizer's, `values` are those of parse_values.
    The special tokens are registered with it, in place, so that it recognizes them in rendered text. Raises
    UserError where no token can end an answer.
    """
    tokens = _special_tokens(tokenizer, special)
    known = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    usual = ("<|im_start|>", *TURN_END_TOKENS)
    in_vocabulary = [t for t in usual if tokenizer.token_to_id(t) is not None]
    tokenizer.add_special_tokens([t for t in (*tokens.values(), *in_vocabulary) if t not in known])
    own = read_tokenizer_template(folder) if name == "auto" and folder else None
    if name.endswith(TEMPLATE_FILE):
        own = text_of(name)
    if own is not None:
        called = TOKENIZER_TEMPLATE if name == "auto" else Path(name).name
        return _with_closing(called, with_defaults(own, values), tokens, tokenizer)
    name = default if name == "auto" else name
    end, closing, bos = tokens["eos_token"], "{{ eos_token }}", special.get("bos")
    if tokenizer.token_to_id(ENDS.get(name, "")) is not None:
        end = closing = ENDS[name]
    # Where the tokenizer begins every text with a token, its model expects it.
    opening = "{{ bos_token }}" if bos is not None and tokenizer.encode("a").ids[:1] == [bos] else ""
    text = BUILT_IN[name].replace("{{ BEGIN }}", opening).replace("{{ END }}", closing)
    with_defaults(text, values)
    return ChatTemplate(name, text, end, tokenizer.token_to_id(end) or 0, end, tokens)


def tokenizer_training_template(name: str, default: str) -> ChatTemplate:
    """A built-in template without special tokens, for the texts that a tokenizer is trained on."""
    name = default if name == "auto" else name
    text = BUILT_IN.get(name) or text_of(name)
    text = text.replace("{{ BEGIN }}", "").replace("{{ END }}", "")
    return ChatTemplate(name, text, "", 0, tokens={"eos_token": ""})


def _special_tokens(tokenizer: Tokenizer, special: Mapping[str, int | None]) -> dict[str, str]:
    """The special tokens by the names that templates use; eos_token, which ends an answer, always."""
    usual = [tokenizer.token_to_id(name) for name in TURN_END_TOKENS]
    ids = [special.get("eos"), *usual, special.get("bos"), special.get("pad")]
    end = next((i for i in ids if i is not None), None)
    if end is None:
        raise UserError(
            "--tokenizer: has no token to close answers with: name one of its tokens as eos_token in"
            " tokenizer_config.json beside it"
        )
    named = {role: tokenizer.id_to_token(i) for role, i in {**special, "eos": end}.items() if i is not None}
    return {f"{role}_token": token for role, token in named.items() if token is not None}


def _with_closing(name: str, jinja: str, tokens: Mapping[str, str], tokenizer: Tokenizer) -> ChatTemplate:
    """A template that is not ours, with what it writes after an answer: found by rendering a unique one."""
    end = tokens["eos_token"]
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    ends = [token for token in special if token in jinja or token in tokens.values()]
    template = ChatTemplate(name, jinja, end, tokenizer.token_to_id(end) or 0, "", tokens, ends)
    _, found, tail = template.render(_PROBE_TURN, "--template auto").partition(_PROBE_ANSWER)
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    closing = re.match(rf"\s*((?:{names})+)", tail) if found else None
    if closing is None:
        return template
    end = re.findall(names, closing[1])[-1]
    return dataclasses.replace(template, end=end, end_id=tokenizer.token_to_id(end) or 0, closing=closing[1])


def template_in(folder: Path) -> ChatTemplate | None:
    """The chat template of the tokenizer in a folder; None where it has none. Raises UserError."""
    if read_tokenizer_template(folder) is None:
        return None
    tokenizer = tokenizers.open_tokenizer(folder)
    special = tokenizers.special_token_ids(tokenizer, folder)
    return choose_template("auto", "plain", tokenizer, special, folder)
