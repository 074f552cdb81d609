"""Every field of a row stands in what is learnt from it, or is counted: templates x shapes x optional fields.

Each field holds a word of its own. A word is in a decoded sample, in a note that names its column and the
number of rows that lack it, or in a row that is left out with a count or refused by its line.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from isobatch.core.errors import UserError
from isobatch.data import base
from isobatch.data.text.chat_templates import ChatTemplate
from isobatch.launch.commands.plan import prepare
from isobatch.launch.predicting.tables import PromptReader

BEGIN, END = "<s>", "</s>"
SPECIAL = r"<[|｜][^<>'\s]+?[|｜]>|<(?:start|end)_of_turn>|\[/?INST\]"
OURS = ("auto", "alpaca", "chatml", "plain")

_TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_INST = (
    "{% if m.role == 'user' %}<s>[INST] {{ text | trim }} [/INST]{% else %} {{ text | trim }} </s>{% endif %}"
)
_ALTERNATE = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('no turn') }}{% endif %}"
)
SMALL = {
    "chatml": "{% for m in messages %}" + _TURN + "{% endfor %}" + _ASK,
    "system in the first question": (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}"
        "{% set text = '<<SYS>>' + system + '<</SYS>>' + m.content if loop.first and system else m.content %}"
        + _INST
        + "{% endfor %}"
    ),
    "refuses a system message": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{{ m.content | trim }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "drops a system message": (
        "{% for m in messages if m.role != 'system' %}" + _TURN + "{% endfor %}" + _ASK
    ),
    "roles alternate": (
        "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{{ system }}"
        "{% for m in messages[1 if system else 0:] %}" + _ALTERNATE + _TURN + "{% endfor %}" + _ASK
    ),
    "drops earlier thoughts": (
        "{% for m in messages %}{% set text = m.content if loop.last else m.content.split('</think>')[-1] %}"
        + _TURN.replace("m.content", "text")
        + "{% endfor %}"
        + _ASK
    ),
}
REFUSED = {"refuses a system message": {"system"}}
"""Template -> what a row may be refused for, in a line with a way out."""

Word = Callable[[str], str]
Options = frozenset[str]


SAID = ("think", "tool")
"""Fields that an assistant wrote: they may be learnt."""
CALLED = {"earlier": "earlier|turns|messages", "think": "think|thought|reasoning"}
"""Field that is no column -> what a note may call it."""


class Row(NamedTuple):
    """A row, and what must come of it."""

    values: dict[str, Any]
    words: dict[str, str]
    """Field -> its word; the part before the colon is what a note calls it."""
    options: Options


def thinking(word: Word, field: str, answer: str, thinks: bool) -> str:
    return f"<think>\n{word(field)}\n</think>\n\n{answer}" if thinks else answer


def columns(word: Word, options: Options) -> dict[str, Any]:
    """The optional columns of any row; what is absent is blank now and then."""
    found: dict[str, Any] = {name: word(name) for name in ("system", "context", "input") if name in options}
    if "history" in options:
        answer = thinking(word, "think: earlier", word("history: answer"), "earlier thoughts" in options)
        found["history"] = [[word("history: question"), answer]]
    return found


def flat(question: str, answer: str) -> Callable[[Word, Options], dict[str, Any]]:
    def make(word: Word, options: Options) -> dict[str, Any]:
        said = thinking(word, "think: last", word(answer + ": answer"), "thoughts" in options)
        return {question: word(question), answer: said, **columns(word, options)}

    return make


def turns(role: str, content: str, names: Mapping[str, str], word: Word, options: Options) -> list[Any]:
    said = [("user", word("question")), ("assistant", word("last: answer"))]
    if "earlier" in options:
        thought = thinking(word, "think: earlier", word("earlier: answer"), "earlier thoughts" in options)
        said = [("user", word("earlier: question")), ("assistant", thought), *said]
    if "system message" in options:
        said = [("system", word("system: message")), *said]
    return [{role: names[who], content: text} for who, text in said]


OPENAI = ("role", "content", {"user": "user", "assistant": "assistant", "system": "system"})
SHAREGPT = ("from", "value", {"user": "human", "assistant": "gpt", "system": "system"})


def listed(column: str, style: Any) -> Callable[[Word, Options], dict[str, Any]]:
    return lambda word, options: {column: turns(*style, word, options), **columns(word, options)}


def split_list(word: Word, options: Options) -> dict[str, Any]:
    said = turns(*OPENAI, word, options)
    return {"prompt": said[:-1], "completion": said[-1:], **columns(word, options)}


def pair(word: Word, options: Options) -> dict[str, Any]:
    answers = {"chosen": word("chosen: answer"), "rejected": word("rejected: answer")}
    return {"prompt": word("prompt"), **answers, **columns(word, options)}


def listed_pair(word: Word, options: Options) -> dict[str, Any]:
    said = turns(*OPENAI, word, options)
    other = [{"role": "assistant", "content": word("rejected: answer")}]
    return {"prompt": said[:-1], "chosen": said[-1:], "rejected": other, **columns(word, options)}


FLAT = {
    "instruction/output": flat("instruction", "output"),
    "instruction/response": flat("instruction", "response"),
    "prompt/completion": flat("prompt", "completion"),
    "question/answer": flat("question", "answer"),
}
LISTS = {
    "messages": listed("messages", OPENAI),
    "sharegpt": listed("conversations", SHAREGPT),
    "prompt/completion messages": split_list,
}
PAIRS = {"pair": pair, "pair of messages": listed_pair}
COLUMNS = [["", "system"], ["", "context"], ["", "input"], ["", "history"]]
IN_FLAT = [*COLUMNS[:3], ["", "history", "history|earlier|earlier thoughts"], ["", "thoughts"]]
IN_LISTS = [["", "system message"], ["", "earlier", "earlier|earlier thoughts"], *COLUMNS]
BLANK: dict[str, list[Any]] = {n: [None, "", "  \n"] for n in ("system", "context", "input")}
BLANK["history"] = [None, [], []]


def make_rows(make: Callable[[Word, Options], dict[str, Any]], choices: list[list[str]]) -> list[Row]:
    """A row of every choice of options: the first has none, and every other one has blank fields."""
    rows = []
    for number, chosen in enumerate(itertools.product(*choices)):
        options = {name for part in chosen for name in part.split("|")} - {""}
        words: dict[str, str] = {}

        def word(field: str, number: int = number, words: dict[str, str] = words) -> str:
            letters = re.sub("[^a-z]", "", field).upper()
            return words.setdefault(field, f"Z{letters}{number}Q")

        values = make(word, frozenset(options))
        if "history" in options:
            options.add("earlier")
        if options & {"system message"}:
            options.add("system")
        blank = {n: kinds[number % 3] for n, kinds in BLANK.items() if number % 2}
        rows.append(Row(blank | values, words, frozenset(options)))
    return rows


def make_tokenizer(folder: Path, template: str | None, in_file: bool) -> Path:
    """A tokenizer of bytes and of what a template writes; the template in a file, or in the settings."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([BEGIN, END, *sorted({*re.findall(SPECIAL, template or "")})])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BEGIN, "eos_token": END}
    if template and in_file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif template:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def samples(task: str, folder: Path, rows: list[Row], flags: tuple[str, ...]) -> tuple[str, str, Any]:
    """(what is learnt, all other text, the facts) of rows that `prepare` reads. Raises UserError."""
    for split, chosen in (("train", rows), ("valid", rows[:1])):
        lines = (json.dumps(row.values, ensure_ascii=False) + "\n" for row in chosen)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    said = io.StringIO()
    words = ("--task", task, "--data", str(folder), "--model", "tiny", "--max-length", "9000", "--json")
    with contextlib.redirect_stdout(said):
        assert prepare([*words, *flags]) == 0
    facts = json.loads(said.getvalue())
    found = base.load(Path(facts["folder"]) / "train")
    tokenizer = Tokenizer.from_file(str(Path(facts["folder"]) / "tokenizer.json"))
    parts: dict[bool, list[str]] = {True: [], False: []}
    for tokens, learn in (("tokens", "learn"), ("chosen", "chosen.learn"), ("rejected", "rejected.learn")):
        if learn in found:
            ids, mask = found[tokens].values, np.asarray(found[learn].values).astype(bool)
            for piece in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1):
                parts[bool(mask[piece[0]])].append(tokenizer.decode(ids[piece].tolist()))
    return "|".join(parts[True]), "|".join(parts[False]), facts["extra"]


def outcome(
    task: str, folder: Path, rows: list[Row], flags: tuple[str, ...], may_refuse: set[str]
) -> tuple[list[Row], str, str, list[str], Counter[str]]:
    """The rows that are not refused, what comes of them, and what is wrong with the refusals."""
    wrong: Counter[str] = Counter()
    while True:
        try:
            learnt, other, facts = samples(task, folder, rows, flags)
            return rows, learnt, other, facts["notes"], wrong
        except UserError as error:
            line = re.search(r"train\.jsonl line (\d+)", str(error))
            helps = "--template" in str(error) or "template" not in str(error)
            if line is None or not helps or "\n" in str(error):
                return [], "", "", [], wrong + Counter([f"all: refused without a line or a way out: {error}"])
            row = rows[int(line[1]) - 1]
            if not row.options:
                return [], "", "", [], wrong + Counter(["row without optional fields: refused"])
            if not (causes := row.options & may_refuse):
                wrong["+".join(sorted(row.options)) + ": refused"] += 1
            rows = [r for r in rows if r is not row and not r.options & causes]


def count_in(notes: list[str], pattern: str, count: int) -> bool:
    """Whether a note of train names this and says this number."""
    about = [note for note in notes if re.search(pattern, note, re.IGNORECASE)]
    return any(str(count) in re.findall(r"\d+", note.replace(",", "")) for note in about)


def faults(
    task: str, folder: Path, rows: list[Row], flags: tuple[str, ...], may_refuse: set[str]
) -> Iterator[str]:
    """What is wrong, as `FIELD: how`, once for a field."""
    kept, learnt, other, notes, wrong = outcome(task, folder, rows, flags, may_refuse)
    yield from (f"{what} ({count} rows)" for what, count in wrong.items())
    out = [row for row in kept if not any(word in learnt + other for word in row.words.values())]
    if out and not count_in(notes, r"train: rows left out", len(out)):
        yield f"row: {len(out)} left out without a count"
    if any(not row.options for row in out):
        yield "row: left out though it has no optional field"
    neutral = ("history", "earlier") if task == "dpo" else ("history",)
    lost: Counter[str] = Counter()
    masked: Counter[str] = Counter()
    for row in kept:
        for field, word in row.words.items() if row not in out else ():
            name, _, part = field.partition(": ")
            if word not in learnt + other:
                lost[field] += 1
            elif part == "answer" and name not in neutral and word not in learnt:
                masked[f"{field}: is not learnt"] += 1
            elif part != "answer" and name not in SAID and word in learnt:
                masked[f"{field}: is learnt"] += 1
    for field, count in lost.items():
        name = field.partition(": ")[0]
        if not count_in(notes, rf"\b(?:{CALLED.get(name, name)})", count):
            yield f"{field}: lost in {count} rows without a word"
    yield from (f"{what} ({count} rows)" for what, count in masked.items())


def all_faults(folder: Path, template: str, source: str | None, flags: tuple[str, ...] = ()) -> list[str]:
    """The faults of every shape under a template."""
    tokenizer = make_tokenizer(folder / "tokenizer", source, in_file=template not in SMALL)
    flags = (*flags, "--tokenizer", str(tokenizer))
    may_refuse = REFUSED.get(template, set())
    found = []
    for task, shapes, choices in (
        ("causal-lm", FLAT, IN_FLAT),
        ("causal-lm", LISTS, IN_LISTS),
        ("dpo", PAIRS, IN_LISTS),
    ):
        for number, (shape, make) in enumerate(shapes.items()):
            data = folder / f"{task}{choices is IN_LISTS}{number}"
            data.mkdir()
            rows = make_rows(make, choices if shape != "pair" else COLUMNS)
            found += [f"{shape}: {what}" for what in faults(task, data, rows, flags, may_refuse)]
    return found


def check(found: list[str]) -> None:
    """All of them at once: a mend of one may break another."""
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", SMALL)
def test_a_tokenizers_template_keeps_every_field(tmp_path: Path, name: str) -> None:
    check(all_faults(tmp_path, name, SMALL[name]))


@pytest.mark.parametrize("name", OURS)
def test_our_templates_keep_every_field(tmp_path: Path, name: str) -> None:
    check(all_faults(tmp_path, f"ours {name}", None, ("--template", name)))


OTHER: dict[str, Callable[[Word], dict[str, Any]]] = {
    "system_prompt": lambda word: {"system_prompt": word("system")},
    "input as a list": lambda word: {"input": [word("input: one"), word("input: two")]},
    "history as text": lambda word: {"history": f"User: {word('history')}"},
    "history as messages": lambda word: {
        "history": turns(*OPENAI, lambda name: word("history") if name == "question" else "Yes.", frozenset())
    },
    "category": lambda word: {"category": word("category")},
    "a second answer": lambda word: {"response": word("response")},
    "tools": lambda word: {"tools": json.dumps([{"name": word("tool")}])},
}
OF_MESSAGE: dict[str, Callable[[Word], dict[str, Any]]] = {
    "reasoning_content": lambda word: {"reasoning_content": word("think: reasoning")},
    "tool_calls": lambda word: {"tool_calls": [{"function": {"name": "f", "arguments": word("tool")}}]},
}


def with_others(make: Callable[[Word, Options], dict[str, Any]], name: str) -> Callable[..., dict[str, Any]]:
    """Rows with a field of another name or form, or of a message."""

    def made(word: Word, options: Options) -> dict[str, Any]:
        row = make(word, frozenset())
        if name in OF_MESSAGE and options:
            row["messages"][-1] |= OF_MESSAGE[name](word)
        return row | (OTHER[name](word) if name in OTHER and options else {})

    return made


@pytest.mark.parametrize("name", [*OTHER, *OF_MESSAGE])
def test_a_field_of_another_name_is_kept_counted_or_refused(tmp_path: Path, name: str) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", SMALL["chatml"], in_file=True)
    found = []
    for number, shape in enumerate(("instruction/output", "question/answer", "messages")):
        if name in OTHER or shape == "messages":
            (data := tmp_path / str(number)).mkdir()
            rows = make_rows(with_others((FLAT | LISTS)[shape], name), [["", "other", "other"]])
            flags = ("--tokenizer", str(tokenizer))
            found += [f"{shape}: {what}" for what in faults("causal-lm", data, rows, flags, {"other"})]
    check(found)


@pytest.mark.parametrize("template", ["chatml", "system in the first question", "alpaca"])
@pytest.mark.parametrize("shape", [*FLAT, *LISTS])
def test_predict_asks_as_was_learnt(tmp_path: Path, template: str, shape: str) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer", SMALL.get(template), in_file=False)
    choices = [part for part in (IN_FLAT if shape in FLAT else IN_LISTS) if "thoughts" not in part]
    rows = make_rows((FLAT | LISTS)[shape], choices)
    flags = ("--tokenizer", str(tokenizer), *(("--template", template) if template not in SMALL else ()))
    (tmp_path / "data").mkdir()
    learnt, other, facts = samples("causal-lm", tmp_path / "data", rows, flags)
    reader = PromptReader(template=ChatTemplate(**facts["template"]))
    wrong = Counter()
    for number, row in enumerate(rows):
        asked = "".join(part.text for part in reader.from_row(row.values, f"row {number}"))
        for field, word in row.words.items():
            is_answer = field.split(": ")[0] not in ("history", "earlier", "think") and ": answer" in field
            if (word in asked) != (word in learnt + other and not is_answer):
                wrong[f"{field}: {'not ' if word not in asked else ''}in the question"] += 1
    check([f"{what} ({count} rows)" for what, count in wrong.items()])


ASK, SAY = {"role": "user", "content": "Zask"}, {"role": "assistant", "content": "Zsay"}
EARLIER = {"role": "assistant", "content": "Zold"}
PAIR = {"chosen": "Zgood", "rejected": "Zbad"}
READ: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "a system text beside a prompt": (
        "dpo",
        {"system": "Zsystem", "prompt": "Zask", **PAIR},
        "Zgood Zbad",
        "Zsystem Zask",
    ),
    "an HTML element": (
        "causal-lm",
        {"prompt": "Zask <video>x</video>", "completion": "Zsay <image>"},
        "Zsay",
        "Zask",
    ),
}
NOTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "weights of a question": (
        "causal-lm",
        {"messages": [ASK | {"weight": 1}, SAY]},
        "the field `messages.weight` is not read",
    ),
    "fields of an object of lists": (
        "causal-lm",
        {"messages": {"role": ["user", "assistant"], "content": ["Zask", "Zsay"], "mood": ["a", "b"]}},
        "the field `messages.mood` is not read",
    ),
    "columns beside a text": ("causal-lm", {"text": "Zsay", "role": "user"}, "the field `role` is not read"),
    "an unanswered history": (
        "causal-lm",
        {"prompt": "Zask", "completion": "Zsay", "history": [["Zq", None]]},
        "rows left out: 1 with an empty answer",
    ),
    # Filters set all weights of a bad conversation to 0.
    "weights of 0": (
        "causal-lm",
        {"messages": [ASK, SAY | {"weight": 0}]},
        "rows left out: 1 with no answer to learn, as their weights are 0",
    ),
    "a weight of 0 of a pair": (
        "dpo",
        {"prompt": "Zask", "chosen": SAY | {"weight": 0}, "rejected": EARLIER},
        "rows left out: 1 with no answer to learn, as their weights are 0",
    ),
}
UNREADABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "half a weight": ("causal-lm", {"messages": [ASK, SAY | {"weight": 0.5}]}, "weight is 0.5: an answer is"),
    "no pairs": ("dpo", {"prompt": "Zask", "completion": "Zsay"}, "has no column chosen.*--task causal-lm"),
    "lists of unequal length": (
        "causal-lm",
        {"messages": {"role": ["user"], "content": ["a", "b"]}},
        "messages holds dict, not a list of messages",
    ),
}


def learn(
    task: str, folder: Path, *rows: dict[str, Any], flags: tuple[str, ...] = ()
) -> tuple[str, str, Any]:
    tokenizer = make_tokenizer(folder / "tokenizer", SMALL["chatml"], in_file=True)
    (folder / "data").mkdir()
    given = [Row(row, {}, frozenset()) for row in rows]
    return samples(task, folder / "data", given, ("--tokenizer", str(tokenizer), *flags))


@pytest.mark.parametrize("name", READ)
def test_a_row_is_read_rightly(tmp_path: Path, name: str) -> None:
    task, row, wanted, context = READ[name]
    learnt, other, facts = learn(task, tmp_path, row)
    assert (re.findall(r"Z\w+", learnt), [*dict.fromkeys(re.findall(r"Z\w+", other))]) == (
        wanted.split(),
        context.split(),
    )
    assert not [note for note in facts["notes"] if "not read" in note]


@pytest.mark.parametrize("name", NOTED)
def test_what_is_not_learnt_of_a_row_is_said(tmp_path: Path, name: str) -> None:
    task, row, wanted = NOTED[name]
    kept = PAIR | {"prompt": "Zask"} if task == "dpo" else {"messages": [ASK, SAY]}
    kept = {"prompt": "Zask", "completion": "Zsay"} if "completion" in row else kept
    notes = learn(task, tmp_path, {"text": "Zsay"} if "text" in row else kept, row)[2]["notes"]
    assert [note for note in notes if note.endswith(wanted)], notes
    assert f"1 row: {wanted}" in notes or f"train: {wanted}" in notes


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_learnt_is_one_line(tmp_path: Path, name: str) -> None:
    task, row, says = UNREADABLE[name]
    with pytest.raises(UserError, match=says) as refused:
        learn(task, tmp_path, row)
    assert "\n" not in str(refused.value)
    assert str(tmp_path / "data") in str(refused.value)
    assert "did you mean" not in str(refused.value)


def test_weights_decide_alone_what_is_learnt(tmp_path: Path) -> None:
    row = {"messages": [ASK, SAY | {"weight": 1}]}
    with pytest.raises(UserError, match=r"--response-only off: .*train\.jsonl line 1 says by weights"):
        learn("causal-lm", tmp_path, row, flags=("--response-only", "off"))
