"""Tests of data/labelled: texts become token ids and class numbers; a bad row is refused in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.data import readers
from isobatch.data.base import Ragged
from isobatch.data.labelled.dataset import Labelled, LabelledOptions
from isobatch.data.labelled.kinds import ClassLabels
from isobatch.data.labelled.rows import ColumnNames, SplitLabels, find_columns, read_examples

if TYPE_CHECKING:
    from pathlib import Path

FROZEN = [5, 13, 14, 17, 52, 56, 66, 68, 70, 71]
"""Rows that are held out of `sorted_rows`: another draw would part a run from the data that it saw."""
ROWS = [("a good film", "pos"), ("a bad film", "neg"), ("good , good", "pos"), ("bad , bad film", "neg")]


def make(data: Path | str, max_length: int = 16, seed: int = 0, **options: Any) -> Labelled:
    values = {"format": None, "tokenizer": None, "model": "tiny", "revision": None, "seed": seed}
    recipe = SimpleNamespace(data=str(data), max_length=max_length, **values)
    return Labelled(recipe, LabelledOptions(vocab_size=300, **options))


def write(folder: Path, split: str, rows: list[tuple[str, ...]], header: str = "sentence\tlabel") -> None:
    text = "\n".join([header, *("\t".join(row) for row in rows)])
    (folder / f"{split}.tsv").write_text(text + "\n", encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "train", ROWS)
    write(tmp_path, "dev", ROWS[:2])
    return tmp_path


def test_texts_are_framed_by_special_tokens_and_labels_numbered_by_name(folder: Path, tmp_path: Path) -> None:
    data = make(folder)
    data.check()
    extra = data.prepare(tmp_path / "prepared")
    assert extra["labels"] == ["neg", "pos"]
    assert extra["label_counts"] == [2, 2]
    source = data.open(tmp_path / "prepared", "train")
    batch = source.fetch(np.array([0, 3]))
    assert batch["label"].tolist() == [1, 0]
    first, last = 2, 3  # [CLS] and [SEP], as a trained tokenizer numbers them
    assert (batch["tokens"][:, 0] == first).all()
    assert [row[n - 1] for row, n in zip(batch["tokens"], batch["length"], strict=True)] == [last, last]
    assert (batch["tokens"][0, batch["length"][0] :] == extra["pad"]).all()


def test_balanced_weights_are_of_the_training_split_and_in_the_facts(folder: Path) -> None:
    write(folder, "train", [*ROWS, ("more", "pos"), ("still more", "pos")])  # 4 pos, 2 neg
    found, _, extra = make(folder, class_weights="balanced").encode_splits()
    assert extra["class_weights"] == [6 / (2 * 2), 6 / (2 * 4)]
    assert np.asarray(found["train"]["class.weight"]).tolist() == [0.75, 1.5, 0.75, 1.5, 0.75, 0.75]
    assert "class.weight" not in found["valid"]
    found, _, extra = make(folder, class_weights=(1.0, 2.5)).encode_splits()
    assert extra["class_weights"] == [1.0, 2.5]
    assert "class_weights" not in make(folder).encode_splits()[2]
    identities = [make(folder, class_weights=w).identity() for w in (None, "balanced", (1.0, 2.5))]
    assert len({str(i) for i in identities}) == 3
    with pytest.raises(UserError, match=r"--class-weights 1,2,3: the data has 2 classes \(neg, pos\)"):
        make(folder, class_weights=(1.0, 2.0, 3.0)).encode_splits()


def test_pairs_have_types_and_are_cut_to_the_length(tmp_path: Path) -> None:
    rows = [("one two three", "four five", "0"), ("one", "two " * 30, "1")]
    write(tmp_path, "train", rows, "premise\thypothesis\tlabel")
    write(tmp_path, "valid", rows, "premise\thypothesis\tlabel")
    found, _, extra = make(tmp_path).encode_splits()
    tokens, types = found["train"]["tokens"], found["train"]["types"]
    assert isinstance(tokens, Ragged)
    assert isinstance(types, Ragged)
    assert types.lengths.tolist() == tokens.lengths.tolist()
    assert tokens.lengths[1] == 16
    assert set(types.values.tolist()) == {0, 1}
    assert any("1 of 2 texts are cut to 16" in note for note in extra["notes"])


def sorted_rows(folder: Path) -> Path:
    """100 rows sorted by class: 60 of a, 37 of b, 3 of c."""
    labels = "a" * 60 + "b" * 37 + "c" * 3
    write(folder, "train", [(f"text {n}", label) for n, label in enumerate(labels)])
    return folder


def test_a_tenth_of_each_class_is_held_out_where_nothing_is(tmp_path: Path) -> None:
    found, _, extra = make(sorted_rows(tmp_path)).encode_splits()
    assert [np.bincount(found[s]["label"], minlength=3).tolist() for s in ("train", "valid")] == [
        [54, 33, 3],  # type: ignore[arg-type]
        [6, 4, 0],  # 3.7 and 0.3 of b and c: the larger rest is rounded up
    ]
    assert extra["notes"][0].startswith(
        "there is no validation split: 10 % of the rows are it, drawn at random (--valid)"
    )
    said = "valid: {} rows, were all answered right, show a precision of {} at most (predict --precision): {}"
    assert (
        said.format(10, 0.63, "--valid 0.3 shows more") in extra["notes"]
    )  # 0.631 to the power of 9 surest and one is 0.01
    found, _, extra = make(tmp_path, valid=0.5).encode_splits()
    assert np.bincount(np.asarray(found["valid"]["label"])).tolist() == [30, 19, 1]
    assert said.format(50, 0.9, "a longer validation file shows more") in extra["notes"]
    write(tmp_path, "valid", [(f"other {n}", "ab"[n % 2]) for n in range(10)])
    given = said.format(10, 0.63, "a longer validation file shows more")
    assert given in make(tmp_path).encode_splits()[2]["notes"]


def test_the_draw_of_held_out_rows_is_frozen_and_no_seed_changes_it(tmp_path: Path) -> None:
    data = make(sorted_rows(tmp_path))
    rows = readers.read_rows(readers.find_splits(tmp_path, None)["train"])
    kind = ClassLabels("label")
    split = SplitLabels.read(read_examples(rows, ColumnNames("sentence", None, "label")))
    assert np.flatnonzero(kind.held_out(split.named(kind), 0.1)).tolist() == FROZEN
    assert data.identity() == make(tmp_path, seed=7).identity()
    assert data.identity() != make(tmp_path, valid=0.2).identity()


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([("good", "1"), ("bad", "1")], "is 1 in every training row: at least two"),
        ([("", "1"), ("", "0")], "the train split holds no rows with sentence and label"),
        ([("good", ""), ("bad", "")], "the train split holds no rows with sentence and label"),
        ([("good", "1"), ("x" * 1_000_001, "0")], "line 3: sentence has 1,000,001 characters"),
        ([(f"text {n}", f"label {n % 1001}") for n in range(1002)], "label has 1,001 different values"),
    ],
)
def test_bad_rows_are_one_line(rows: list[tuple[str, ...]], says: str, tmp_path: Path) -> None:
    write(tmp_path, "train", rows)
    write(tmp_path, "valid", rows[:1])
    with pytest.raises(UserError, match=says):
        make(tmp_path).encode_splits()


@pytest.mark.parametrize(
    ("names", "options", "says"),
    [
        (["id", "note"], {}, r"^--data d: which column\? give --text-column and --label-column; it"),
        (["id", "stars"], {"label_column": "strs"}, r"--label-column strs: d .* \(did you mean stars\?\)"),
        (["text", "x"], {"text_column": "txet"}, r"--text-column txet: .* \(did you mean text\?\)"),
        (["sentence", "label"], {"label_column": "stars"}, "stars: .* it has: sentence, label"),
    ],
)
def test_all_missing_columns_are_named_at_once(names: list[str], options: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        find_columns("d", names, LabelledOptions(**options))


def test_minus_one_is_a_class_where_not_all_of_a_split_has_it(tmp_path: Path) -> None:
    """GLUE writes -1 for every row of a test split; sentiment data for the negative ones."""
    rows = "".join(f"some text {n}\t{(-1, 1)[n % 2]}\n" for n in range(8))
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("sentence\tlabel\n" + rows)
    (tmp_path / "test.tsv").write_text("sentence\tlabel\na text\t-1\nanother\t-1\n")
    splits, _, extra = make(tmp_path).encode_splits()
    assert extra["labels"] == ["-1", "1"]
    assert "test" not in splits


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_split_of_a_header_alone_is_named(split: str, tmp_path: Path) -> None:
    write(tmp_path, "train", ROWS * 10)
    write(tmp_path, "valid", ROWS)
    write(tmp_path, split, [])
    with pytest.raises(UserError, match=f"the {split} split holds no rows"):
        make(tmp_path).encode_splits()
