"""Chat templates: a conversation as text in pieces, those to be learnt told from those that ask.

All are Jinja, as transformers renders it: the tokenizer's own, or one of a few that are built in.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.errors import UserError
from isobatch.data import tokenizers
from isobatch.data.chat_formats import Message
from isobatch.data.text import jinja_sandbox

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OWN = "tokenizer"
"""The name of a template that came with the tokenizer."""
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom|>", "[SEP]")
"""What closes a turn in models whose settings name no end of text."""
_PROBE = "0a1b2c the answer 3d4e5f"

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


_BUILT_IN = {"alpaca": _ALPACA, "chatml": _CHATML, "plain": _PLAIN}


class Piece(NamedTuple):
    """A stretch of a rendered conversation. The end token follows every answer's tokens."""

    text: str
    answer: bool


@dataclass(frozen=True, slots=True)
class Template:
    """How a conversation is written. Its fields are all that a program needs to write prompts alike."""

    name: str
    """alpaca, chatml, plain, or tokenizer for the tokenizer's own."""
    jinja: str
    """Also right as `chat_template` of a transformers tokenizer."""
    end: str
    """The token that closes an answer."""
    end_id: int
    closing: str = ""
    """What the template itself writes for `end`; empty where it closes answers with nothing."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """What the template may ask for: bos_token, eos_token, ..."""

    def pieces(self, messages: Sequence[Message], where: str) -> list[Piece]:
        """The conversation's text in order, cut where answers begin and end.

        An answer begins where the prompt that asks for it ends: what is learnt is what `prompt` leaves open.
        """
        return self._cut(messages, self.whole(messages, where), where)

    def asking(self, messages: Sequence[Message], where: str = "the prompt") -> list[Piece]:
        """The same up to where the next answer begins: to be tokenized piece by piece, as in training."""
        return self._cut(messages, self.prompt(messages, where), where)

    def _cut(self, messages: Sequence[Message], whole: str, where: str) -> list[Piece]:
        pieces, done = [], 0
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(messages[:number], where, add_generation_prompt=True)
                if not whole.startswith(prompt) or len(prompt) < done:
                    raise _unlike(where)
                stop = self._stop(whole, len(prompt), message["content"], where)
                pieces += [Piece(whole[done : len(prompt)], False), Piece(whole[len(prompt) : stop], True)]
                done = stop + len(self.closing)
        return [*pieces, Piece(whole[done:], False)]

    def _stop(self, whole: str, start: int, content: str, where: str) -> int:
        """Where the answer that begins at `start` ends: before its closing, else behind its content."""
        content = content.strip()
        place = whole.find(content, start)
        if not self.closing:
            stop = place + len(content) if place >= 0 else -1
        else:
            quoted = place >= 0 and self.closing in content  # by the answer itself
            stop = whole.find(self.closing, place + len(content) if quoted else start)
        if stop < 0:
            raise _unlike(where)
        return stop

    def prompt(self, messages: Sequence[Message], where: str = "the prompt") -> str:
        """The text up to where the assistant's answer begins."""
        return self._render(messages, where, add_generation_prompt=True)

    def whole(self, messages: Sequence[Message], where: str = "the conversation") -> str:
        """The text of all of it."""
        return self._render(messages, where)

    def _render(self, messages: Sequence[Message], where: str, add_generation_prompt: bool = False) -> str:
        values = {"messages": [dict(m) for m in messages], "add_generation_prompt": add_generation_prompt}
        try:
            return jinja_sandbox.render(self.jinja, {**self.tokens, **values})
        except jinja_sandbox.Refused as error:
            raise UserError(
                f"{where}: the tokenizer's chat template refuses this conversation ({error}): mend it, or"
                f" choose --template {'|'.join(_BUILT_IN)}"
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """As JSON, for `from_dict`."""
        return {**dataclasses.asdict(self), "tokens": dict(self.tokens)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Template:
        return cls(**values)


def _unlike(where: str) -> UserError:
    return UserError(
        f"{where}: the tokenizer's chat template writes this conversation otherwise once it goes on, so that"
        f" answers cannot be told from prompts: choose --template {'|'.join(_BUILT_IN)}"
    )


def choose(
    name: str,
    by_default: str,
    tokenizer: Tokenizer,
    special: Mapping[str, int | None],
    folder: Path | None,
) -> Template:
    """The template called `name`; `auto` is the tokenizer's own where it has one, else `by_default`.

    The tokenizer is taught to see the special tokens in text, for templates write them there.
    """
    tokens = _special_tokens(tokenizer, special)
    known = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    special_too = [t for t in ("<|im_start|>", *TURN_ENDS) if tokenizer.token_to_id(t) is not None]
    tokenizer.add_special_tokens([t for t in (*tokens.values(), *special_too) if t not in known])
    own = own_template(folder) if name == "auto" and folder else None
    if own is not None:
        eos = tokens["eos_token"]
        return _closed(Template(OWN, own, eos, _id(tokenizer, eos), "", tokens), tokenizer)
    begins = _puts_in_front(tokenizer, special.get("bos"))
    return _built_in(by_default if name == "auto" else name, tokenizer, tokens, begins)


def _built_in(name: str, tokenizer: Tokenizer, tokens: Mapping[str, str], begins: bool) -> Template:
    """One of BUILT_IN, with the special tokens that this tokenizer has."""
    turn = name == "chatml" and tokenizer.token_to_id(TURN_ENDS[0]) is not None
    end = TURN_ENDS[0] if turn else tokens["eos_token"]
    text = _BUILT_IN[name].replace("{{ BEGIN }}", "{{ bos_token }}" if begins else "")
    text = text.replace("{{ END }}", end if turn else "{{ eos_token }}")
    return Template(name, text, end, _id(tokenizer, end), end, tokens)


def for_training(name: str) -> Template:
    """A built-in template for texts that a tokenizer is yet to be trained on: without special tokens."""
    text = _BUILT_IN[name].replace("{{ BEGIN }}", "").replace("{{ END }}", "")
    return Template(name, text, "", 0, tokens={"eos_token": ""})


def _id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None, f"{token} is a token"
    return found


def _special_tokens(tokenizer: Tokenizer, special: Mapping[str, int | None]) -> dict[str, str]:
    """The special tokens as templates name them; what ends an answer is always among them, as eos_token."""
    usual = [tokenizer.token_to_id(name) for name in TURN_ENDS]
    ids = [special.get("eos"), *usual, special.get("bos"), special.get("pad")]
    end = next((i for i in ids if i is not None), None)
    if end is None:
        raise UserError(
            "--tokenizer: has no token to close answers with: name one of its tokens as eos_token in"
            " tokenizer_config.json beside it"
        )
    named = {role: tokenizer.id_to_token(i) for role, i in {**special, "eos": end}.items() if i is not None}
    return {f"{role}_token": token for role, token in named.items() if token is not None}


def _puts_in_front(tokenizer: Tokenizer, bos: int | None) -> bool:
    """Whether the tokenizer itself begins every text with `bos`, as its model then expects."""
    return bos is not None and tokenizer.encode("a").ids[:1] == [bos]


def _closed(template: Template, tokenizer: Tokenizer) -> Template:
    """The template with what it closes answers with, found out by an answer that nothing else looks like."""
    asked = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": _PROBE}]
    _, found, tail = template.whole(asked, "--template auto").partition(_PROBE)
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    closing = re.match(rf"\s*({names})", tail) if found else None
    if closing is None:
        return template
    end = closing[1]
    return dataclasses.replace(template, end=end, end_id=_id(tokenizer, end), closing=end)


def own_template(folder: Path) -> str | None:
    """The chat template beside a tokenizer: of its own file, else of tokenizer_config.json."""
    folder = folder if folder.is_dir() else folder.parent
    if (folder / tokenizers.CHAT_TEMPLATE_FILE).is_file():
        return (folder / tokenizers.CHAT_TEMPLATE_FILE).read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    found = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    template = found.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {t.get("name"): t.get("template") for t in template}.get("default")
    return template if isinstance(template, str) and template.strip() else None


def identity(folder: Path | None) -> str | None:
    """The hash of the template's own file; tokenizer_config.json counts for the tokenizer's identity."""
    folder = folder.parent if folder is not None and folder.is_file() else folder
    return (
        tokenizers.file_hash(folder / tokenizers.CHAT_TEMPLATE_FILE)
        if folder and (folder / tokenizers.CHAT_TEMPLATE_FILE).is_file()
        else None
    )
