"""Chat templates: write a conversation as text, in segments that are answers or prompts.

A template is Jinja, rendered as transformers does: the tokenizer's own, or one of four that are built in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from isobatch.core.errors import UserError, nearest_file
from isobatch.core.flags import nearest_hint
from isobatch.data import tokenizers
from isobatch.data.chat_formats import THOUGHT, UNLEARNT, Message
from isobatch.data.text import jinja_sandbox
from isobatch.data.text.jinja_sandbox import Job, Rendered, Wanted
from isobatch.data.text.template_process import MARK, common

TURN_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom|>", "[SEP]")
"""Usual tokens at the end of a turn, for tokenizers whose settings name no end of text."""

TEMPLATE_FILE = ".jinja"
VERBATIM = "verbatim"
"""The name of the template that writes nothing between the messages."""
_FOLDER = Path(__file__).with_name("templates")
_FAMILIES = ("qwen", "llama3", "gemma", "phi3", "zephyr", "mistral")
BUILT_IN = {
    name: (_FOLDER / f"{'chatml' if name == 'qwen' else name}.jinja").read_text("utf-8").removesuffix("\n")
    for name in ("alpaca", "chatml", "plain", VERBATIM, *_FAMILIES)
}
"""By name, each from a file. BEGIN is what the tokenizer begins every text with, END what ends a turn.

`alpaca` has Stanford Alpaca's words (train.py, PROMPT_DICT), with the line break of its published texts;
`chatml` writes tools as Qwen 2.5 and Hermes do, with subscripts, which in the sandbox take a third of an
attribute's time. Those of families are short forms of what their models were trained with.
"""
ENDS = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>"}
ENDS |= dict.fromkeys(("chatml", "qwen"), TURN_END_TOKENS[0])
"""The token that ends a turn, in a vocabulary that has it; else the end of a text does."""
CHOICES = "alpaca|chatml|plain"
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
            raise UserError(f"--template {name}: there is no such file{nearest_file(name)}")
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
    assigned = ""
    for name, value in values.items():
        if not _reads(jinja, name):
            raise UserError(f"--template-kwargs {name}: the chat template does not read it: leave it out")
        assigned += f"{{% set {name} = {json.dumps(value)} if {name} is not defined else {name} %}}"
    return assigned + jinja


def template_file(folder: Path | None) -> Path | None:
    """The chat_template.jinja beside a tokenizer, which comes before what its settings say."""
    found = tokenizers.settings_files(folder, [tokenizers.CHAT_TEMPLATE_FILE]) if folder else []
    return found[0] if found else None


def read_tokenizer_template(folder: Path) -> str | None:
    """The template in chat_template.jinja beside a tokenizer, else in tokenizer_config.json; or None."""
    if file := template_file(folder):
        return file.read_text(encoding="utf-8")
    settings = tokenizers.settings_files(folder, ["tokenizer_config.json"])
    found = json.loads(settings[0].read_text(encoding="utf-8")) if settings else {}
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
UNOFFERED = "an answer calls a tool that is not among the row's tools"
WITHOUT_THOUGHT = (
    "of the answers without a thought the last one alone is learnt with the empty one of the template"
)
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
            found |= _message(found["role"], "\n", found["content"], found.pop("input", ""))
        if THOUGHT in found and _READS_THOUGHTS.search(self.jinja):
            found["thinking"] = found[THOUGHT]
        elif THOUGHT in found:
            found["content"] = f"<think>\n{found.pop(THOUGHT).strip()}\n</think>\n\n{found['content']}"
        if "tool_calls" in found and _reads_text_calls(self):
            found["tool_calls"] = _calls_as_text(found["tool_calls"])
        return found

    def texts(self, messages: Sequence[Message], where: str, values: Mapping[str, Any] = NOTHING) -> Texts:
        """The texts of a conversation. `where` names it in errors; `values` are further variables, as
        `template_values` gives them.
        """
        placed = self.placed(messages)
        before, after = ([m["role"] for m in one].count("system") for one in (messages, placed))
        return Texts(self, placed, where, values, is_moved=after < before)

    def prompt_segments(
        self, messages: Sequence[Message], where: str = "the prompt", values: Mapping[str, Any] = NOTHING
    ) -> list[ChatSegment]:
        """The segments up to where the next answer begins; to be tokenized one by one, as in training."""
        texts = self.texts(messages, where, values)
        found = texts.split(len(texts.messages), for_answer=True)[0]
        ended = ([p] if p.end is None else [ChatSegment(t, False) for t in (p.text, p.end)] for p in found)
        return [part for parts in ended for part in parts]

    def render(self, messages: Sequence[Message], where: str = "", for_answer: bool = False) -> str:
        """The text of messages that are `placed`, or up to where the answer to them begins."""
        return Texts(self, messages, where)(len(messages), for_answer).text


@dataclass
class Texts:
    """The texts of the first messages of a conversation, for each number of them; each is rendered once."""

    template: ChatTemplate
    messages: Sequence[Message]
    """They are `placed`."""
    where: str
    values: Mapping[str, Any] = field(default_factory=dict)
    is_moved: bool = False
    """Whether a system text was put before a question."""
    found: dict[Wanted, Rendered] = field(default_factory=dict)

    @functools.cached_property
    def answers(self) -> list[int]:
        """The numbers of the assistant's messages."""
        return [number for number, message in enumerate(self.messages) if message["role"] == "assistant"]

    def __call__(self, count: int, for_answer: bool = False) -> Rendered:
        """That of so many messages, or the prompt for an answer to them. Raises UserError."""
        key = (count, for_answer)
        if key not in self.found and (error := _render(self.template, [self.job([key])])):
            raise UserError(
                f"{self.where}: the chat template refuses this conversation ({error}): mend it,"
                f" or choose --template {CHOICES}"
            )
        return self.found[key]

    def job(self, wanted: Sequence[Wanted]) -> Job:
        return {**self.template.tokens, **self.values, "messages": self.messages}, wanted, self.found

    def samples(self) -> list[list[ChatSegment]]:
        """A conversation in segments, so that every answer is learnt once, and as the model is to give it.

        An answer begins where its prompt, rendered for generation, ends. Many templates drop an earlier
        answer's thought, or write it otherwise, once the conversation goes on. Such an answer is learnt in a
        sample of its own, which ends with it; elsewhere it is context. Raises UserError where the template
        cannot write it.
        """
        wanted = {number for number in self.answers if UNLEARNT not in self.messages[number]}
        found: list[list[ChatSegment]] = []
        end = len(self.messages)
        while wanted or not found:
            segments, learnt = self.split(end, wanted)
            found += [segments] if learnt or not wanted else []
            wanted -= learnt
            end = max(wanted, default=0) + 1
        return found

    def notes(self, written: Sequence[ChatSegment]) -> list[str]:
        """A note of each kind of message that the text of the conversation has elsewhere, or not."""
        text = "".join(segment.text for segment in written)
        lost = [m for m in self.messages if not _is_in(m["content"], text)]
        kinds = {("thoughts (<think>)" if "</think>" in m["content"] else "text", m["role"]) for m in lost}
        thoughts = [m for m in self.messages if not _is_in(m.get(THOUGHT, ""), text)]
        kinds |= {("thoughts (<think>)", m["role"]) for m in thoughts}
        offered = {tool.get("function", tool).get("name") for tool in self.values.get("tools", ())}
        called = {call["function"]["name"] for m in self.messages for call in m.get("tool_calls", ())}
        answers = ((part.text, self.messages[self.answers[part.turn]]) for part in written if part.is_learnt)
        bare = {_THINK in said for said, message in answers if not _thought(message)}
        remarks = {
            MOVED: self.is_moved,
            UNOFFERED: offered and not called <= offered,
            WITHOUT_THOUGHT: len(bare) == 2,
        }
        return [remark for remark, holds in remarks.items() if holds] + [
            f"the chat template leaves out {what} of a message by the {role}" for what, role in sorted(kinds)
        ]

    def segments(self) -> list[ChatSegment]:
        """A conversation in segments, once, with the answers as they stand in the whole."""
        return self.split(len(self.messages))[0]

    def split(
        self, end: int, wanted: set[int] | None = None, for_answer: bool = False
    ) -> tuple[list[ChatSegment], set[int]]:
        """(segments of the first `end` messages, the numbers of the messages that are learnt in them), of
        those `wanted`; None: of all.
        """
        if not self.found:
            render_ahead([self], for_answer)
        whole = self(end, for_answer)
        for name in self.values:
            if not _reads(self.template.jinja, name):
                way_out = "leave it out" + OR_CHATML * (name == "tools")
                raise UserError(f"{self.where}: the chat template does not read `{name}`: {way_out}")
        last = end - 1 if end - 1 in self.answers and not for_answer else None
        text, answers = self._answers(end, last, whole)
        segments, learnt, position, read = [], set(), 0, 0
        for turn, (number, answer) in enumerate(answers.items()):
            message = self.messages[number]
            for call in message.get("tool_calls", ()) if answer or number == last else ():
                if (name := call["function"]["name"]) not in (answer.text if answer else ""):
                    raise UserError(
                        f"{self.where}: the chat template leaves out the call of {name}: leave the row out"
                        + OR_CHATML
                    )
            if answer is None or answer.start < position:
                if number == last:
                    raise UserError(
                        f"{self.where}: the tokenizer's chat template writes this conversation otherwise once"
                        " it goes on, so that answers cannot be told from prompts: choose --template"
                        f" {CHOICES}, or give it generation marks"
                    )
                continue  # a part of the next prompt
            may_lack = number == last or not _keeps_thoughts(self.template)
            is_whole = answer.as_asked and (may_lack or _holds_thought(answer.text, message))
            asks = answer.as_asked if wanted is None else is_whole and number in wanted
            learns = asks and UNLEARNT not in message
            learnt |= {number} if learns and is_whole else set()
            before = text[position : answer.start] + answer.lead
            # What is not learnt may be cut as a question may.
            places = () if learns else ((0, len(answer.text)),)
            stop = None if answer.end == self.template.end else answer.end
            segments += [
                _prompt_segment(before, self.messages[read:number]),
                ChatSegment(answer.text, True, places, not learns, stop, turn),
            ]
            position, read = answer.stop, number + 1
        return [*segments, _prompt_segment(text[position:], self.messages[read:end])], learnt

    def _answers(self, end: int, last: int | None, whole: Rendered) -> tuple[str, dict[int, _Answer | None]]:
        """(the text of the first messages, the answers in it; None for one that is not found)."""
        text, spans, asked = whole.text, whole.spans, [number for number in self.answers if number < end]
        if len(spans) == len(asked):
            return text, {n: self._marked(text, [span]) for n, span in zip(asked, spans, strict=True)}
        if spans:  # those between an answer's prompt and the next one
            starts = [*(_meet(text, self(number, True).text)[0] for number in asked), len(text)]
            within = [[s for s in spans if a <= s[0] < b] for a, b in itertools.pairwise(starts)]
            return text, {n: self._marked(text, parts) for n, parts in zip(asked, within, strict=True)}
        final = None
        if last is not None:
            text, final = self._final_answer(last)
        return text, {n: final if n == last else self._earlier_answer(n, text) for n in asked}

    def _marked(self, text: str, spans: Sequence[tuple[int, int]]) -> _Answer | None:
        """The answer in marked parts; what ends it is learnt too where the marks leave that out."""
        if not spans:
            return None
        start, stop, closing = spans[0][0], spans[-1][1], self.template.closing
        body, end = self._without_end(text[start:stop])
        if end is not None:
            return _Answer(start, body, text[start + len(body) : stop], stop)
        end = closing if text.startswith(closing, stop) else ""
        return _Answer(start, text[start:stop], end or None, stop + len(end))

    def _body(
        self, message: Message, behind: str, rest: str, alone: Callable[[], str]
    ) -> tuple[str, str | None]:
        """(an answer, what ends it), from the text behind its prompt, of which that lacks the `rest`.

        `alone`: the same where nothing follows the answer.
        """
        content = message["content"].strip()
        begin = len(behind) - len(behind.lstrip())
        closing = self.template.closing
        is_plain = content and closing and "tool_calls" not in message and not rest.strip()
        if is_plain and behind.startswith(content + closing, begin):
            return behind[: begin + len(content)], closing
        return self._without_end(alone())

    def _final_answer(self, number: int) -> tuple[str, _Answer | None]:
        """(the text that ends with an answer, and begins as its prompt; the answer)."""
        text, prompt, message = self(number + 1).text, self(number, True).text, self.messages[number]
        start, rest = _meet(text, prompt)
        is_closed = rest.rstrip().endswith("</think>")  # the prompt says that nothing was thought
        if not is_closed and not _THOUGHT_BEGINS.fullmatch(rest):
            # An earlier answer is written otherwise than in the prompt: only the last turn is the same.
            turn = prompt[common(prompt, self(number - 1).text) :] if self.answers[0] < number else ""
            if not turn or (place := text.find(turn, start)) < 0:
                return text, None
            start, rest, text = len(prompt), "", prompt + text[place + len(turn) :]
        body, end = self._body(message, text[start:], rest, lambda: text[start:])
        if not body.strip():
            return text, None
        tail = text[start + len(body) + len(end or "") :]
        said = body.rpartition("</think>")[2].lstrip()
        if is_closed:
            body = said
        elif rest.strip():
            body = f"{_thought(message)}\n</think>\n\n{said}"
        elif rest:
            body = body.lstrip()
        whole = prompt + body + (end or "")
        return whole + tail, _Answer(len(prompt), body, end, len(whole))

    def _earlier_answer(self, number: int, text: str) -> _Answer | None:
        """An answer in a text that goes on; None where it is not found."""
        start, rest = _meet(text, self(number, True).text)

        def alone() -> str:
            found = self(number + 1).text
            return found[start:] if found.startswith(text[:start]) else ""

        body, end = self._body(self.messages[number], text[start:], rest, alone)
        whole, as_asked = body + (end or ""), not rest.strip()
        if body.strip() and as_asked and text.startswith(whole, start):
            return _Answer(start, body.lstrip() if rest else body, end, start + len(whole), rest)
        # It is written without its thought, or with another end.
        said = body.rpartition("</think>")[2].strip()
        place = text.find(said, start)
        if not said or place < 0:
            return None
        stop = place + len(said)
        behind = len(text) - len(text[stop:].lstrip())
        usual = [one for one in (end, self.template.closing) if one]
        ends = [*usual, *self.template.ends]
        # White space of the answer stands before its end.
        if text.startswith(tuple(ends if body.endswith(text[stop:behind]) else usual), behind):
            stop = behind
        after = next((one for one in ends if text.startswith(one, stop)), None)
        return _Answer(start, text[start:stop], after, stop + len(after or ""), as_asked=as_asked)

    def _without_end(self, text: str) -> tuple[str, str | None]:
        """(the text before the special tokens that end it, those tokens; None where there are none).

        Of several groups with white space between them the first one ends it.
        """
        ends = _ends(self.template).search(text)
        return (text[: ends.start()], ends[1] or None) if ends else (text.rstrip(), None)


@functools.lru_cache(maxsize=64)
def _ends(template: ChatTemplate) -> re.Pattern[str]:
    """What may end a text: groups of special tokens."""
    names = sorted({template.closing, template.end, *template.ends} - {""}, key=len, reverse=True)
    tokens = f"(?:{'|'.join(map(re.escape, names)) or '(?!)'})+"
    return re.compile(rf"({tokens})(?:\s+{tokens})*\s*\Z")


def render_ahead(conversations: Sequence[Texts], for_answer: bool = False) -> None:
    """Render what is known to be asked of these; one that is refused is so when it is asked."""
    jobs = []
    for texts in conversations:
        keys = [(len(texts.messages), for_answer)]
        if not MARK.search(texts.template.jinja):
            keys += [(number, True) for number in texts.answers]
            keys += [(n + 1, False) for n in texts.answers if {"tool_calls", THOUGHT} & {*texts.messages[n]}]
        jobs.append(texts.job([*dict.fromkeys(keys)]))
    if jobs:
        _render(conversations[0].template, jobs)


def _render(template: ChatTemplate, jobs: Sequence[Job]) -> str:
    return jinja_sandbox.render(template.jinja, jobs, template.jinja in OWN_TEXTS)


def _meet(text: str, prompt: str) -> tuple[int, str]:
    """(how much of a prompt a text begins with, the rest of the prompt); <think> is not divided."""
    start = common(text, prompt)
    thinks = prompt.rfind(_THINK)
    if 0 <= thinks <= start < thinks + len(_THINK):  # the answer may begin with < too
        start = thinks
    return start, prompt[start:]


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
    as_asked: bool = True
    """Whether the text before it is its prompt."""


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
    found = []
    for call in calls:
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        found.append({**call, "function": {**call["function"], "arguments": text}})
    return found


@functools.lru_cache(maxsize=64)
def _reads_text_calls(template: ChatTemplate) -> bool:
    """Whether a template needs a call's arguments as text: it fails on an object, or prints it."""
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for calls in ([call], _calls_as_text([call])):
        with contextlib.suppress(UserError):
            answer = {"role": "assistant", "content": "", "tool_calls": calls}
            text = template.render([_PROBE_TURN[0], answer])
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
            texts = Texts(template, [*messages, turn[0]], "a probe")
            learnt = texts.split(len(texts.messages), for_answer=True)[1]
            text = texts(len(texts.messages), True).text
            is_split = not splits or len(learnt) == len(texts.answers)
            return is_split and text.count(system["content"]) == messages.count(system)
        return False

    splits = writes([*turn, *turn], splits=True)
    begins = writes([system, *turn, *turn], splits)
    return EVERYWHERE if begins and writes([*turn, system, *turn], splits) else int(begins)


def _prompt_segment(text: str, messages: Sequence[Message]) -> ChatSegment:
    """A prompt, with the places of the texts of these messages in it."""
    places, position = [], 0
    for content in (m.get(name, "").strip() for m in messages for name in ("content", "input")):
        if content and (start := text.find(content, position)) >= 0:
            position = start + len(content)
            places.append((start, position))
    return ChatSegment(text, False, tuple(places))


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
        return _with_closing(called, with_defaults(own, values), tokens, tokenizer, f"--template {name}")
    name = default if name == "auto" else name
    end, closing, bos = tokens["eos_token"], "{{ eos_token }}", special.get("bos")
    if tokenizer.token_to_id(ENDS.get(name, "")) is not None:
        end = closing = ENDS[name]
    # Where the tokenizer begins every text with a token, its model expects it.
    opening = "{{ bos_token }}" if bos is not None and tokenizer.encode("a").ids[:1] == [bos] else ""
    text = BUILT_IN[name].replace("{{ BEGIN }}", opening).replace("{{ END }}", closing)
    return ChatTemplate(name, with_defaults(text, values), end, tokenizer.token_to_id(end) or 0, end, tokens)


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


def _with_closing(
    name: str, jinja: str, tokens: Mapping[str, str], tokenizer: Tokenizer, where: str
) -> ChatTemplate:
    """A template that is not ours, with what it writes after an answer: found by rendering a unique one."""
    end = tokens["eos_token"]
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    ends = [token for token in special if token in jinja or token in tokens.values()]
    template = ChatTemplate(name, jinja, end, tokenizer.token_to_id(end) or 0, "", tokens, ends)
    _, found, tail = template.render(_PROBE_TURN, where).partition(_PROBE_ANSWER)
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
