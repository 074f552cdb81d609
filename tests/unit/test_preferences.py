"""Tests of data/preferences/: rows as pairs, their tokens, truncation, and what is said of bad ones."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.data.base import save
from isobatch.data.chat_formats import SkippedRowError
from isobatch.data.preferences.dataset import Preferences, PreferencesOptions
from isobatch.data.preferences.encoder import fit_answers
from isobatch.data.preferences.pairs import parse_pair
from isobatch.data.text.conversations import TokenRow
from isobatch.launch.local.shown_samples import shown_samples

if TYPE_CHECKING:
    from pathlib import Path

PROMPT, GOOD, BAD = "Why is the sky blue?", "Because of Rayleigh scattering.", "No idea."
HUMAN = f"\n\nHuman: {PROMPT}\n\nAssistant:"
EARLIER = [("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi!")]


def turns(*parts: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in parts]


def user(text: str) -> list[dict[str, str]]:
    return turns(("user", text))


def said(text: str) -> list[dict[str, str]]:
    return turns(("assistant", text))


WHOLE = turns(*EARLIER, ("user", PROMPT))
LONGER = said(GOOD) + user("So?") + said("Yes.")
SAME = (user(PROMPT), said(GOOD), said(BAD))
ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "texts": ({"prompt": PROMPT, "chosen": GOOD, "rejected": BAD}, SAME),
    "texts that begin with the prompt": (
        {"prompt": PROMPT, "chosen": PROMPT + GOOD, "rejected": PROMPT + BAD},
        SAME,
    ),
    "texts without a prompt": (
        {"chosen": f"{HUMAN} Yes", "rejected": f"{HUMAN} Yeah"},
        (user(HUMAN), said(" Yes"), said(" Yeah")),
    ),
    "one text begins with the other": (
        {"chosen": "Q: so?\nA: yes sir", "rejected": "Q: so?\nA: yes"},
        (user("Q: so?\nA:"), said(" yes sir"), said(" yes")),
    ),
    "messages": ({"prompt": user(PROMPT), "chosen": said(GOOD), "rejected": said(BAD)}, SAME),
    "messages with a prompt of text": ({"prompt": PROMPT, "chosen": said(GOOD), "rejected": said(BAD)}, SAME),
    "whole conversations": (
        {"chosen": WHOLE + said(GOOD), "rejected": WHOLE + said(BAD)},
        (WHOLE, said(GOOD), said(BAD)),
    ),


    "answers that go on": (
        {"chosen": user(PROMPT) + LONGER, "rejected": user(PROMPT) + said(BAD)},
        (user(PROMPT), LONGER, said(BAD)),
    ),
    "what lies beside an instruction": (
        {
            **{"instruction": PROMPT, "input": "At noon.", "chosen": GOOD, "rejected": BAD},
            **{"system": "Be kind.", "history": [["Hello", "Hi!"]]},
        },
        ([*turns(*EARLIER), user(PROMPT)[0] | {"input": "At noon."}], said(GOOD), said(BAD)),
    ),
    "a conversation and two messages": (
        {"conversations": WHOLE + said(GOOD), "chosen": said(GOOD)[0], "rejected": said(BAD)[0]},
        (WHOLE, said(GOOD), said(BAD)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_every_form_of_a_row_is_a_prompt_and_two_answers(name: str) -> None:
    row, wanted = ROWS[name]
    found = parse_pair(row, "here")
    assert (found.prompt, *found.answers) == wanted


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "x", "rejectd": "y"}, "has no rejected (did you mean rejectd?); it has: "),
        ({"promt": "a", "chosen": "x", "rejected": "y"}, "has no prompt (did you mean promt?), and"),

        ({"prompt": "a", "chosen": "x", "rejected": 5}, "rejected holds int, not text or a list of messages"),

        ({"prompt": "a", "chosen": turns(("asistant", "x")), "rejected": said("y")}, "chosen: message 1 is"),

        ({"chosen": said("x"), "rejected": said("y")}, "has no prompt, and chosen and rejected begin"),
    ],
)  # fmt: skip
def test_a_row_of_another_shape_is_one_line(row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_pair(row, "f.jsonl line 7")
    assert str(refused.value).startswith(f"f.jsonl line 7: {says}")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "chosen": "x", "rejected": "x"}, "the same answer twice"),
        ({"prompt": "a", "chosen": "x", "rejected": " "}, "an empty answer"),
        ({"prompt": " ", "chosen": "x", "rejected": "y"}, "an empty prompt"),
        (
            {"chosen": user("a") + said("x"), "rejected": user("b") + said("y")},
            "answers to different prompts",
        ),
    ],
)
def test_a_row_without_a_preference_is_left_out(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(SkippedRowError, match=reason):
        parse_pair(row, "here")


def row_of(*tokens: int) -> TokenRow:
    return TokenRow(np.array(tokens), np.ones(len(tokens), np.uint8))


PROMPTS, ENDS = {"prompts_cut"}, {"answers_cut"}
LONG, REST = [7] * 20, [6] * 20


@pytest.mark.parametrize(
    ("length", "answers", "prompt", "kept", "cuts"),
    [
        (9, ([7, 8, 9], [6, 9]), [1, 2, 3, 4, 5], (3, 2), set()),
        (7, ([7, 8, 9], [6, 9]), [1, 3, 4, 5], (3, 2), PROMPTS),
        (4, ([7, 8, 9], [6, 9]), [5], (3, 2), PROMPTS),
        (3, ([7, 8, 9], [6, 9]), [5], (2, 2), PROMPTS | ENDS),
        # One that is longer than the row is cut to what the other and half of the row leave.
        (8, (LONG, REST[:3]), [1, 3, 4, 5], (4, 3), PROMPTS | ENDS),
        (8, (LONG, REST[:6]), [4, 5], (6, 6), PROMPTS | ENDS),
        (8, (LONG, REST[:7]), [5], (7, 7), PROMPTS | ENDS),
        (8, (REST[:3],), [1, 2, 3, 4, 5], (3,), set()),
        (8, (LONG,), [1, 3, 4, 5], (4,), PROMPTS | ENDS),
    ],
)
def test_the_prompt_loses_its_beginning_and_all_rows_keep_the_same(
    length: int, answers: tuple[list[int], ...], prompt: list[int], kept: tuple[int, ...], cuts: set[str]
) -> None:
    """Of the prompt 1 2 3 4 5 the middle three are a message's; 1 and 5 are the template's."""
    question = np.array([0, 1, 1, 1, 0], bool)
    rows, found = fit_answers(np.arange(1, 6), [row_of(*one) for one in answers], lambda: question, length)
    wanted = [prompt + one[:count] for one, count in zip(answers, kept, strict=True)]
    assert [row.tokens.tolist() for row in rows] == wanted
    assert tuple(int(row.answer_mask.sum()) for row in rows) == kept
    assert found == cuts


def make(data: Path | str, **options: Any) -> Preferences:
    recipe: Any = SimpleNamespace(
        data=str(data), format=None, model="tiny", tokenizer=None, revision=None, max_length=64, options={}
    )
    return Preferences(recipe, PreferencesOptions(vocab_size=300, **options))


def write(folder: Path, rows: list[dict[str, Any]], form: str) -> Path:
    file = folder / f"pairs.{form}"
    if form == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif form == "csv":
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif form == "json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    return file


def decoded(source: Any, folder: Path, number: int) -> list[tuple[str, str]]:
    """(prompt, answer) of both rows of a pair, as text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    batch, found = source.fetch(np.array([number])), []
    for answer in (0, 1):
        length = batch["row_length"][0, answer]
        tokens, learn = batch["tokens"][0, answer, :length], batch["learn"][0, answer, :length] == 1
        found.append(
            tuple(tokenizer.decode(tokens[part], skip_special_tokens=False) for part in (~learn, learn))
        )
    return found


TEXTS = [
    {"prompt": f"{PROMPT} {n}\n", "chosen": f"{GOOD} {n}" * (1 + n % 3), "rejected": BAD} for n in range(24)
]
CHATS = [
    {"chosen": WHOLE + said(f"{GOOD} {n}"), "rejected": WHOLE + said(BAD), "score": 1.0} for n in range(24)
]
END = "<|endoftext|>"


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet"])
def test_texts_follow_each_other_and_answers_end_with_the_end_token(form: str, tmp_path: Path) -> None:
    data, folder = make(write(tmp_path, TEXTS, form)), tmp_path / "prepared"
    data.check()
    extra = data.prepare(folder)
    assert decoded(data.open(folder, "train"), folder, 3) == [
        (f"{PROMPT} 3\n", f"{GOOD} 3{END}"),
        (f"{PROMPT} 3\n", f"{BAD}{END}"),
    ]
    assert extra["template"]["name"] == "verbatim"
    assert extra["prompts"] == [[f"{PROMPT} 23\n", "".join([f"{GOOD} 23"] * 3)]]
    facts: Any = SimpleNamespace(folder=str(folder), samples={"train": 23})
    shown = shown_samples(data, facts, 2, on_terminal=False)
    assert [text.partition("\n")[0] for text in shown] == [
        f"--- sample {n}, {one}, learnt is in [[ ]]" for n in (1, 2) for one in ("chosen", "rejected")
    ]
    assert shown[3].endswith(f"{PROMPT} 1\n[[{BAD}{END}]]")


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_conversations_follow_the_template_and_only_the_last_answer_is_learnt(
    form: str, tmp_path: Path
) -> None:
    data, folder = make(write(tmp_path, CHATS, form)), tmp_path / "prepared"
    data.recipe.max_length = 512  # type: ignore[misc]
    extra = data.prepare(folder)
    parts = [*EARLIER, ("user", PROMPT)]
    prompt = "".join(f"<|im_start|>{role}\n{text}{END}\n" for role, text in parts) + "<|im_start|>assistant\n"
    assert decoded(data.open(folder, "train"), folder, 3) == [
        (prompt, f"{GOOD} 3{END}"),
        (prompt, f"{BAD}{END}"),
    ]
    assert extra["template"]["name"] == "chatml"


def test_a_batch_is_two_rows_of_equal_width_for_each_pair(tmp_path: Path) -> None:
    columns = make(write(tmp_path, TEXTS, "jsonl")).read()["train"]
    save(tmp_path / "prepared" / "train", columns)
    source = make("").open(tmp_path / "prepared", "train")
    pairs = np.array([4, 2, 0])
    batch = source.fetch(pairs)
    longest = batch["row_length"].max(1)
    assert source.lengths(pairs).tolist() == (2 * longest).tolist() == batch["length"].tolist()
    assert batch["tokens"].shape == batch["learn"].shape == (3, 2, longest.max())
    assert batch["token.weight"].tolist() == batch["learn"][:, 0].sum(-1).tolist()
    wider = source.fetch(pairs, 2 * int(longest.max()) + 5)
    assert wider["tokens"].shape == (3, 2, longest.max() + 3)
    assert wider["tokens"][:, :, : longest.max()].tolist() == batch["tokens"].tolist()
    assert not wider["learn"][:, :, longest.max() :].any()


def test_rows_left_out_are_counted_and_none_left_is_one_line(tmp_path: Path) -> None:
    same = {"prompt": "a b", "chosen": "x", "rejected": "x"}
    extra = make(write(tmp_path, [same, *TEXTS], "jsonl")).prepare(tmp_path / "prepared")
    assert "train: rows left out: 1 with the same answer twice" in extra["notes"]
    with pytest.raises(UserError, match=r"the train split has no pair to learn from; .* 2 with the same ans"):
        make(write(tmp_path, [same] * 3, "jsonl")).read()


def test_the_demo_is_pairs_of_functions() -> None:
    data: Any = make("demo")
    columns = data.read()
    assert len(columns["train"]["token.weight"]) > 500
    assert len(columns["valid"]["token.weight"]) > 50
