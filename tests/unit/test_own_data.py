"""Tests of data/base.py: a task of one's own does not train on what a file held before, and data in blocks is
prepared as the whole of it.
"""

from __future__ import annotations

import os
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import UserError
from isobatch.data import base

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


class Mine(base.Data):
    def read(self) -> Any:
        return {}


def identity(place: Path | str) -> dict[str, Any]:
    return Mine(SimpleNamespace(data=str(place), seed=0), None).identity()  # type: ignore[arg-type]


def test_another_content_under_the_same_name_is_other_data(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("1,2\n")
    before = identity(file)
    os.utime(file, (1, 1))
    assert identity(file) == before
    file.write_text("1,3\n")
    assert identity(file) != before


@pytest.mark.parametrize("large", [False, True])
def test_a_folder_and_a_large_file_are_known_by_times(
    large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "HASHED_BYTES", 2)
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "a.csv"
    file.write_text("1,2\n")
    place = file if large else tmp_path
    before = identity(place)
    assert identity(place) == before
    os.utime(file, (1, 1))
    assert identity(place) != before


def test_what_is_no_file_is_a_word() -> None:
    assert identity("owner/name") == {"data": "owner/name", "seed": 0}


class Given(Mine):
    """Data that reads what it is given."""

    def __init__(self, found: Any) -> None:
        self.found = found

    def read(self) -> Any:
        return self.found


def rows(start: int, stop: int) -> dict[str, base.Column]:
    """Some of a thousand samples, of which every tenth has no token."""
    numbers = np.arange(1000, dtype=np.float32)
    tokens = base.Ragged.from_rows([np.arange(n % 10, dtype=np.int32) for n in range(start, stop)], pad=7)
    table = np.stack([numbers, -numbers], axis=1)
    return {"x": table[start:stop], "image": np.uint8(numbers[start:stop]), "tokens": tokens}


@pytest.mark.parametrize("size", [1, 3, 999, 1000])
def test_blocks_are_prepared_as_the_whole(size: int, tmp_path: Path) -> None:
    blocks = (("train", rows(n, min(n + size, 1000))) for n in range(0, 1000, size))
    for name, found in (("whole", {"train": rows(0, 1000)}), ("blocks", blocks)):
        Given(found).prepare(tmp_path / name)
    assert base.fingerprint(tmp_path / "whole") == base.fingerprint(tmp_path / "blocks")
    one, other = (Given(None).open(tmp_path / name, "train") for name in ("whole", "blocks"))
    everything = np.arange(1000)
    for name, column in one.fetch(everything).items():
        assert np.array_equal(column, other.fetch(everything)[name]), name


def test_splits_may_come_in_any_order_and_begin_empty(tmp_path: Path) -> None:
    order = [("train", rows(0, 0)), ("valid", rows(3, 9)), ("train", rows(0, 3)), ("train", rows(9, 20))]
    Given(iter(order)).prepare(tmp_path)
    found = Given(None).open(tmp_path, "train").fetch(np.arange(14))
    assert found["x"][:, 0].tolist() == [0, 1, 2, *range(9, 20)]
    assert found["length"].tolist() == [0, 1, 2, 9, *range(10)]


def test_a_block_is_not_kept(tmp_path: Path) -> None:
    """32 MB in blocks of 1 MB."""
    blocks = (("train", {"x": np.full((1024, 256), n, np.float32)}) for n in range(32))
    tracemalloc.start()
    Given(blocks).prepare(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 << 20
    assert len(Given(None).open(tmp_path, "train")) == 32 * 1024


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda block: {"x": block["x"]}, "train: its blocks must have the same columns"),
        (lambda block: {**block, "x": block["x"].astype(np.float64)}, r"x float64 \(2,\) behind .*x float32"),
        (lambda block: {**block, "x": block["x"][:, :1]}, r"x float32 \(1,\)"),
        (lambda block: {**block, "image": block["tokens"]}, "image Ragged int32"),
        (lambda block: {**block, "x": block["x"][1:]}, "the columns of a split must have one length"),
    ],
)
def test_a_block_unlike_those_before_is_refused(
    second: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    blocks = [("train", rows(0, 5)), ("train", second(rows(5, 10)))]
    with pytest.raises(UserError, match=message):
        Given(blocks).prepare(tmp_path)


@pytest.mark.parametrize("found", [[rows(0, 5)], [("train", rows(0, 5), 1)], iter([None])])
def test_what_is_no_block_is_refused(found: Iterable[Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"yield \(split, columns\)"):
        Given(found).prepare(tmp_path)
