"""Tests of data/preferences/answers.py: judged answers in rows of any form, and answers to other prompts."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.data.chat_formats import SkippedRowError
from isobatch.data.preferences.answers import (
    JudgedAnswers,
    _with_another_prompt,
    require_columns,
)
from isobatch.data.preferences.dataset import PreferencesOptions
from isobatch.launch.local.shown_samples import shown_samples

if TYPE_CHECKING:
    from pathlib import Path

ASKED = {"role": "user", "content": "Why?"}
SAID, WRONG = ({"role": "assistant", "content": text} for text in ("Because.", "No."))
TEXTS = {"prompt": "Why?", "completion": "Because."}
ROWS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "texts": ({**TEXTS, "label": True}, [([ASKED], [SAID], True)]),
    "a number": ({**TEXTS, "label": 0}, [([ASKED], [SAID], False)]),
    "a cell of a table": ({**TEXTS, "label": "0"}, [([ASKED], [SAID], False)]),
    "a word": ({**TEXTS, "label": " Undesirable"}, [([ASKED], [SAID], False)]),
    "messages": ({"messages": [ASKED, SAID], "kto_tag": "false"}, [([ASKED], [SAID], False)]),
    "an earlier answer": (
        {"messages": [ASKED, SAID, ASKED, WRONG], "label": True},
        [([ASKED, SAID, ASKED], [WRONG], True)],
    ),
    "lists": ({"prompt": [ASKED], "completion": [SAID], "label": True}, [([ASKED], [SAID], True)]),
    "a pair": (
        {"prompt": "Why?", "chosen": "Because.", "rejected": "No."},
        [([ASKED], [SAID], True), ([ASKED], [WRONG], False)],
    ),
}


def make(folder: Path | str = "") -> JudgedAnswers:
    recipe: Any = SimpleNamespace(
        data=str(folder), format=None, tokenizer=None, model="tiny", revision=None, max_length=32, seed=0
    )
    return JudgedAnswers(recipe, PreferencesOptions(vocab_size=257))


@pytest.mark.parametrize("name", ROWS)
def test_a_judged_answer_is_found_in_any_form(name: str) -> None:
    row, wanted = ROWS[name]
    found, _ = make().read_row(row, "row")
    assert [(one.prompt, *one.answers, one.is_good) for one in found] == wanted


@pytest.mark.parametrize("label", ["perhaps", 0.5, 2, [True]])
def test_a_label_that_says_nothing_is_refused(label: Any) -> None:
    with pytest.raises(
        UserError, match=r"row: label is .*: it says whether the answer is good: true or false"
    ):
        make().read_row({**TEXTS, "label": label}, "row")


def test_rows_without_a_label_or_a_prompt_are_left_out() -> None:
    for row in ({**TEXTS, "label": None}, {"prompt": " ", "completion": "x", "label": True}):
        with pytest.raises(SkippedRowError):
            make().read_row(row, "row")
    with pytest.raises(UserError, match="has no column label"):
        require_columns(["prompt", "completion"], "answers.jsonl")


@pytest.mark.parametrize("prompts", ["abc", "aab", "aba", "aabbba", "abbbb", "aaaab"])
def test_the_other_answer_is_of_the_next_row_with_another_prompt(prompts: str) -> None:
    count = len(prompts)
    wanted = [
        next(m % count for m in range(n + 1, n + count) if prompts[m % count] != prompts[n])
        for n in range(count)
    ]
    assert _with_another_prompt([letter.encode() for letter in prompts]) == wanted
    assert _with_another_prompt([b"a"] * count) == []


def test_samples_hold_their_own_and_the_other_answer(tmp_path: Path) -> None:
    names = "one two three four five six".split()  # noqa: SIM905
    rows = [{"prompt": f"<{n}>", "completion": f" {n}!", "label": n != "two"} for n in names]
    for split in ("train", "valid"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = make(tmp_path)
    data.check()
    extra = data.prepare(tmp_path / "prepared")
    source = data.open(tmp_path / "prepared", "train")
    found = source.fetch(np.arange(6))
    assert found["label"].tolist() == [1, 0, 1, 1, 1, 1]
    assert source.lengths(np.arange(6)).tolist() == found["row_length"].max(1).tolist()
    facts: Any = SimpleNamespace(folder=str(tmp_path / "prepared"), samples={"train": 6})
    tokenizer = data.prepared_tokenizer(facts)
    shown = shown_samples(data, facts, 9, on_terminal=False)
    assert [
        f"<{name}>[[ {name}!<|endoftext|>]]" in text for name, text in zip(names, shown, strict=True)
    ] == [True] * 6
    for n, (own, other) in enumerate(found["tokens"]):
        texts = [
            tokenizer.decode(row[: found["row_length"][n, k]].tolist()) for k, row in enumerate((own, other))
        ]
        assert texts == [f"<{names[n]}> {names[n]}!", f"<{names[n]}> {names[(n + 1) % 6]}!"]
    assert "train: 5 good answers, 1 bad ones" in extra["notes"]
