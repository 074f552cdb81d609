"""Tests of data/digests.py: a changed cache is found before it is learnt from, and prepared again."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from isobatch.core.errors import TrainingError
from isobatch.data import digests
from isobatch.data.base import ArraySource, Data, Ragged
from isobatch.data.digests import PreparedFolder, changed_file
from isobatch.engine.loading.prepare import prepare

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.core.facts import Facts

ROWS = 3000


class Rows(Data):
    """A plain column and a ragged one, of several chunks each, and a file beside the splits."""

    def identity(self) -> dict[str, Any]:
        return {}

    def read(self) -> Mapping[str, Any]:
        draw = np.random.default_rng(0)
        tokens = Ragged.from_rows([np.full(n, n, np.int32) for n in draw.integers(1, 9, ROWS)])
        label = np.arange(ROWS) % 2
        return {"train": {"label": label, "tokens": tokens, "token.weight": tokens.lengths}}

    def prepare(self, folder: Path) -> dict[str, Any]:
        (folder / "more").mkdir()
        np.save(folder / "more" / "seen.npy", np.arange(9))
        return super().prepare(folder)


def data() -> Rows:
    return Rows(SimpleNamespace(data="rows", options={}), None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(digests, "CHUNK", 8192)


def flip(file: Path, place: int = -1) -> None:
    """Change a byte."""
    block = bytearray(file.read_bytes())
    block[place] ^= 1
    file.write_bytes(block)


def opened(facts: Facts) -> ArraySource:
    source = data().open(Path(facts.folder), "train")
    assert isinstance(source, ArraySource)
    return source


@pytest.mark.parametrize("column", ["label", "tokens-values", "tokens-offsets", "token.weight"])
def test_a_change_is_found_where_it_is_first_fetched(column: str) -> None:
    facts = prepare(data())
    file = Path(facts.folder) / "train" / f"{column}.npy"
    flip(file)
    source = opened(facts)
    source.fetch(np.arange(10))
    with pytest.raises(TrainingError, match=f"{column}.npy was changed after it was prepared .* run again"):
        source.fetch(np.array([3, ROWS - 1]))
    said: list[str] = []
    assert prepare(data(), said.append).fingerprint == facts.fingerprint
    opened(facts).fetch(np.arange(ROWS))
    assert not said  # the finding had marked the cache


def test_a_changed_cache_is_named_and_prepared_again() -> None:
    facts = prepare(data())
    for file in Path(facts.folder).rglob("*.*"):
        if file.name not in ("facts.json", "digests.json") and file.is_file():
            flip(file)
            said: list[str] = []
            assert prepare(data(), said.append) == facts
            assert said == [f"{file} was changed after it was prepared: it is prepared again"]
            assert changed_file(Path(facts.folder), 1) is None


def test_a_run_knows_its_digests() -> None:
    facts = prepare(data())
    folder = Path(facts.folder)
    PreparedFolder(folder, facts.digest)
    PreparedFolder(folder, "")  # of an older run
    flip(folder / "train" / "label.npy")
    digests.write_digests(folder)
    with pytest.raises(TrainingError, match=r"digests\.json is not the one of this run"):
        PreparedFolder(folder, facts.digest)
    (folder / "digests.json").unlink()
    with pytest.raises(TrainingError, match=r"digests\.json is not the one of this run"):
        PreparedFolder(folder, facts.digest)


def test_files_beside_the_splits_are_checked_at_once() -> None:
    facts = prepare(data())
    flip(Path(facts.folder) / "more" / "seen.npy")
    with pytest.raises(TrainingError, match=r"seen\.npy was changed"):
        PreparedFolder(Path(facts.folder), facts.digest)


def test_what_is_written_to_is_known_even_if_put_back() -> None:
    facts = prepare(data())
    file = Path(facts.folder) / "train" / "label.npy"
    prepared = PreparedFolder(Path(facts.folder), facts.digest)
    assert prepared.check_written() == []
    before, stat = file.read_bytes(), file.stat()
    flip(file)
    file.write_bytes(before)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the time of a change cannot be put back
    assert prepared.check_written() == ["train/label.npy"]
    assert prepared.check_written() == []
    flip(file)
    with pytest.raises(TrainingError, match=r"label\.npy was changed"):
        prepared.check_written()
