"""Tests of data/text/conversations.py: row formats, chat templates, and loss masks against masks by hand."""

from __future__ import annotations

import itertools
import json
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.data import chat_formats, tokenizers
from isobatch.data.text import chat_templates, jinja_sandbox
from isobatch.data.text import conversations as truncation
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.data.text.conversations import TokenRow
from isobatch.data.text.dataset import Text, TextOptions
from isobatch.data.text.row_fields import CUTS
from isobatch.tests.unit import test_plain_text

if TYPE_CHECKING:
    from pathlib import Path

END = tokenizers.END_OF_TEXT
ADD = {"instruction": "Add.", "input": "1 2", "output": "3"}
HELLO = {"instruction": "Say hello.", "input": "", "output": "hello"}
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "he?"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you."},
]


def byte_tokenizer(folder: Path, *more: str, **settings: Any) -> Path:
    """A folder with a tokenizer of the 256 bytes, `he`, and `more`; and its settings."""
    test_plain_text.byte_tokenizer(folder, *more)
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make(folder: Path, rows: list[Any], tokenizer: Path | None = None, **changes: Any) -> Text:
    """The kind of data over `rows`, one file for training and one for validation."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "valid"):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    options = {k: changes.pop(k) for k in list(changes) if k in TextOptions.__dataclass_fields__}
    if tokenizer is None:
        tokenizer = byte_tokenizer(folder / "tokenizer", END)
    values = {"model": "tiny", "revision": None, "format": None, "max_length": 400, "seed": 0, **changes}
    return Text(SimpleNamespace(data=str(folder), tokenizer=str(tokenizer), **values), TextOptions(**options))


def prepared(folder: Path, rows: list[Any], tokenizer: Path | None = None, **changes: Any) -> Any:
    """(facts, columns of train, tokenizer) as they come from the disk."""
    text = make(folder, rows, tokenizer, **changes)
    text.check()
    extra = text.prepare(folder / "out")
    opened = tokenizers.open_tokenizer(folder / "out" / "tokenizer.json")
    return extra, text.open(folder / "out", "train").columns, opened


def marked(columns: Any, tokenizer: Any, row: int = 0) -> str:
    """A row's text, what is learnt of it in «»."""
    tokens, learn = (columns[k].rows(np.array([row]))[0] for k in ("tokens", "learn"))
    size = columns["tokens"].lengths[row]
    assert columns["token.weight"][row] == learn.sum() > 0
    out, open_ = "", False
    for token, learnt in zip(tokens[:size].tolist(), learn[:size].tolist(), strict=True):
        out += ("«" if learnt and not open_ else "»" if open_ and not learnt else "") + tokenizer.decode(
            [token], skip_special_tokens=False
        )
        open_ = bool(learnt)
    return out + ("»" if open_ else "")


WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n«3<|endoftext|>»"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nSay hello.\n\n### Response:\n«hello<|endoftext|>»"
)


def test_alpaca_rows_are_written_in_stanfords_words(tmp_path: Path) -> None:
    extra, columns, tokenizer = prepared(tmp_path, [ADD, HELLO])
    assert [marked(columns, tokenizer, row) for row in (0, 1)] == [WITH_INPUT, WITHOUT_INPUT]
    # 3 and its end; he, l, l, o and the end.
    assert columns["token.weight"].tolist() == [2, 5]
    assert extra["form"] == "conversations"
    assert extra["template"]["name"] == "alpaca"
    assert extra["prompts"][0] == [WITH_INPUT.partition("«")[0], "3"]
    sizes = extra["splits"]["train"]
    assert (sizes["predicted"], sizes["response_tokens"], sizes["words"], sizes["bytes"]) == (7, 7, 2, 6)
    assert sizes["prompt_tokens"] == len(columns["tokens"].values) - 7


TWO_TURNS = {
    "chatml": (
        "<|im_start|>system\nBe kind.<|endoftext|>\n<|im_start|>user\nhe?<|endoftext|>\n"
        "<|im_start|>assistant\n«Hi!<|endoftext|>»\n<|im_start|>user\nBye<|endoftext|>\n"
        "<|im_start|>assistant\n«See you.<|endoftext|>»"
    ),
    "alpaca": (
        "Be kind.\n\n### Instruction:\nhe?\n\n### Response:\n«Hi!<|endoftext|>»\n\n"
        "### Instruction:\nBye\n\n### Response:\n«See you.<|endoftext|>»"
    ),
    "plain": "Be kind.\nhe?\n«Hi!<|endoftext|>»\nBye\n«See you.<|endoftext|>»",
}


@pytest.mark.parametrize("name", TWO_TURNS)
def test_two_turns_learn_the_assistants_tokens_only(tmp_path: Path, name: str) -> None:
    _, columns, tokenizer = prepared(tmp_path, [{"messages": CHAT}], template=name)
    assert marked(columns, tokenizer) == TWO_TURNS[name]


def test_messages_are_chatml_by_default_and_close_turns_with_its_own_token(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", END, "<|im_start|>", "<|im_end|>")
    extra, columns, opened = prepared(tmp_path / "d", [{"messages": CHAT[1:3]}], tokenizer)
    assert marked(columns, opened) == (
        "<|im_start|>user\nhe?<|im_end|>\n<|im_start|>assistant\n«Hi!<|im_end|>»"
    )
    assert columns["tokens"].values[-1] == extra["template"]["end_id"] == opened.token_to_id("<|im_end|>")
    assert extra["eos"] == opened.token_to_id(END)


WAYS = (str.upper, str.title, lambda name: name.replace("_", "-"), lambda name: f"\ufeff {name.title()} ")


@pytest.mark.parametrize("way", WAYS)
def test_every_column_is_known_however_it_is_written(way: Any) -> None:
    assert {*chat_formats.ANSWERS_OF, *chat_formats.SYSTEM_COLUMNS, *chat_formats.CHAT_COLUMNS} <= {
        *chat_formats.KNOWN.values()
    }
    for name in chat_formats.KNOWN.values():
        written = way(name)
        assert chat_formats.known_names({written: 1, "id": 2}) == {name: 1, "id": 2}
        assert chat_formats.known_names({name: 1, written: 2})[name] == (2 if written == name else 1)
    for question, answers in chat_formats.ANSWERS_OF.items():
        found = chat_formats.detect_chat_format([way(question), way(answers[0])])
        assert found == chat_formats.detect_chat_format([question, answers[0]])


def test_questions_in_capitals_are_learnt(tmp_path: Path) -> None:
    names = ("Question", "ANSWER", "System Prompt"), ("question", "answer", "system_prompt")
    rows = [[dict(zip(three, ("how?", "so", "be kind"), strict=True))] * 3 for three in names]
    (_, found, _), (_, wanted, _) = (prepared(tmp_path / str(n), one) for n, one in enumerate(rows))
    assert np.array_equal(found["tokens"].values, wanted["tokens"].values)


def test_a_named_text_column_wins(tmp_path: Path) -> None:
    rows = [{"text": "he", "messages": CHAT[1:3]}] * 3
    extra, columns, _ = prepared(tmp_path / "a", rows, text_column="text")
    assert "learn" not in columns
    assert "form" not in extra
    extra, columns, _ = prepared(tmp_path / "b", rows)
    assert "learn" in columns
    assert any("--text-column text" in note for note in extra["notes"])
    assert chat_formats.detect_chat_format(["prompt", "completion", "id"]) == "prompt -> completion"
    assert chat_formats.detect_chat_format(["prompt", "completion", "text"]) is None
    assert chat_formats.detect_chat_format(["prompt", "chosen", "rejected"]) is None


def row(text: str) -> TokenRow:
    """A token for each letter; capitals are an answer's."""
    return TokenRow(
        np.array([ord(c) for c in text], np.uint16), np.array([c.isupper() for c in text], np.uint8)
    )


def text_of(found: TokenRow) -> str:
    return "".join(map(chr, found.tokens.tolist()))


@pytest.mark.parametrize(
    ("given", "width", "kept", "prompt", "answer", "turns"),
    [
        ("[abcd]EFGhi", 9, "[abcd]EFG", False, False, False),  # what follows the last answer is not learnt
        ("[abcd]EFG", 7, "[cd]EFG", True, False, False),  # the question's end, between the template's tokens
        ("[abcd]EFG", 5, "d]EFG", True, False, False),  # no room for a question within the template
        # an answer that leaves one token to precede it
        ("[abcd]EFGHIJKLM", 8, "[cd]EFGH", True, True, False),  # too long alone: its prompt keeps half
        ("[a]B[cd]E[f]G", 9, "[a]B[cd]E", False, False, True),
        ("[a]B[cde]F", 9, "[a]B[de]F", True, False, False),  # a later question is cut,
        # or its turn is left out
        ("[abc]D[e]F", 8, "[abc]D", False, False, True),
    ],
)
def test_questions_are_cut_before_answers(
    given: str, width: int, kept: str, prompt: bool, answer: bool, turns: bool
) -> None:
    """Lower-case letters are a question's, brackets the template's."""
    found, cuts = truncation.fit_turns(
        row(given), lambda: np.array([c.islower() for c in given]), width, True
    )
    assert text_of(found) == kept
    assert [name in cuts for name in CUTS] == [prompt, answer, turns]


def test_an_answer_that_fits_is_whole_at_every_width() -> None:
    for width, template, question, answer in itertools.product(
        range(2, 16), range(4), range(6), range(1, 16)
    ):
        given = "[" * template + "a" * question + "Z" * answer
        fits = partial(truncation.fit_turns, max_length=width, response_only=True)
        kept, cuts = fits(row(given), lambda g=given: np.array([c == "a" for c in g]))
        assert len(kept.tokens) == min(len(given), width)
        is_cut = len(given) > width <= answer and (answer > width or template + question > 0)
        assert ("answers_cut" in cuts) == is_cut
        assert is_cut or text_of(kept).count("Z") == answer
        assert truncation.learn_mask(kept, True).any() or answer == 1 == len(given)


def test_cuts_are_counted_and_never_lose_all_of_an_answer(tmp_path: Path) -> None:
    long = {"instruction": "why " * 50, "output": "so"}
    wordy = {"instruction": "why", "output": "so " * 50}
    extra, columns, tokenizer = prepared(tmp_path, [long, wordy], template="plain", max_length=20)
    # s, o and the end; all of the prompt that 17 tokens hold.
    assert marked(columns, tokenizer, 0) == ("why " * 5 + "\n")[-17:] + "«so<|endoftext|>»"
    assert marked(columns, tokenizer, 1) == "why\n«" + ("so " * 6)[:16] + "»"
    assert "train: in 1 of 2 rows the prompt loses its beginning to fit --max-length 20" in extra["notes"]
    assert "train: in 1 of 2 rows answers are cut to fit --max-length 20" in extra["notes"]
    # Only what is kept is counted: so, and 16 bytes of the other answer.
    assert extra["splits"]["train"]["bytes"] == 2 + 16
    assert extra["splits"]["train"]["words"] == 1 + 6


def test_rows_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [HELLO, {**HELLO, "output": " "}, {**HELLO, "output": None}, {"instruction": "", "output": "x"}]
    extra, columns, _ = prepared(tmp_path / "a", rows)
    assert len(columns["token.weight"]) == 1
    wanted = "train: rows left out: 2 with an empty answer, 1 with an empty instruction"
    assert wanted in extra["notes"]
    blank, null = ([*CHAT[:2], {"role": "assistant", "content": nothing}] for nothing in ("", None))
    rows = [{"messages": m} for m in (CHAT, CHAT[:2], [], blank, null, CHAT[2:3], CHAT[2:])]
    extra, columns, tokenizer = prepared(tmp_path / "b", rows, template="plain")
    said = "2 with no answer, 2 with an empty answer, 1 with no question before the answer"
    assert said in str(extra["notes"])
    assert "2 rows: an answer before any question is left out" in extra["notes"]
    assert marked(columns, tokenizer, 1) == "Bye\n«See you.<|endoftext|>»"


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({"eos_token": "<end>"}, "<end>"),
        ({"bos_token": "<end>"}, "<end>"),  # nothing else is there to close an answer with
    ],
)
def test_a_tokenizer_without_an_end_falls_back(tmp_path: Path, settings: Any, end: str) -> None:
    tokenizer = byte_tokenizer(tmp_path / "t", "<end>", **settings)
    extra, columns, opened = prepared(tmp_path / "d", [{"messages": CHAT}], tokenizer, template="plain")
    assert marked(columns, opened) == TWO_TURNS["plain"].replace(END, end)
    assert extra["eos"] == opened.token_to_id(end)


def test_a_tokenizer_that_begins_texts_begins_conversations(tmp_path: Path) -> None:
    from tokenizers import processors

    opened = tokenizers.open_tokenizer(byte_tokenizer(tmp_path / "t", "<s>", "</s>"))
    opened.add_special_tokens(["<s>", "</s>"])
    opened.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", opened.token_to_id("<s>"))]
    )
    (tmp_path / "u").mkdir()
    opened.save(str(tmp_path / "u" / "tokenizer.json"))
    _, columns, opened = prepared(tmp_path / "d", [{"messages": CHAT}], tmp_path / "u", template="plain")
    assert marked(columns, opened) == "<s>" + TWO_TURNS["plain"].replace(END, "</s>")


MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content | trim }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DUMB = "{% for m in messages if m.role == 'user' %}{{ m.content }}\n{% endfor %}"


def own(folder: Path, template: Any, **settings: Any) -> Path:
    more = (END, "<|im_start|>", "<|im_end|>", "<s>", "</s>")
    return byte_tokenizer(folder, *more, chat_template=template, **settings)


def test_the_tokenizers_own_template_comes_first(tmp_path: Path) -> None:
    tokenizer = own(tmp_path / "t", MISTRAL, eos_token="</s>", bos_token="<s>")
    extra, columns, opened = prepared(tmp_path / "d", [{"messages": CHAT[1:]}], tokenizer)
    assert marked(columns, opened) == "<s>[INST] he? [/INST]« Hi!</s>»[INST] Bye [/INST]« See you.</s>»"
    assert extra["template"]["name"] == chat_templates.TOKENIZER_TEMPLATE
    assert extra["template"]["jinja"] == MISTRAL
    # The same text as the prompt that a program writes with what facts say.
    again = ChatTemplate(**json.loads(json.dumps(extra["template"])))
    assert again.render(CHAT[1:2], for_answer=True) == extra["prompts"][0][0] == "<s>[INST] he? [/INST]"
    assert again.render(CHAT[1:4], for_answer=True).endswith("Hi!</s>[INST] Bye [/INST]")


def test_a_template_file_comes_before_the_settings_and_counts_for_the_identity(tmp_path: Path) -> None:
    tokenizer = own(tmp_path / "t", MISTRAL, eos_token="</s>", bos_token="<s>")
    text = make(tmp_path / "d", [{"messages": CHAT[1:]}], tokenizer)
    before = text.identity()
    (tokenizer / "chat_template.jinja").write_text("{{ messages[0].content }}|")
    assert chat_templates.read_tokenizer_template(tokenizer) == "{{ messages[0].content }}|"
    assert text.identity() != before
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    assert chat_templates.read_tokenizer_template(own(tmp_path / "u", named)) == "y"
    assert chat_templates.read_tokenizer_template(byte_tokenizer(tmp_path / "v")) is None


def test_tokens_and_mask_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = own(tmp_path / "t", TAGGED, eos_token=END)
    extra, columns, opened = prepared(tmp_path / "d", [{"messages": CHAT}], tokenizer)
    theirs = PreTrainedTokenizerFast(tokenizer_object=opened, chat_template=extra["template"]["jinja"])
    found = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    size = int(columns["tokens"].lengths[0])
    assert columns["tokens"].values.tolist() == found["input_ids"][:size]
    assert columns["learn"].values.tolist() == found["assistant_masks"][:size]
    assert len(found["input_ids"]) == size + 1  # the line break behind the last answer
    for name in ("alpaca", "chatml", "plain"):
        extra, columns, _ = prepared(tmp_path / name, [{"messages": CHAT}], tokenizer, template=name)
        tokens = theirs.apply_chat_template(
            CHAT, chat_template=extra["template"]["jinja"], eos_token=END, return_dict=True
        )["input_ids"]
        assert columns["tokens"].values.tolist() == tokens[: len(columns["tokens"].values)]


BESIDE = {"system": "Be kind.", "history": [["Hi", "Hi!"]], "context": "It rains.", "input": "Now."}
HE = {"role": "user", "content": "he?"}
SHAPES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "he?", "completion": "Yes."},
    "messages": {"messages": [HE, {"role": "assistant", "content": "Yes."}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "he?"}, {"from": "gpt", "value": "Yes."}]},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_fields_beside_a_conversation_are_learnt_from(tmp_path: Path, shape: str) -> None:
    """By a template that takes a system text, and by one that refuses it; both know nothing of an `input`."""
    row = SHAPES[shape] | BESIDE | {"notes": "x", "id": 3, "empty": " "}
    tokenizer = own(tmp_path / "t", TAGGED, eos_token=END)
    extra, columns, opened = prepared(tmp_path / "d", [row, row], tokenizer)
    assert marked(columns, opened) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n«Hi!<|im_end|>»\n<|im_start|>user\nhe?\nNow.\nIt rains.<|im_end|>\n"
        "<|im_start|>assistant\n«Yes.<|im_end|>»"
    )
    # Two rows of each split, each field named once.
    named = [note for note in extra["notes"] if "not read" in note]
    assert named == [f"4 rows: the field `{name}` is not read" for name in ("notes", "id")]
    tokenizer = own(tmp_path / "u", MISTRAL, eos_token="</s>", bos_token="<s>")
    extra, columns, opened = prepared(tmp_path / "e", [row, row], tokenizer)
    assert marked(columns, opened) == (
        "<s>[INST] Be kind.\n\nHi [/INST]« Hi!</s>»[INST] he?\nNow.\nIt rains. [/INST]« Yes.</s>»"
    )
    assert f"4 rows: {chat_templates.MOVED}" in extra["notes"]


DEAF = "{% for m in messages if m.role != 'system' %}" + TAGGED.split("%}", 1)[1]
FIRST = "{% if messages[0].role == 'system' %}{{ messages[0].content }}|{% endif %}" + DEAF
LATE = [*CHAT[1:3], CHAT[0], *CHAT[3:]]
TURN = "<|im_start|>user\nhe?<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n"


@pytest.mark.parametrize(
    ("template", "given", "begins"),
    [
        (TAGGED, LATE, TURN + "<|im_start|>system\nBe kind.<|im_end|>"),
        (FIRST, CHAT, "Be kind.|<|im_start|>user\nhe?<|im_end|>"),
        (FIRST, LATE, TURN + "<|im_start|>user\nBe kind.\n\nBye<|im_end|>"),
        (DEAF, CHAT, "<|im_start|>user\nBe kind.\n\nhe?<|im_end|>"),
    ],
)
def test_a_system_text_is_where_a_template_writes_it(template: str, given: Any, begins: str) -> None:
    written = ChatTemplate("tokenizer", template, "<|im_end|>", 0, "<|im_end|>")
    segments = written.texts(given, "here").segments()
    text = "".join(s.text + "<|im_end|>" * s.is_answer for s in segments)
    assert text.startswith(begins)
    assert text.count("Be kind.") == 1


@pytest.mark.parametrize(
    ("template", "rows", "message"),
    [
        (
            MISTRAL,
            [*CHAT[1:2], *CHAT[1:]],
            r"line 1: the chat template refuses this conversation \(Roles must alt",
        ),
        (DUMB, CHAT[1:], r"line 1: .* writes this conversation otherwise .* --template alpaca\|chatml"),
        ("{% for", CHAT, r"--template auto: the chat template refuses this conversation"),
    ],
)
def test_a_template_that_cannot_tell_answers_is_refused(
    tmp_path: Path, template: str, rows: Any, message: str
) -> None:
    tokenizer = own(tmp_path / "t", template, eos_token="</s>", bos_token="<s>")
    with pytest.raises(UserError, match=message) as error:
        make(tmp_path / "d", [{"messages": rows}], tokenizer).read()
    assert "\n" not in str(error.value)


def test_a_template_that_closes_nothing_gets_an_end(tmp_path: Path) -> None:
    open_end = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    open_end += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = own(tmp_path / "t", open_end, eos_token="</s>")
    _, columns, opened = prepared(tmp_path / "d", [{"messages": CHAT[1:]}], tokenizer)
    assert marked(columns, opened) == (
        "user: he?\nassistant: «Hi!</s>»\nuser: Bye\nassistant: «See you.</s>»"
    )


def rendered(template: str, x: Any = 1) -> Any:
    """The text, or why there is none."""
    found: dict[Any, Any] = {}
    refused = jinja_sandbox.render(template, [({"messages": [], "x": x}, [(0, False)], found)])
    return refused or found[0, False].text


def test_a_template_reaches_nothing_outside_and_knows_no_today() -> None:
    for escape in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'x' %}"):
        assert rendered(escape).startswith(("access to attribute", "no loader", "'ImmutableSandboxedEnv"))
    assert rendered("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    assert rendered("{{ x | tojson }}", {"é": "<"}) == '{"é": "<"}'


FOREVER = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
MEMORY = "it needs more than 1 GiB of memory"
TOO_MUCH = {
    "{{ 'x' * 10**10 }}": MEMORY,
    "{{ 'x' | center(10**11) }}": MEMORY,
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}": MEMORY,
    "{{ 'x' * 20000000 }}": "it writes 20,000,000 characters, and may write 16,777,216",
    "{{" + "(" * 20000 + "1" + ")" * 20000 + "}}": "maximum recursion depth exceeded",
}


def test_a_template_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that came with a run or a tokenizer neither hangs nor eats the memory; the next one is rendered."""
    for seconds, refused in ((60.0, TOO_MUCH), (1.0, {FOREVER: "it takes over 1 s"})):
        monkeypatch.setattr(jinja_sandbox, "SECONDS", seconds)
        jinja_sandbox.close()  # the next process has that limit
        for template, reason in refused.items():
            assert rendered(template).startswith(reason)
            assert rendered("{{ x }}") == "1"
    jinja_sandbox.close()


def test_an_answer_that_quotes_the_end_is_kept_whole(tmp_path: Path) -> None:
    quoting = [CHAT[1], {"role": "assistant", "content": f"say {END} twice"}, *CHAT[3:]]
    _, columns, tokenizer = prepared(tmp_path, [{"messages": quoting}], template="plain")
    assert marked(columns, tokenizer) == (
        "he?\n«say <|endoftext|> twice<|endoftext|>»\nBye\n«See you.<|endoftext|>»"
    )
