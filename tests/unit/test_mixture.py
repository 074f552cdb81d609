"""Tests of data/text/sources.py: several sets in one run, and the share of each in a batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.core.recipe import Recipe
from isobatch.data import tokenizers
from isobatch.data.text.dataset import Text, TextOptions
from isobatch.data.text.sources import detect_row_kind, interleave_by_characters
from isobatch.engine.loading.sampler import make_sampler

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.data.base import ArraySource

PROSE = "".join(f"line {i} of plain text\n" for i in range(40))
CHATS = [{"instruction": f"Say {i}.", "output": f"{i}"} for i in range(30)]
REVIEWS = [{"prompt": f"film {i}", "completion": "good" if i % 2 else "bad"} for i in range(20)]


def jsonl(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def sets(tmp_path: Path) -> str:
    """A stream of text, conversations, and questions with answers."""
    (tmp_path / "prose.txt").write_text(PROSE)
    jsonl(tmp_path / "chats.jsonl", CHATS)
    jsonl(tmp_path / "reviews.jsonl", REVIEWS)
    return ",".join(str(tmp_path / name) for name in ("prose.txt", "chats.jsonl", "reviews.jsonl"))


Make = Callable[..., Text]


@pytest.fixture
def make() -> Make:
    def text(data: str, max_length: int = 64, **options: Any) -> Text:
        recipe = {"tokenizer": None, "model": "tiny", "revision": None, "format": None}
        kept = {"vocab_size": 300, **options}
        return Text(SimpleNamespace(data=data, max_length=max_length, **recipe), TextOptions(**kept))

    return text


def prepared(text: Text, folder: Path) -> tuple[dict[str, Any], dict[str, ArraySource], Any]:
    text.check()
    extra = text.prepare(folder)
    sources = {split: text.open(folder, split) for split in ("train", "valid")}
    return extra, sources, tokenizers.open_tokenizer(folder / "tokenizer.json")


def learnt(source: ArraySource, tokenizer: Any, row: int) -> tuple[str, str]:
    """A row's text, and what is learnt of it."""
    batch = source.fetch(np.array([row]))
    tokens, learn = batch["tokens"][0], batch["learn"][0]
    assert batch["token.weight"][0] == learn.sum()
    kept = [tokenizer.decode(t.tolist(), skip_special_tokens=False) for t in (tokens, tokens[learn == 1])]
    return kept[0], kept[1]


def test_rows_lie_end_to_end_and_learn_what_their_set_learns(tmp_path: Path, sets: str, make: Make) -> None:
    extra, sources, tokenizer = prepared(make(sets, template="plain"), tmp_path / "out")
    for split, source in sources.items():
        counts = [one["samples"][split] for one in extra["sets"]]
        assert source.columns["set"].tolist() == np.repeat([0, 1, 2], counts).tolist()  # type: ignore[union-attr]
        assert [size for size, _ in source.parts] == counts
    train = sources["train"]
    first = [0, *np.cumsum([size for size, _ in train.parts])[:2].tolist()]
    whole, targets = learnt(train, tokenizer, first[0])
    assert len(train.fetch(np.array([0]))["tokens"][0]) - 1 == train.weights["token"][0] == 63
    assert PROSE.startswith(whole)
    assert whole.endswith(targets)
    assert learnt(train, tokenizer, first[1]) == ("Say 0.\n0<|endoftext|>", "0<|endoftext|>")
    assert learnt(train, tokenizer, first[2]) == ("film 0\nbad<|endoftext|>", "bad<|endoftext|>")


def test_facts_say_what_each_set_is(tmp_path: Path, sets: str, make: Make) -> None:
    extra, sources, _ = prepared(make(sets, max_length=200), tmp_path / "out")
    assert extra["form"] == "mixture"
    assert [(one["name"], one["form"]) for one in extra["sets"]] == [
        ("prose", "text"),
        ("chats", "conversations"),
        ("reviews", "conversations"),
    ]
    assert extra["template"]["name"] == "alpaca"
    assert extra["sets"][2]["template"]["name"] == "chatml"
    # The held-out rows: the last of each.
    assert [answer for _, answer in extra["prompts"]] == ["29", "good"]
    for split in ("train", "valid"):
        parts = [one["splits"][split] for one in extra["sets"]]
        assert extra["splits"][split]["predicted"] == sum(part["predicted"] for part in parts)
        assert extra["splits"][split]["predicted"] == sources[split].weights["token"].sum()


def test_shares_decide_what_a_batch_holds(tmp_path: Path, sets: str, make: Make) -> None:
    _, sources, _ = prepared(make(sets, mix=(0.25, 0.5, 0.25)), tmp_path / "out")
    train = sources["train"]
    assert [share for _, share in train.parts] == [0.25, 0.5, 0.25]
    recipe = Recipe(task="causal-lm", data=sets, batch_size=8, seed=1, group_by_length=False)
    sampler = make_sampler(recipe, train, 1)
    column = np.asarray(train.columns["set"])
    for step in range(sampler.steps_per_epoch - 1):
        assert np.abs(np.bincount(column[sampler.batch(step)], minlength=3) - [2, 4, 2]).max() <= 1
    with pytest.raises(UserError, match="this task computes 2 samples together, so that it takes one set"):
        make_sampler(recipe, train, 2)
    train.parts = tuple(zip([size for size, _ in train.parts], (1, 1, 1e-6), strict=True))
    with pytest.raises(UserError, match=r"--mix 1,1,1e-06: of the .* set 3 would have none: raise its share"):
        make_sampler(recipe, train, 1)


def test_without_shares_every_sample_comes_once(tmp_path: Path, sets: str, make: Make) -> None:
    _, sources, _ = prepared(make(sets), tmp_path / "out")
    recipe = Recipe(task="causal-lm", data=sets, batch_size=8, seed=1, group_by_length=True)
    sampler = make_sampler(recipe, sources["train"], 1)
    seen = np.concatenate([sampler.batch(step) for step in range(sampler.steps_per_epoch)])
    assert sorted(seen) == list(range(len(sources["train"])))


def test_kinds_are_told_by_columns() -> None:
    kinds = {
        ("text",): "text",
        ("text", "label"): "text",
        ("messages", "label", "text"): "messages",
        ("instruction", "output", "text"): "instruction",
        ("body",): "text",
    }
    assert {columns: detect_row_kind(columns, TextOptions(), is_only_set=False) for columns in kinds} == kinds
    assert detect_row_kind(("text", "label"), TextOptions(), is_only_set=True) == "text"
    assert detect_row_kind(("text", "label"), TextOptions(text_column="text"), is_only_set=False) == "text"
    assert (
        detect_row_kind(("messages", "label"), TextOptions(text_column="text"), is_only_set=False)
        == "messages"
    )


def test_names_are_short_where_they_differ(tmp_path: Path, make: Make) -> None:
    for folder in ("a", "b"):
        jsonl(tmp_path / folder / "train.jsonl", CHATS)
    place = [str(tmp_path / folder / "train.jsonl") for folder in ("a", "b")]
    assert [one.name for one in make(",".join(place)).set_specs] == place
    assert [one.name for one in make(f"{place[0]},{tmp_path / 'b'}").set_specs] == ["train", "b"]
    assert make(place[0]).set_specs[0].name == place[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mix": (0.5, 0.5)}, "--mix 0.5,0.5: 2 shares for the 3 of --data .*: give one for each"),
        ({"text_column": "body"}, "--text-column body: none of the sets of --data .* has such a column"),
    ],
)
def test_bad_shares_are_refused(sets: str, make: Make, changes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(sets, **changes).check()


def test_one_set_has_no_shares_and_no_name_is_empty(tmp_path: Path, make: Make) -> None:
    file = jsonl(tmp_path / "a.jsonl", CHATS)
    with pytest.raises(UserError, match=r"--mix 1,2: 2 shares for the 1 of --data .* name the sets as in"):
        make(str(file), mix=(1.0, 2.0)).check()
    with pytest.raises(UserError, match="one of the names between the commas is empty"):
        make(f"{file},").check()
    with pytest.raises(UserError, match=r"b\.jsonl: there is no such file or folder"):
        make(f"{file},{tmp_path / 'b.jsonl'}").check()


def test_shares_change_no_prepared_data_and_sets_do(sets: str, make: Make) -> None:
    assert make(sets, mix=(1, 2, 3)).identity() == make(sets).identity()
    turned = ",".join(reversed(sets.split(",")))
    assert make(turned).identity() != make(sets).identity()
    json.dumps(make(sets).identity())


def test_a_tokenizer_is_trained_on_all_sets_alike() -> None:
    long, short = iter(["a" * 10] * 5), iter(["b"] * 12)
    found = "".join(text[0] for text in interleave_by_characters([long, short]))
    # Ten letters of one are worth ten texts of the other.
    assert found == "ab" + "b" * 9 + "a" + "bb" + "aaa"
