"""The texts of chat templates: those that are built in, and those that lie beside a tokenizer.

In the built-in ones BEGIN and END stand for special tokens.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from isobatch.data import tokenizers
from isobatch.data.preparation.file_digests import file_hash

if TYPE_CHECKING:
    from pathlib import Path

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


def read_tokenizer_template(folder: Path) -> str | None:
    """The template in chat_template.jinja beside a tokenizer, else in tokenizer_config.json; or None."""
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
    """The hash of chat_template.jinja, or None. tokenizer_config.json is part of the tokenizer's identity."""
    folder = folder.parent if folder is not None and folder.is_file() else folder
    return (
        file_hash(folder / tokenizers.CHAT_TEMPLATE_FILE)
        if folder and (folder / tokenizers.CHAT_TEMPLATE_FILE).is_file()
        else None
    )
