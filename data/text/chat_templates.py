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
from typing import TYPE_CHECKING, NamedTuple

from isobatch.core.errors import UserError
from isobatch.data import tokenizers
from isobatch.data.chat_formats import UNLEARNT
from isobatch.data.text import jinja_sandbox

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from isobatch.data.chat_formats import Message

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
{{ BEGIN }}{% for message in messages %}<|im_start|>{{ message.role }}{{ '\\n' }}\
{{ message.content }}{% if message.input %}{{ '\\n' + message.input }}{% endif %}{{ END }}{{ '\\n' }}\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"""

_PLAIN = """\
{{ BEGIN }}{% for message in messages %}{{ message.content }}\
{% if message.input %}{{ '\\n' + message.input }}{% endif %}\
{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"""

_VERBATIM = """\
{{ BEGIN }}{% for message in messages %}{{ message.content }}\
{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"""

VERBATIM = "verbatim"
"""The name of the template that writes nothing between the messages."""
BUILT_IN = {"alpaca": _ALPACA, "chatml": _CHATML, "plain": _PLAIN, VERBATIM: _VERBATIM}
CHOICES = "alpaca|chatml|plain"
OWN_TEXTS = frozenset(
    text.replace("{{ BEGIN }}", begin).replace("{{ END }}", end)
    for text in BUILT_IN.values()
    for begin in ("{{ bos_token }}", "")
    for end in (TURN_END_TOKENS[0], "{{ eos_token }}", "")
)
"""Every form of the built-in templates: a received run may call any text by their names."""


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
MOVED = "the chat template has no place for the system text, which is put before the question"


class ChatSegment(NamedTuple):
    """A part of a rendered conversation: an answer of the assistant, or the text before or after one.

    An answer's text lacks the token that ends it, which is appended to its tokens.
    """

    text: str
    is_answer: bool
    messages: tuple[tuple[int, int], ...] = ()
    """Where the messages' own texts begin and end in a prompt; what lies between is the template's."""
    is_context: bool = False
    """Whether it is an answer that is read, and not learnt."""

    @property
    def is_learnt(self) -> bool:
        return self.is_answer and not self.is_context


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How conversations are written as text. Its fields suffice to write prompts as in training."""

    name: str
    """alpaca, chatml, plain, verbatim; or tokenizer, for the tokenizer's own."""
    jinja: str
    """The template; also valid as `chat_template` of a transformers tokenizer."""
    end: str
    """The token that ends an answer."""
    end_id: int
    """Its id."""
    closing: str = ""
    """The text that the template writes after an answer as `end`; empty where it writes none."""
    tokens: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Variables of the template: bos_token, eos_token, ..."""

    def placed(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as this template writes all of them.

        An `input` joins its question's text, but for the template that parts the two. A system text for which
        the template has no place is put before the question that follows.
        """
        kept = list(messages)
        if not (self.name == "alpaca" and self.jinja in OWN_TEXTS):
            kept = [
                _message(m["role"], "\n", m["content"], m.get("input", ""))
                | {k: "" for k in m if k == UNLEARNT}
                for m in messages
            ]
        systems = [number for number, message in enumerate(kept) if message["role"] == "system"]
        for number in [n for n in reversed(systems) if n >= _system_places(self)]:
            told = kept.pop(number)["content"]
            asked = [n for n, m in enumerate(kept) if n >= number and m["role"] == "user"]
            place = slice(asked[0], asked[0] + 1) if asked else slice(number, number)
            kept[place] = [_message("user", "\n\n", told, *(m["content"] for m in kept[place]))]
        return kept

    def notes_of_fields(self, messages: Sequence[Message], written: Sequence[ChatSegment]) -> list[str]:
        """A note of each kind of message that the text of a conversation has elsewhere, or not."""
        placed, text = self.placed(messages), "".join(segment.text for segment in written)
        before, after = ([m["role"] for m in one].count("system") for one in (messages, placed))
        lost = [m for m in placed if not _is_in(m["content"], text)]
        kinds = {("thoughts (<think>)" if "</think>" in m["content"] else "text", m["role"]) for m in lost}
        notes = [
            f"the chat template leaves out {what} of a message by the {role}" for what, role in sorted(kinds)
        ]
        return [MOVED, *notes] if after < before else notes

    def segments(self, messages: Sequence[Message], where: str) -> list[ChatSegment]:
        """The text of a whole conversation, split where answers begin and end.

        An answer begins where its prompt, rendered for generation, ends. `where` names the conversation in
        errors. Raises UserError where the template does not render prompts as beginnings of the whole.
        """
        messages = self.placed(messages)
        return self.split_answers(messages, self.render(messages, where), where)

    def prompt_segments(self, messages: Sequence[Message], where: str = "the prompt") -> list[ChatSegment]:
        """The segments up to where the next answer begins; to be tokenized one by one, as in training."""
        messages = self.placed(messages)
        return self.split_answers(messages, self.render(messages, where, for_answer=True), where)

    def split_answers(self, messages: Sequence[Message], whole: str, where: str) -> list[ChatSegment]:
        """`whole` in segments; its beginnings are the prompts of the answers among `messages`."""
        segments, position, asked = [], 0, 0
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self.render(messages[:number], where, for_answer=True)
                if not whole.startswith(prompt) or len(prompt) < position:
                    raise _cannot_split_error(where)
                stop = self._answer_end(whole, len(prompt), message["content"], where)
                answer = ChatSegment(whole[len(prompt) : stop], True)
                if UNLEARNT in message:  # it may be cut as a question may
                    answer = answer._replace(messages=((0, len(answer.text)),), is_context=True)
                segments += [_prompt_segment(whole[position : len(prompt)], messages[asked:number]), answer]
                position, asked = stop + len(self.closing), number + 1
        return [*segments, _prompt_segment(whole[position:], messages[asked:])]

    def _answer_end(self, whole: str, start: int, content: str, where: str) -> int:
        """Where the answer that begins at `start` ends: before the closing text, else after its content."""
        content = content.strip()
        position = whole.find(content, start)
        if not self.closing:
            stop = position + len(content) if position >= 0 else -1
        else:
            # The answer itself may contain the closing text.
            quoted = position >= 0 and self.closing in content
            stop = whole.find(self.closing, position + len(content) if quoted else start)
        if stop < 0:
            raise _cannot_split_error(where)
        return stop

    def render(self, messages: Sequence[Message], where: str = "", for_answer: bool = False) -> str:
        """The text of messages that are `placed`, or up to where the answer to them begins."""
        values = {"messages": [dict(m) for m in messages], "add_generation_prompt": for_answer}
        try:
            return jinja_sandbox.render(self.jinja, {**self.tokens, **values}, self.jinja in OWN_TEXTS)
        except jinja_sandbox.ChatTemplateError as error:
            raise UserError(
                f"{where}: the tokenizer's chat template refuses this conversation ({error}): mend it, or"
                f" choose --template {CHOICES}"
            ) from None


def _is_in(part: str, text: str) -> bool:
    """Whether a text holds another, white space aside."""
    return part.strip() in text or "".join(part.split()) in "".join(text.split())


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
            parts = template.split_answers(messages, text, "a probe") if splits else True
            return bool(parts) and text.count(system["content"]) == messages.count(system)
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
        f" answers cannot be told from prompts: choose --template {CHOICES}"
    )


def choose_template(
    name: str, default: str, tokenizer: Tokenizer, special: Mapping[str, int | None], folder: Path | None
) -> ChatTemplate:
    """The template called `name`; `auto` is the tokenizer's own where it has one, else `default`.

    `special` are the ids of special tokens, `folder` is the tokenizer's. The special tokens are registered
    with it, in place, so that it recognizes them in rendered text. Raises UserError where no token can end an
    answer.
    """
    tokens = _special_tokens(tokenizer, special)
    known = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    in_vocabulary = [t for t in ("<|im_start|>", *TURN_END_TOKENS) if tokenizer.token_to_id(t) is not None]
    tokenizer.add_special_tokens([t for t in (*tokens.values(), *in_vocabulary) if t not in known])
    own = read_tokenizer_template(folder) if name == "auto" and folder else None
    if own is not None:
        return _with_closing(own, tokens, tokenizer)
    name = default if name == "auto" else name
    end, closing, bos = tokens["eos_token"], "{{ eos_token }}", special.get("bos")
    if name == "chatml" and tokenizer.token_to_id(TURN_END_TOKENS[0]) is not None:
        end = closing = TURN_END_TOKENS[0]
    # Where the tokenizer begins every text with a token, its model expects it.
    opening = "{{ bos_token }}" if bos is not None and tokenizer.encode("a").ids[:1] == [bos] else ""
    text = BUILT_IN[name].replace("{{ BEGIN }}", opening).replace("{{ END }}", closing)
    return ChatTemplate(name, text, end, tokenizer.token_to_id(end) or 0, end, tokens)


def tokenizer_training_template(name: str, default: str) -> ChatTemplate:
    """A built-in template without special tokens, for the texts that a tokenizer is trained on."""
    name = default if name == "auto" else name
    text = BUILT_IN[name].replace("{{ BEGIN }}", "").replace("{{ END }}", "")
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


def _with_closing(jinja: str, tokens: Mapping[str, str], tokenizer: Tokenizer) -> ChatTemplate:
    """A tokenizer's own, with the token that it writes after an answer: found by rendering a unique one."""
    end = tokens["eos_token"]
    template = ChatTemplate(TOKENIZER_TEMPLATE, jinja, end, tokenizer.token_to_id(end) or 0, "", tokens)
    _, found, tail = template.render(_PROBE_TURN, "--template auto").partition(_PROBE_ANSWER)
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    closing = re.match(rf"\s*({names})", tail) if found else None
    if closing is None:
        return template
    end = closing[1]
    return dataclasses.replace(template, end=end, end_id=tokenizer.token_to_id(end) or 0, closing=end)


def template_in(folder: Path) -> ChatTemplate | None:
    """The chat template of the tokenizer in a folder; None where it has none. Raises UserError."""
    if read_tokenizer_template(folder) is None:
        return None
    tokenizer = tokenizers.open_tokenizer(folder)
    special = tokenizers.special_token_ids(tokenizer, folder)
    return choose_template("auto", "plain", tokenizer, special, folder)
