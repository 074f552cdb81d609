"""A chat template as Ollama reads it: in the language of Go's text/template, which knows no Jinja.

What a template writes between two messages mostly follows from who wrote them. So it is rendered with
messages of which each is found again, the text between them is taken out for each pair of roles, and what is
put together of those texts is held against the template on more conversations: another is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from isobatch.core.errors import UserError
from isobatch.data.chat_formats import Message
from isobatch.data.text.chat_templates import ChatTemplate

START, ANSWER = "", "answer"
"""What is before the first message, and the answer that is asked for."""
Joints = Mapping[tuple[str, str], str]
"""(role before, role after) -> the text between two messages."""
_BETWEEN = ("system", "user", "assistant")


def ollama_modelfile(template: ChatTemplate | None, weights: str, begin: str, place: str) -> str:
    """The text of a Modelfile beside the file `weights`. `begin`: what the runtime itself puts before a text.

    Raises UserError, which begins with `place`, for a template that Go's cannot follow.
    """
    if template is None:
        return f"FROM ./{weights}\n"
    text = go_template(template, begin, place)
    if '"""' in text:
        raise _cannot_write(place, 'has """ in its text')
    return f'FROM ./{weights}\nTEMPLATE """{text}"""\nPARAMETER stop "{template.end}"\n'


def go_template(template: ChatTemplate, begin: str, place: str) -> str:
    """The template in Go's language, without `begin` at its beginning; errors as of `ollama_modelfile`."""
    joints = _joints(template, place)
    for messages in probes():
        if join(joints, messages) != template.render(template.placed(messages), place, for_answer=True):
            raise _cannot_write(place, "writes some messages by more than their roles")
    written = {k: text.removeprefix(begin) if k[0] == START else text for k, text in joints.items()}
    first, question, answer, ask = (_choice(written, role) for role in (*_BETWEEN, ANSWER))
    texts = zip(_BETWEEN, (first, question, answer), strict=True)
    each = "{{ else ".join(f'if eq .Role "{role}" }}}}{text}{{{{ .Content }}}}' for role, text in texts)
    said = f"{{{{ {each}{{{{ end }}}}{{{{ $before = .Role }}}}"
    return f'{{{{ $before := "" }}}}{{{{ range .Messages }}}}{said}{{{{ end }}}}{ask}'


def join(joints: Joints, messages: Sequence[Message]) -> str:
    """The text of a conversation up to where its answer begins, as the Go template writes it."""
    roles = [START, *(m["role"] for m in messages), ANSWER]
    texts = [*(m["content"] for m in messages), ""]
    return "".join(joints[pair] + text for pair, text in zip(itertools.pairwise(roles), texts, strict=True))


def probes() -> list[list[Message]]:
    """Conversations of one to four questions, with a system text and without."""
    texts = ["Why?", "Because\n\n  so.", "{{ .Content }}", "two\nlines", "naïve 日本", "<b>&amp;</b>"]
    turns = ["user", *("assistant", "user") * 3]
    kinds = [head + turns[:count] for head in ([], ["system"]) for count in (1, 3, 5, 7)]
    return [
        [{"role": role, "content": texts[(n + shift) % len(texts)]} for n, role in enumerate(roles)]
        for shift, roles in enumerate(kinds * 2)
    ]


def _joints(template: ChatTemplate, place: str) -> Joints:
    """The text between two messages of each pair of roles, found by rendering unique ones."""
    joints: dict[tuple[str, str], str] = {}
    for roles in (_BETWEEN[1:2], _BETWEEN[:2], (*_BETWEEN, "user"), (*_BETWEEN[1:], "user")):
        messages = [{"role": role, "content": f"{n}a1b2c the text 3d4e5f{n}"} for n, role in enumerate(roles)]
        rest, before = template.render(template.placed(messages), place, for_answer=True), START
        for message in messages:
            text, found, rest = rest.partition(message["content"])
            if not found:
                raise _cannot_write(place, "leaves messages out")
            joints[before, message["role"]], before = text, message["role"]
        joints[before, ANSWER] = rest
    return joints


def _choice(joints: Joints, role: str) -> str:
    """What is written before a message of this role, by the role before."""
    texts = {before: text for (before, after), text in joints.items() if after == role}
    *others, last = sorted(texts, key=lambda before: (before != START, before))
    if len({*texts.values()}) == 1:
        return _text(texts[last])
    chosen = "{{ else if ".join(f'eq $before "{b}" }}}}{_text(texts[b])}' for b in others)
    return f"{{{{ if {chosen}{{{{ else }}}}{_text(texts[last])}{{{{ end }}}}"


def _text(text: str) -> str:
    """A text in Go's template language; what would be lost at its ends in a Modelfile is quoted."""
    quoted = text.replace("{{", '{{ "{{" }}')
    kept = quoted.rstrip()
    end = "".join({"\n": r"\n", "\t": r"\t", "\r": r"\r"}.get(c, c) for c in quoted[len(kept) :])
    return f'{kept}{{{{ "{end}" }}}}' if end else kept


def _cannot_write(place: str, why: str) -> UserError:
    return UserError(
        f"{place}: Ollama's templates are Go's, and this chat template {why}: take --to gguf, and a runtime"
        " that reads the template in it (llama-server --jinja)"
    )
