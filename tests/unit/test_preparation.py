"""Tests of data/preparation: the same arrays from any number of processes, also after a kill; digests."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import TrainingError, UserError
from isobatch.data import digests
from isobatch.data.preparation import encoding
from isobatch.data.preparation.encoding import Workshop, encode_in_shards
from isobatch.data.tokenizers import train_byte_level_bpe
from isobatch.engine.loading import prepare as preparing
from isobatch.tests.length_encoder import LengthEncoder
from isobatch.tests.unit.test_prepared_bytes import RECORDED, prepared

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "SHARD_CHARACTERS", 10)


def encoder(folder: Path) -> LengthEncoder:
    (folder / "calls").touch()
    tokenizer = train_byte_level_bpe(["a b c"], 257)
    return LengthEncoder(tokenizer=tokenizer, dtype=int, calls=str(folder / "calls"))


def lengths(shards: Any) -> list[int]:
    return [int(n) for shard in shards for n in shard.arrays["lengths"]]


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split()


TEXTS = ["x" * (n % 7) for n in range(60)]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_preparation_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    workshop = Workshop(workers, tmp_path / "shards")
    shards = encode_in_shards(encoder(tmp_path), "train", TEXTS, workshop)
    first = [next(shards) for _ in range(4)]
    shards.close()
    done = len(list((tmp_path / "shards").glob("*.shard")))
    assert done >= 4
    kept = sorted((tmp_path / "shards").glob("*.shard"))
    kept[1].write_bytes(kept[1].read_bytes()[:-1])  # cut short, as by a machine that lost its power
    before = len(calls(tmp_path))
    again = list(encode_in_shards(encoder(tmp_path), "train", TEXTS, workshop))
    assert lengths(again) == [len(text) for text in TEXTS]
    assert [shard.facts for shard in again[:4]] == [shard.facts for shard in first]
    assert len(calls(tmp_path)) - before == len(again) - done + 1
    assert str(os.getpid()) not in calls(tmp_path) or workers == 1


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [("bad", UserError, "bad is refused"), ("fatal", TrainingError, "was killed.*run again, and it goes on")],
)
def test_what_ends_an_encoder_is_said_by_the_one_that_asked(
    tmp_path: Path, text: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        list(encode_in_shards(encoder(tmp_path), "train", [*TEXTS, text], Workshop(2)))


@pytest.mark.parametrize("case", ["text", "documents, cleaned", "mixture"])
def test_processes_prepare_the_bytes_of_one(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoding, "SHARD_CHARACTERS", 4000)
    monkeypatch.setattr(preparing, "allowed_cpus", lambda *_: 2)
    assert prepared(case, tmp_path / "data") == json.loads(RECORDED.read_text())[case]
    assert not list((tmp_path / "cache" / "prepared").glob(".*.shards"))


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
@pytest.mark.parametrize("mode", [0o2775, 0o755])
def test_a_cache_of_a_group_is_written_for_the_group_whatever_the_umask(
    mode: int, umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("ISOBATCH_CACHE", str(cache))
    monkeypatch.setattr(digests, "REMEMBERED_BYTES", 4)
    monkeypatch.setattr(digests, "CLOCK_TICK_NS", 0)
    cache.mkdir()
    cache.chmod(mode)
    before = os.umask(umask)
    try:
        prepared("text", tmp_path / "data")
        assert os.umask(umask) == umask, "what is no cache's follows the umask as before"
    finally:
        os.umask(before)
    made = {path: path.stat().st_mode & 0o2070 for path in cache.rglob("*")}
    assert {"prepared", "digests"} <= {path.name for path in made}
    assert any(path.suffix == ".lock" for path in made)
    for path, found in made.items():
        own = (0o070 if path.is_dir() else 0o060) & ~umask
        shared = 0o2070 if path.is_dir() else 0o060
        assert found == (shared if mode == 0o2775 else own), f"{path} {found:o}"


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that was changed long ago, of which every byte that is read for its digest is counted."""
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "REMEMBERED_BYTES", 4)
    monkeypatch.setattr(digests, "CLOCK_TICK_NS", 0)
    (tmp_path / "raw.txt").write_text("some text")
    return tmp_path / "raw.txt"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []
    content = digests._content_hash  # noqa: SLF001
    monkeypatch.setattr(digests, "_content_hash", lambda file: read.append(file) or content(file))  # type: ignore[func-returns-value]
    return read


def test_a_file_is_read_for_its_digest_once(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = counted(monkeypatch)
    assert digests.file_hash(raw) == digests.file_hash(raw)
    assert len(read) == 1
    before = digests.file_hash(raw)
    found = raw.stat()
    raw.write_text("same size")
    os.utime(raw, ns=(found.st_atime_ns, found.st_mtime_ns))  # that of the inode tells it
    assert digests.file_hash(raw) != before
    raw.with_name("copy").write_text("same size")
    raw.with_name("copy").replace(raw)
    assert len(read) == 2
    digests.file_hash(raw)
    assert len(read) == 3


def test_a_file_that_was_just_changed_is_read_again(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "CLOCK_TICK_NS", 2_000_000_000)
    read = counted(monkeypatch)
    digests.file_hash(raw)
    digests.file_hash(raw)
    assert len(read) == 2
    monkeypatch.setattr(time, "time_ns", lambda: raw.stat().st_ctime_ns + 3_000_000_000)
    digests.file_hash(raw)
    digests.file_hash(raw)
    assert len(read) == 3
