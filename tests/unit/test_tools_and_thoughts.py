"""Tests of conversations with tools and reasoning: what is learnt, by templates of each kind; bad input."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from isobatch.core.errors import UserError
from isobatch.data import chat_formats, readers, tokenizers
from isobatch.data.corpora import Corpus
from isobatch.data.preferences.dataset import Preferences, PreferencesOptions
from isobatch.data.text import chat_templates
from isobatch.data.text.row_fields import RowCounts
from isobatch.launch.commands.plan import prepare
from isobatch.tests.unit.test_row_fields import make_tokenizer

TOOL = {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
ASK, RESULT = {"role": "user", "content": "Zask"}, {"role": "tool", "content": "Zresult"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOLD = {"role": "assistant", "content": "Ztold"}
AGAIN, LAST = {"role": "user", "content": "Zagain"}, {"role": "assistant", "content": "Zlast"}
THINKING = [
    ASK,
    CALLING | {"reasoning_content": "Wfirst thought"},
    RESULT,
    TOLD | {"reasoning_content": "Wsecond thought"},
    AGAIN,
    LAST | {"reasoning_content": "Wlast thought"},
]

CALLS = (
    "{% for c in m.tool_calls %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
)
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OTHERS = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
KEEPS = (
    TOOLS + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% else %}"
    + OTHERS
    + "{% endif %}{% endfor %}"
    + ASKS
)
LAST_USER = (
    "{% set ns = namespace(n=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.n = loop.index0 %}{% endif %}{% endfor %}"
)
DROPS = LAST_USER + KEEPS.replace("{% if m.reasoning_content %}", "{% if loop.index0 > ns.n %}")
PROMPTS = DROPS.replace(ASKS, ASKS.replace("assistant\n", "assistant\n<think>"))
STRIPS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% else %}"
    + OTHERS
    + "{% endif %}{% endfor %}"
    + ASKS.replace("assistant\n", "assistant\n<think>\n")
)
MARKED = (
    KEEPS.replace("{% if m.reasoning_content %}", "{% generation %}{% if m.reasoning_content %}").replace(
        "<|im_end|>\n{% else %}", "<|im_end|>\n{% endgeneration %}{% else %}"
    )
)  # fmt: skip
SPEAKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}"
    "{% set later = messages[loop.index:] | rejectattr('tool_calls') | map(attribute='role') %}"
    "{% if m.reasoning_content and 'assistant' not in later %}({{ m.reasoning_content }}){% endif %}"
    "|{{ m.content }}"
    + CALLS
    + "{{ '</s>' if loop.last and m.role == 'assistant' and not m.tool_calls else '<|im_end|>' }}"
    "{% endfor %}" + ASKS.replace("\n", "")
)
"""As gpt-oss has it: a call's thought leaves once the answer is there; only the last answer ends a text."""


def template_of(folder: Path, source: str | None, name: str = "auto", **values: Any) -> tuple[Any, Any]:
    """(the template, the tokenizer)."""
    made = folder if folder.is_dir() and (folder / "tokenizer.json").is_file() else None
    made = made or make_tokenizer(folder / "t", source, in_file=True)
    opened = tokenizers.open_tokenizer(made)
    special = tokenizers.special_token_ids(opened, made)
    return chat_templates.choose_template(name, "chatml", opened, special, made, values), opened


def learnt(template: Any, messages: list[Any], values: Any = chat_templates.NOTHING) -> list[str]:
    """Each sample's text, with what is learnt in brackets."""
    found = []
    for sample in template.texts(messages, "here", values).samples():
        parts = [(s, s.text + (template.end if s.end is None else s.end) * s.is_answer) for s in sample]
        found.append("".join(f"[{text}]" if s.is_learnt else text for s, text in parts))
    return found


def answers_in(text: str) -> list[str]:
    return [part.partition("]")[0] for part in text.split("[")[1:]]


THOUGHTS = {
    "keeps": (KEEPS, [["first", "second", "last"]]),
    "drops": (DROPS, [["last"], ["first", "second"]]),
    "prompts with <think>": (PROMPTS, [["last"], ["second"], ["first"]]),
    "marked": (MARKED, [["first", "second", "last"]]),
}


@pytest.mark.parametrize("kind", THOUGHTS)
def test_every_answer_is_learnt_once_and_with_its_thought(tmp_path: Path, kind: str) -> None:
    source, wanted = THOUGHTS[kind]
    template, _ = template_of(tmp_path, source)
    samples = learnt(template, THINKING, chat_formats.template_values({"tools": [TOOL]}, ""))
    found = [[a.split("W")[1].split(" ")[0] for a in answers_in(sample)] for sample in samples]
    said = ["Ztold", "Zlast", "look"]
    whole = "|".join(a for sample in samples for a in answers_in(sample))
    assert sorted(word for one in found for word in one) == ["first", "last", "second"]
    assert all(whole.count(word) == 1 for word in said)
    assert not any(word in whole for word in ("Zask", "Zresult", "Zagain"))
    assert all(answer.rstrip().endswith("<|im_end|>") for s in samples for answer in answers_in(s))
    if kind != "prompts with <think>":
        assert [*map(sorted, found)] == [*map(sorted, wanted)]
    else:  # the prompt's own <think> is not learnt
        assert "[<think>" not in "".join(samples)


def test_an_answer_that_says_its_thought_again_keeps_it(tmp_path: Path) -> None:
    template, _ = template_of(tmp_path, DROPS)
    given = [ASK, TOLD | {"reasoning_content": "told"}, AGAIN, LAST]
    said = [part.text for sample in template.texts(given, "").samples() for part in sample if part.is_learnt]
    assert said == ["<think></think>Zlast", "<think>told</think>Ztold"]


@pytest.mark.parametrize(("source", "bare"), [(KEEPS, set()), (DROPS, {chat_templates.WITHOUT_THOUGHT})])
def test_what_is_learnt_otherwise_than_asked_is_noted(tmp_path: Path, source: str, bare: set[str]) -> None:
    template, _ = template_of(tmp_path, source)
    for name, others in (("look", set()), ("hear", {chat_templates.UNOFFERED})):
        texts = template.texts(
            [ASK, CALLING, RESULT, TOLD, AGAIN, LAST], "", {"tools": [TOOL | {"name": name}]}
        )
        assert {*texts.notes(texts.segments())} == bare | others


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_notes_of_a_pair_are_of_its_own_answers(tmp_path: Path, column: str) -> None:
    """What one answer thought is not taken for the other's, and an answer in the prompt is not learnt."""
    template, _ = template_of(tmp_path, KEEPS)
    row = {"prompt": [ASK, CALLING, RESULT, TOLD, AGAIN], "chosen": [LAST], "rejected": [TOLD]}
    row |= {column: [LAST | {"reasoning_content": "Wthought"}], "tools": [TOOL | {"name": "hear"}]}
    rows, counts = Corpus({"train": lambda: [("here", row)]}), RowCounts()
    data = Preferences(SimpleNamespace(), PreferencesOptions())
    assert len([*data.texts(rows, "train", template, counts)]) == 1
    assert [*counts.of("field: ")] == [chat_templates.UNOFFERED]


def test_a_thought_follows_the_prompts_own_think(tmp_path: Path) -> None:
    """Where a template strips thoughts and its prompt begins one, as DeepSeek's do."""
    template, _ = template_of(tmp_path, STRIPS)
    given = [ASK, TOLD | {"reasoning_content": "Zthought"}, AGAIN, LAST]
    first = "<|im_start|>user\nZask<|im_end|>\n<|im_start|>assistant\n"
    second = "<|im_start|>user\nZagain<|im_end|>\n"
    assert learnt(template, given) == [
        first
        + "\n\nZtold<|im_end|>\n"
        + second
        + "<|im_start|>assistant\n<think>\n[\n</think>\n\nZlast<|im_end|>]\n",
        first + "<think>\n[Zthought\n</think>\n\nZtold<|im_end|>]\n",
    ]


def test_a_prompt_without_a_thought_is_answered_without(tmp_path: Path) -> None:
    source = DROPS.replace(ASKS, ASKS.replace("assistant\n", "assistant\n<think>{{ x or '' }}</think>"))
    template, _ = template_of(tmp_path, source)
    given = [ASK, TOLD, AGAIN, LAST | {"reasoning_content": "Wthought"}]
    texts = template.texts(given, "here")
    parts = [part for sample in texts.samples() for part in sample]
    assert [part.text for part in parts if part.is_learnt] == ["Zlast", "Ztold"]
    assert texts.notes(parts) == [
        "the chat template leaves out thoughts (<think>) of a message by the assistant"
    ]


def test_an_answer_follows_its_prompt_where_history_has_no_thought_or_another_end(tmp_path: Path) -> None:
    template, _ = template_of(tmp_path, SPEAKS)
    spaced, ask = {"role": "assistant", "content": " Hi. "}, "<|im_start|>user|Zagain<|im_end|>"
    asked, call = "<|im_start|>user|Zask<|im_end|><|im_start|>assistant", '<call>look{"at": "sky"}</call>'
    wanted = [asked + "[| Hi. <|im_end|>]" + ask + "<|im_start|>assistant[|Zlast</s>]"]
    assert learnt(template, [ASK, spaced, AGAIN, LAST]) == wanted
    (sample,) = learnt(template, [ASK, CALLING | {"reasoning_content": "Wwhy"}, RESULT, TOLD])
    result = "<|im_start|>tool|Zresult<|im_end|><|im_start|>assistant"
    assert sample == f"{asked}[(Wwhy)|{call}<|im_end|>]{result}[|Ztold</s>]"


AS_TEXT = {"name": "look", "arguments": '{"at": "sky"}'}
CALL_TEXT = '{"name": "look", "arguments": {"at": "sky"}}'
FORMS: dict[str, dict[str, Any]] = {
    "openai": {"messages": [ASK, CALLING | {"content": None}, RESULT, TOLD]},
    "arguments as text": {
        "messages": [ASK, {"role": "assistant", "tool_calls": [{"function": AS_TEXT}]}, RESULT, TOLD]
    },
    "function_call": {
        "messages": [
            ASK,
            {"role": "assistant", "content": "", "function_call": AS_TEXT},
            {"role": "function", "name": "look", "content": "Zresult"},
            TOLD,
        ]
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "Zask"},
            {"from": "function_call", "value": CALL_TEXT},
            {"from": "observation", "value": "Zresult"},
            {"from": "gpt", "value": "Ztold"},
        ]
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Zask"}]},
            {"role": "assistant", "content": [{"type": "tool_call", "value": f"[{CALL_TEXT}]"}]},
            {"role": "tool", "content": [{"type": "text", "value": "Zresult"}]},
            TOLD,
        ]
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tools", [[TOOL], [{"type": "function", "function": TOOL}], json.dumps([TOOL])])
def test_every_form_is_the_same_conversation(form: str, tools: Any) -> None:
    row = FORMS[form] | {"tools": tools}
    messages = chat_formats.parse_messages(row, "here", chat_formats.detect_chat_format(list(row)) or "")
    plain = [{k: v for k, v in m.items() if k != "name"} for m in messages]
    assert plain == [ASK, CALLING, RESULT, TOLD]
    values = chat_formats.template_values(row, "here")
    assert values == {"tools": [{"type": "function", "function": TOOL}]}
    assert chat_formats.template_values({"functions": [TOOL]}, "here") == values


def test_thoughts_have_many_names() -> None:
    parts = [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "Ztold"}]
    forms = [TOLD | {name: "why"} for name in chat_formats.THOUGHT_KEYS] + [TOLD | {"content": parts}]
    for form in forms:
        found = chat_formats.parse_messages({"messages": [ASK, form]}, "here", "messages")
        assert found[1] == TOLD | {"reasoning_content": "why"}


CHATML_TOLD = (  # a thought in a field that the template does not read
    "<|im_start|>user\nZask</s>\n<|im_start|>assistant\n[<think>\nwhy\n</think>\n\n<tool_call>\n"
    '{"name": "look", "arguments": {"at": "sky"}}\n</tool_call></s>]\n<|im_start|>user\n<tool_response>\n'
    "Zresult\n</tool_response></s>\n<|im_start|>assistant\n[Ztold</s>]\n"
)


def test_our_chatml_writes_tools_and_thoughts(tmp_path: Path) -> None:
    template, _ = template_of(tmp_path, None, "chatml")
    given = [ASK, CALLING | {"reasoning_content": "why"}, RESULT, TOLD]
    assert learnt(template, given) == [CHATML_TOLD]
    tools = learnt(template, given, chat_formats.template_values({"tools": [TOOL]}, ""))[0]
    assert tools.startswith("<|im_start|>system\n# Tools\n")
    assert tools.endswith(CHATML_TOLD)
    assert json.dumps(TOOL) in tools


FAMILIES = {
    "llama3": ("user<|end_header_id|>\n\nZask", "assistant<|end_header_id|>\n\n[Ztold"),
    "gemma": ("<start_of_turn>user\nZask", "<start_of_turn>model\n[Ztold"),
    "mistral": ("[INST] Zask [/INST]", "[ Ztold</s>]"),
    "phi3": ("<|user|>\nZask", "<|assistant|>\n[Ztold"),
    "zephyr": ("<|user|>\nZask</s>", "<|assistant|>\n[Ztold</s>]"),
    "qwen": ("<|im_start|>user\nZask", "<|im_start|>assistant\n[Ztold"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_names_of_families(tmp_path: Path, name: str) -> None:
    template, _ = template_of(tmp_path, None, name)
    (text,) = learnt(template, [{"role": "system", "content": "Zsystem"}, ASK, TOLD])
    assert all(part in text.replace("Zsystem\n\n", "") for part in FAMILIES[name])
    assert text.count("Zsystem") == 1


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "unknown role": ({"messages": [{"role": "oracle", "content": "x"}]}, (), "message 1 is by 'oracle'"),
    "a call without a name": (
        {"messages": [ASK, CALLING | {"tool_calls": [{"function": {"arguments": {}}}]}]},
        (),
        "message 2: call 1 has no name",
    ),
    "arguments that are no JSON": (
        {"messages": [ASK, CALLING | {"tool_calls": [{"name": "f", "arguments": "{"}]}]},
        (),
        "message 2: call 1: its arguments is no JSON",
    ),
    "a result without a call": ({"messages": [ASK, RESULT, TOLD]}, (), "message 2 is a tool's result"),
    "a result after a text": ({"messages": [ASK, TOLD, RESULT, LAST]}, (), "message 3 is a tool's result"),
    "tools that a template does not read": (
        {"messages": [ASK, TOLD], "tools": [TOOL]},
        ("--template", "plain"),
        "does not read `tools`.*--template chatml",
    ),
    "calls that a template leaves out": (
        {"messages": [ASK, CALLING, RESULT, TOLD]},
        ("--template", "plain"),
        "leaves out the call of look.*--template chatml",
    ),
    "a tool without a name": ({"messages": [ASK, TOLD], "tools": [{}]}, (), "tools: tool 1 has no name"),
    "kwargs of a row": (
        {"messages": [ASK, TOLD], "chat_template_kwargs": {"mood": 1}},
        (),
        "does not read `mood`",
    ),
}  # fmt: skip


def show(folder: Path, row: Any, *flags: str) -> str:
    """What `prepare --show 1` prints of two rows like this one."""
    (folder / "d.jsonl").write_text(f"{json.dumps(row)}\n" * 2, encoding="utf-8")
    words = ["--task", "causal-lm", "--data", str(folder / "d.jsonl"), "--model", "tiny"]
    words += ["--max-length", "900", "--valid", "0.5", "--show", "1"]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert prepare([*words, *flags]) == 0
    return said.getvalue()


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_with_its_place(tmp_path: Path, name: str) -> None:
    row, flags, says = BAD[name]
    with pytest.raises(UserError, match=says) as refused:
        show(tmp_path, row, *flags)
    assert "d.jsonl line " in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--template", "lama3"), "--template lama3; did you mean llama3|--template lama3.*llama3"),
        (("--template", "no.jinja"), "--template no.jinja: there is no such file"),
        (("--template-kwargs", "thinking"), "--template-kwargs thinking: write NAME=VALUE"),
        (("--template-kwargs", "mood=1"), "--template-kwargs mood: the chat template does not read it"),
    ],
)
def test_wrong_flags_of_templates_are_one_line(tmp_path: Path, flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        show(tmp_path, {"messages": [ASK, TOLD]}, *flags)


def test_what_is_read_of_tools_is_not_said_to_be_unread(tmp_path: Path) -> None:
    shown = show(tmp_path, {"messages": THINKING, "tools": [TOOL]}, "--template", "chatml")
    assert "not read" not in shown
    assert shown.count("]]") == 1 + 3  # the first says what they mean


def test_a_template_file_its_variables_and_what_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ 'loud' if loud else 'soft' }} "
                    "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n"
                    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    row = {"messages": [ASK, TOLD]}
    flags = ("--template", str(file), "--template-kwargs", "loud=true")
    tokenizer = make_tokenizer(tmp_path / "t", None, in_file=True)
    shown = show(tmp_path, row, *flags, "--tokenizer", str(tokenizer))
    assert "loud user: Zask</s>\nassistant: [[Ztold</s>]]" in shown
    softly = row | {"chat_template_kwargs": {"loud": False}}
    assert "soft user: Zask" in show(tmp_path, softly, *flags, "--tokenizer", str(tokenizer))
    file.write_text(file.read_text().replace("soft", "calm"))  # other content is other data
    shown = show(tmp_path, row, "--template", str(file), "--tokenizer", str(tokenizer))
    assert "calm user: Zask" in shown


@pytest.mark.parametrize("name", ["arguments", "parameters", "input"])
@pytest.mark.parametrize("as_text", [False, True])
def test_arguments_are_read_by_each_name_that_they_have(name: str, as_text: bool) -> None:
    given: Any = {"at": "sky"}
    call = {"name": "look", name: json.dumps(given) if as_text else given}
    row = {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]}
    (_, answer) = chat_formats.parse_messages(row, "row", "messages")
    assert answer["tool_calls"][0]["function"]["arguments"] == given


def test_calls_in_parquet_have_their_own_arguments(tmp_path: Path) -> None:
    calls = [{"name": "look", "arguments": {"at": "sky"}}, {"name": "dig", "arguments": {"deep": 2}}]
    rows = [{"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [c]}]} for c in calls]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    part = readers.find_splits(tmp_path / "rows.parquet", None)["train"]
    found = [chat_formats.parse_messages(row, at, "messages") for at, row in readers.read_rows(part)]
    assert [m[1]["tool_calls"][0]["function"] for m in found] == calls


def test_a_template_that_prints_arguments_gets_them_as_json() -> None:
    jinja = KEEPS.replace("c.function.arguments | tojson", "c.function.arguments")
    template = chat_templates.ChatTemplate("mine", jinja, "<|im_end|>", 0, "<|im_end|>")
    assert '{"at": "sky"}' in template.render(template.placed([ASK, CALLING]))
