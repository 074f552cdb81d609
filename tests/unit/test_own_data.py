"""Tests of data/base.py::Data.identity: a task of one's own does not train on what a file held before."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.data import base

if TYPE_CHECKING:
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
