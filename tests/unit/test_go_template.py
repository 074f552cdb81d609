"""Tests of data/text/go_template.py: what Ollama renders is what the chat template writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.data.text import chat_templates
from isobatch.data.text.go_template import go_template, ollama_modelfile, probes
from isobatch.tests.tiny_models import CHATML

BEGIN = "<s>"
LLAMA2 = (
    "{{ bos_token }}{% set told = '' %}{% if messages[0].role == 'system' %}{% set told = '<<SYS>>\\n' +"
    " messages[0].content + '\\n<</SYS>>\\n\\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ (told if loop.first else '') + m.content }}"
    " [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe {{ '{{' }} kind.<|im_end|>\n{% endif %}"
) + CHATML
NUMBERED = "{% for m in messages %}{{ loop.index }}: {{ m.content }}\n{% endfor %}"
TEMPLATES = {"chatml": CHATML, "llama2": LLAMA2, "default": DEFAULT_SYSTEM}
TEMPLATES |= {
    name: chat_templates.BUILT_IN[name].replace("{{ END }}", "</s>") for name in ("alpaca", "plain")
}


def template(jinja: str) -> Any:
    jinja = jinja.replace("{{ BEGIN }}", "{{ bos_token }}")
    tokens = {"bos_token": BEGIN, "eos_token": "</s>"}
    return chat_templates.ChatTemplate("tokenizer", jinja, "</s>", 2, "", tokens)


def go(text: str, messages: list[dict[str, str]]) -> str:
    """What Go's text/template renders, of the few actions that are written."""
    parts = re.split(r"\{\{ (.*?) \}\}", re.sub(r'\{\{ "\{\{" \}\}', "\0", text))

    def block(place: int, message: dict[str, str], state: dict[str, str], shows: bool) -> tuple[str, int]:
        written, active = "", shows
        while place < len(parts):
            written += parts[place].replace("\0", "{{") if active else ""
            action = parts[place + 1] if place + 1 < len(parts) else "end"
            place += 2
            if action.startswith("if ") or action.startswith("else") or action == "end":
                if not action.startswith("if "):
                    return written, place - (action != "end")
                inner, place = condition(action, place, message, state, active)
                written += inner
                continue
            if action == "range .Messages":
                start = place
                for one in messages:
                    inner, place = block(start, one, state, active)
                    written += inner
            elif active:
                written += run(action, message, state)
        return written, place

    def condition(
        action: str, place: int, message: dict[str, str], state: dict[str, str], shows: bool
    ) -> tuple[str, int]:
        written, done = "", False
        while True:
            asked = re.search(r'if eq (\$before|\.Role) "(\w*)"', action)
            value = asked and (state["before"] if asked[1] == "$before" else message["role"])
            holds = not done and (asked is None or value == asked[2])
            inner, place = block(place, message, state, shows and holds)
            written, done = written + inner, done or holds
            action = parts[place] if place < len(parts) and place % 2 else "end"
            if not action.startswith("else"):
                return written, place
            place += 1

    def run(action: str, message: dict[str, str], state: dict[str, str]) -> str:
        if action == ".Content":
            return message["content"]
        if "$before" in action:
            state["before"] = message["role"] if action == "$before = .Role" else ""
            return ""
        return str(json.loads(action))

    return block(0, {}, {"before": ""}, True)[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_the_chat_templates(name: str) -> None:
    one = template(TEMPLATES[name])
    text = go_template(one, "", "--to ollama")
    for messages in probes():
        assert go(text, messages) == one.render(one.placed(messages), for_answer=True)
    assert not go(go_template(one, BEGIN, "x"), probes()[0]).startswith(BEGIN)


def test_what_go_cannot_write_is_refused() -> None:
    with pytest.raises(UserError, match=r"--to ollama: Ollama's templates are Go's.*llama-server --jinja"):
        go_template(template(NUMBERED), "", "--to ollama")


def test_a_model_without_conversations_has_no_template() -> None:
    assert ollama_modelfile(None, "model.gguf", "", "--to ollama") == "FROM ./model.gguf\n"
    text = ollama_modelfile(template(CHATML), "model.gguf", "", "--to ollama")
    assert text.startswith('FROM ./model.gguf\nTEMPLATE """')
    assert text.endswith('"""\nPARAMETER stop "</s>"\n')
    assert text.count("{{ .Content }}") == 3  # messages by others, as a tool, are not written


GO = """
package main
import ("encoding/json"; "os"; "text/template")
func main() {
  var in struct { Text string; Chats [][]struct { Role, Content string } }
  json.NewDecoder(os.Stdin).Decode(&in)
  made := template.Must(template.New("x").Parse(in.Text))
  for _, chat := range in.Chats {
    made.Execute(os.Stdout, map[string]any{"Messages": chat})
    os.Stdout.WriteString("\\x00")
  }
}
"""


@pytest.mark.skipif("ISOBATCH_GO" not in os.environ, reason="ISOBATCH_GO names no go")
@pytest.mark.parametrize("name", TEMPLATES)
def test_go_itself_writes_the_same(name: str, tmp_path: Path) -> None:
    (tmp_path / "main.go").write_text(GO, encoding="utf-8")
    one = template(TEMPLATES[name])
    said = json.dumps({"Text": go_template(one, "", "x"), "Chats": probes()})
    words = [os.environ["ISOBATCH_GO"], "run", str(tmp_path / "main.go")]
    done = subprocess.run(words, input=said, capture_output=True, text=True, check=True)
    wanted = [one.render(one.placed(messages), for_answer=True) for messages in probes()]
    assert done.stdout.split("\0")[:-1] == wanted
