"""Tests of what is validation where data has no such split (data/corpora.py), and of which split a model is
measured on (engine/runs/summary.py).
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.terminal import rendered
from isobatch.engine.registry import complete, workload
from isobatch.engine.runs.summary import first_held_out, metrics_fields
from isobatch.engine.trainer import finish

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.data.base import Data


def write_chats(file: Path, numbers: range) -> Path:
    rows = ({"instruction": f"{n}?", "output": f"{n}!"} for n in numbers)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def chats(task: str = "causal-lm", **values: Any) -> Data:
    recipe, _ = complete(task, {name: str(value) for name, value in values.items()})
    return workload(task).make(recipe)[1]


def questions(data: Data) -> dict[str, list[int]]:
    """Split -> the numbers of its conversations."""
    splits = data.set_specs[0].open((), None).rows  # type: ignore[attr-defined]
    return {split: [int(row["instruction"][:-1]) for _, row in rows()] for split, rows in splits.items()}


def test_a_share_is_drawn_from_all_rows_and_the_default_is_the_end(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl", range(100))
    usual, drawn = questions(chats(data=file)), questions(chats(data=file, valid=0.2))
    assert usual["valid"] == list(range(95, 100))
    assert len(drawn["valid"]) == 20
    assert min(drawn["valid"]) < 30 < 60 < max(drawn["valid"])
    assert sorted(drawn["train"] + drawn["valid"]) == list(range(100))
    assert questions(chats(data=file, valid=0.2, seed=7)) == drawn


def test_valid_names_a_file(tmp_path: Path) -> None:
    train = write_chats(tmp_path / "chats.jsonl", range(20))
    other = write_chats(tmp_path / "more.jsonl", range(50, 53))
    data = chats(data=train, valid=other)
    assert questions(data) == {"train": list(range(20)), "valid": [50, 51, 52]}
    before = data.identity()
    write_chats(other, range(60, 63))
    assert data.identity() != before


def test_valid_is_part_of_what_prepared_data_depends_on(tmp_path: Path) -> None:
    file = write_chats(tmp_path / "chats.jsonl", range(20))
    found = [chats(data=file, **asked).identity() for asked in ({}, {"valid": 0.1}, {"valid": 0.2})]
    assert found[0] != found[1] != found[2]


def test_running_text_holds_out_its_end(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {n}\n" for n in range(100)))
    splits = chats(data=tmp_path / "book.txt", valid=0.3).set_specs[0].open((), None).corpus.splits  # type: ignore[attr-defined]
    train, valid = ("".join(splits[name]()) for name in ("train", "valid"))
    assert (train + valid).count("\n") == 100
    assert valid.startswith("line 71")  # the first line that begins in the last 30 %


def test_a_validation_split_of_its_own_refuses_another(tmp_path: Path) -> None:
    for split in ("train", "valid"):
        write_chats(tmp_path / f"{split}.jsonl", range(5))
    with pytest.raises(UserError, match="has a validation split"):
        chats(data=tmp_path, valid=0.1).check()


def test_pairs_and_labelled_texts_take_a_file_too(tmp_path: Path) -> None:
    for name, kind in (("pairs", "prompt,chosen,rejected"), ("texts", "text,label,more")):
        for part, rows in (("a", 6), ("b", 3)):
            lines = [kind, *(f"{part} {n},yes {n},no{n % 2}" for n in range(rows))]
            (tmp_path / f"{name}-{part}.csv").write_text("\n".join(lines))
    tasks = {
        "pairs": ("dpo", {"model": "tiny"}),
        "texts": ("classifier", {"label_column": "more", "model": "small"}),
    }
    for name, (task, options) in tasks.items():
        files = {"data": tmp_path / f"{name}-a.csv", "valid": tmp_path / f"{name}-b.csv"}
        splits = chats(task, **files, **options).encode_splits()[0]  # type: ignore[attr-defined]
        found = {split: len(next(iter(columns.values()))) for split, columns in splits.items()}
        assert found == {"train": 6, "valid": 3}


@pytest.mark.parametrize(
    ("splits", "first"),
    [
        (("train", "valid", "test"), "test"),
        (("train", "test"), "test"),
        (("train", "valid"), "valid"),
        (("train",), None),
    ],
)
def test_a_model_is_measured_on_test_or_else_on_validation(
    splits: tuple[str, ...], first: str | None
) -> None:
    assert first_held_out(splits) == first
    held_out = {split: {"loss": float(n)} for n, split in enumerate(splits) if split != "train"}
    found = metrics_fields(held_out)
    assert (found["split"], found["metrics"]) == (first, held_out.get(first or "", {}))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"loss": 2.0}, {"loss": 1.99}, "from 2.0000 to 1.9900"),
        ({"loss": 2.0}, {"loss": 2.01}, "from 2.0000 to 2.0100"),
        ({"loss": 2.0}, {"loss": 1.97}, None),
        ({}, {"loss": 1.99}, None),
        ({"loss": 2.0}, {}, None),
    ],
)
def test_a_loss_that_training_hardly_moved_is_named(before: Any, after: Any, said: str | None) -> None:
    run = SimpleNamespace(folder="runs/a", recipe=SimpleNamespace(lr=5e-5))
    way = "a higher rate may learn more: `isobatch auto --like runs/a --lr 0.0002`"
    wanted = f"the loss of valid hardly moved, {said}: {way}" if said else ""
    assert rendered(finish.__file__, "hardly_moved", before=before, after=after, run=run) == wanted
