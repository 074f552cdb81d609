"""Tests of data/streaming: shards in a store, their index, groups on this machine, and what is refused."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet
import pytest

from isobatch.core.errors import IsobatchError, TrainingError, UserError
from isobatch.data.base import Ragged
from isobatch.data.streaming import groups as group_cache
from isobatch.data.streaming import index as indexes
from isobatch.data.streaming import shards, store
from isobatch.data.tokenizers import open_tokenizer
from isobatch.engine.loading.loader import BatchLoader
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.registry import complete, workload
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.data.base import Data

DOCUMENTS = [f"document {number} says {'so ' * (number % 9)}and ends" for number in range(120)]


@pytest.fixture(autouse=True)
def _small_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shards, "GROUP_BYTES", 700)
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.001)


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Three shards of lines, each of several groups."""
    for number in range(3):
        path = tmp_path / "stored" / f"part-{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(lines(DOCUMENTS[number * 40 : (number + 1) * 40]))
    return tmp_path / "stored"


def data_of(pattern: str, **asked: Any) -> Data:
    values = {"data": pattern, "vocab_size": 300, "max_length": 24, **asked}
    recipe = complete("causal-lm", values)[0]
    return workload("causal-lm").make(recipe)[1]


def prepared(folder: Path, pattern: str = "*", **asked: Any) -> tuple[Data, Facts]:
    data = data_of(f"file://{folder}/{pattern}", **asked)
    data.check()
    return data, prepare(data)


def tokens_of(data: Data, facts: Facts, split: str = "train") -> list[list[int]]:
    source = data.open(Path(facts.folder), split)
    batch = source.fetch(np.arange(len(source)))
    return [row[:size].tolist() for row, size in zip(batch["tokens"], batch["length"], strict=True)]


def text_of(facts: Facts, rows: list[list[int]]) -> str:
    from pathlib import Path

    return open_tokenizer(Path(facts.folder) / "tokenizer.json").decode(list(itertools.chain(*rows)))


def test_groups_are_blocks_of_their_documents_and_none_is_lost(stored: Path) -> None:
    data, facts = prepared(stored)
    source = data.open(_folder(facts), "train")
    assert source.groups is not None
    assert len(source.groups) > 6
    assert source.groups.sum() == len(source) == facts.samples["train"]
    said = [text_of(facts, tokens_of(data, facts, split)) for split in ("train", "valid")]
    assert [text.split() for text in said] == [
        "".join(DOCUMENTS[:114]).split(),
        "".join(DOCUMENTS[114:]).split(),
    ]
    assert facts.extra["splits"]["train"]["tokens"] == sum(source.lengths(np.arange(len(source))))
    order = np.array([len(source) - 1, 0, 7, 7])
    assert source.fetch(order, 40)["tokens"].shape == (4, 40)
    assert source.fetch(order)["index"].tolist() == order.tolist()


def _folder(facts: Facts) -> Path:
    return Path(facts.folder)


def test_compressed_lines_and_parquet_hold_the_same_texts(stored: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    other = tmp_path / "other"
    other.mkdir()
    (other / "part-0.jsonl.gz").write_bytes(gzip.compress(lines(DOCUMENTS[:40])))
    table = pyarrow.table({"n": range(80), "text": DOCUMENTS[40:]})
    parquet.write_table(table, other / "part-1.parquet", row_group_size=20, compression="none")
    (other / "notes.txt").write_text("no shard")
    found = [prepared(folder) for folder in (stored, other)]
    said = [text_of(facts, tokens_of(data, facts)).split() for data, facts in found]
    assert said[0] == said[1]
    counts = [facts.extra["splits"]["train"] for _, facts in found]
    assert [one["words"] for one in counts] == [counts[0]["words"]] * 2


def test_rows_without_a_text_and_what_is_not_read_are_counted(tmp_path: Path) -> None:
    """Over all groups, kept from one index to the next; of Parquet the columns alone are known."""
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": f"word {n}", "role": "user"} if n % 2 == 0 else {"content": "x"} for n in range(40)]
    (tmp_path / "train-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "valid-0.jsonl").write_bytes(lines(DOCUMENTS[:4]))
    for _ in range(2):
        _, facts = prepared(tmp_path, "*.jsonl")
        assert facts.extra["notes"] == [
            "train: rows left out: 20 with no column `text`",
            "20 rows: the field `role` is not read",
        ]
        assert "left out" not in str(facts.extra["splits"])
    parquet.write_table(pyarrow.table({"n": range(40), "text": DOCUMENTS[:40]}), tmp_path / "p.parquet")
    assert "the field `n` is not read" in prepared(tmp_path, "p.parquet")[1].extra["notes"]


def test_an_index_goes_on_and_costs_only_what_is_new(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[tuple[str, int]] = set()
    original = store.Store.read
    tokenizer = stored.parent / "tokenizer.json"

    def counting(self: store.Store, address: str, start: int, stop: int) -> bytes:
        read.add((store.name_of(address), start))
        if fails and "part-2" in address:
            raise TrainingError(f"{address}: gone")
        return original(self, address, start, stop)

    fails = False
    _, facts = prepared(stored, "part-0*")
    shutil.copy(_folder(facts) / "tokenizer.json", tokenizer)
    monkeypatch.setattr(store.Store, "read", counting)
    fails = True
    data = data_of(f"file://{stored}/*", tokenizer=str(tokenizer))
    with pytest.raises(UserError, match="part-2"):
        prepare(data)
    read.clear()
    fails = False
    prepare(data)
    assert {start for name, start in read if name == "part-0.jsonl"} == {0}, "its columns and a prompt"
    assert "part-1.jsonl" not in dict(read)
    assert len([start for name, start in read if name == "part-2.jsonl"]) > 2


@pytest.mark.parametrize("kept", [True, False])
def test_a_changed_object_is_named_and_never_read_as_other_data(stored: Path, kept: bool) -> None:
    data, facts = prepared(stored)
    source = data.open(_folder(facts), "train")
    before = source.fetch(np.arange(4))["tokens"].tolist()
    (stored / "part-0.jsonl").write_bytes(lines(DOCUMENTS[:39]))
    again = data.open(_folder(facts), "train")
    if kept:  # what is on this machine is what was indexed
        assert again.fetch(np.arange(4))["tokens"].tolist() == before
        return
    shutil.rmtree(group_cache.groups_folder())
    with pytest.raises(TrainingError, match=r"part-0\.jsonl was changed after it was indexed"):
        again.fetch(np.arange(4))


def test_other_content_under_the_same_size_and_time_is_noticed(stored: Path) -> None:
    data, facts = prepared(stored)
    shutil.rmtree(group_cache.groups_folder())
    file = stored / "part-1.jsonl"
    times, content = file.stat(), file.read_bytes()
    file.write_bytes(content.replace(b"says", b"sais"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    source = data.open(_folder(facts), "train")
    with pytest.raises(TrainingError, match=r"part-1\.jsonl was changed"):
        source.check(np.arange(len(source)))


def test_a_damaged_group_on_this_machine_is_read_again(stored: Path) -> None:
    data, facts = prepared(stored)
    wanted = tokens_of(data, facts)
    for file in group_cache.groups_folder().glob("*/tokens-values.npy"):
        content = bytearray(file.read_bytes())
        content[-2] ^= 1
        file.write_bytes(content)
    assert tokens_of(data, facts) == wanted


def test_the_groups_on_this_machine_stay_below_their_limit(tmp_path: Path) -> None:
    cache = group_cache.GroupCache(tmp_path / "groups", limit=60_000)
    columns = {"tokens": Ragged.from_rows([np.arange(1000, dtype=np.uint16)])}
    digest = group_cache.group_digest(columns)
    for number in range(60):
        name = f"{number:032}"
        assert cache.get(name, digest, lambda: columns) is not None
        cache.look_up(f"{0:032}", digest)  # in use, so it stays
    left = {path.name for path in (tmp_path / "groups").iterdir() if not path.name.startswith(".")}
    files = [f for f in (tmp_path / "groups").rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) < 62_000
    assert {f"{0:032}", f"{59:032}"} <= left
    assert 10 < len(left) < 40


def test_what_is_expected_is_here_before_it_is_fetched(stored: Path) -> None:
    data, facts = prepared(stored)
    shutil.rmtree(group_cache.groups_folder())
    source = data.open(_folder(facts), "train")
    assert source.read_ahead > 0
    source.expect(np.arange(len(source)))
    names = {source._request(group)[0] for group in range(len(source.table))}  # type: ignore[attr-defined]  # noqa: SLF001
    deadline = time.monotonic() + 20
    while names - {path.name for path in group_cache.groups_folder().glob("*")}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_node_reads_the_groups_of_its_own_samples(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, facts = prepared(stored, max_length=400)
    source = data.open(_folder(facts), "train")
    groups = np.searchsorted(np.cumsum(source.groups), np.arange(len(source)), "right")  # type: ignore[attr-defined]
    expected: list[int] = []
    monkeypatch.setattr(source, "expect", lambda rows: expected.extend(groups[rows].tolist()))
    order = np.arange(len(source)).reshape(-1, 4) if len(source) % 4 == 0 else np.arange(8).reshape(2, 4)
    loader = BatchLoader(source, lambda step: order[step], plan(processes=4, micro_batch_samples=1), rank=1)
    fetched = [
        n for loaded in loader.steps(0, len(order)) for b in loaded.batches for n in b["index"].tolist()
    ]
    assert len(fetched) == len(order), "a quarter of each batch"
    assert set(expected) == set(groups[fetched].tolist())
    assert set(expected) < set(groups[order].ravel().tolist())


class Failing:
    """A file system whose reads fail for a while."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures, self.error, self.reads = failures, error, 0

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.reads += 1
        if self.reads <= self.failures:
            raise self.error
        return b"x" * (end - start if self.reads > self.failures + 1 else 1)  # once cut short


def test_a_read_is_tried_again_and_the_last_error_names_the_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "ATTEMPTS", 9)
    monkeypatch.setattr(store, "_said", [-1])
    for failures, reads in ((0, 2), (5, 7), (99, 9)):
        files = Failing(failures, ConnectionResetError("reset by peer"))
        monkeypatch.setattr(store.Store, "_open", lambda *_, files=files: (files, "path"))
        if failures < 99:
            assert store.Store().read("s3://b/part-3", 10, 14) == b"xxxx"
        else:
            with pytest.raises(TrainingError, match=r"s3://b/part-3: bytes 10 to 14 .* 9 attempts: reset by"):
                store.Store().read("s3://b/part-3", 10, 14)
        assert files.reads == reads
    refused = Failing(99, PermissionError("Access Denied"))
    monkeypatch.setattr(store.Store, "_open", lambda *_: (refused, "path"))
    with pytest.raises(TrainingError, match=r"no permission: .* credentials"):
        store.Store().read("s3://b/part-3", 10, 14)
    assert refused.reads == 1, "what is refused is not asked for again"
    assert 1 <= capsys.readouterr().err.count("cannot be had (reset by peer): trying again") <= 2, "a minute"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("file:///nowhere/*.jsonl", "matches no object that ends in .parquet .jsonl"),
        ("s4://bucket/a.jsonl", r"s4:// is none of s3://, gs://"),
        ("https://user:word@host/a.jsonl", "https://host/a.jsonl: leave user and password out"),
        ("https://host/a.jsonl?X-Amz-Signature=abc", "leave the signature out"),
        ("http://127.0.0.1:9/a.jsonl", "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_what_cannot_be_had_is_one_line(data: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as found:
        data_of(data).check()
    assert "\n" not in str(found.value)
    assert "word" not in str(found.value).replace("password", "")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"clean": "duplicates"}, "--clean duplicates: needs data on this machine"),
        ({"stride": 8}, "--stride 8: needs"),
        ({"mix": "1,2"}, "--mix: needs"),
        ({"text_column": "txt"}, r"--text-column txt: .*part-0.jsonl: has no txt \(did you mean text\?\)"),
        ({"format": "csv"}, "--format csv: an object in a store says by its ending what it is"),
    ],
)
def test_what_needs_local_data_is_refused(stored: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        data_of(f"file://{stored}/*", **asked).check()


def test_splits_follow_the_names_of_objects() -> None:
    names = ["a/train-0.parquet", "a/validation-0.parquet", "a/test-0.parquet", "a/0001.parquet"]
    objects = [store.StoredObject(f"s3://{name}", 1, "") for name in names]
    assert indexes.divide(objects) == {"train": [0, 3], "valid": [1], "test": [2]}
    with pytest.raises(UserError, match="held out by their names"):
        indexes.divide(objects[1:3])


def test_a_shard_without_the_column_is_refused(stored: Path) -> None:
    (stored / "part-2.jsonl").write_bytes(b'{"content": "lost without a word"}\n' * 50)
    with pytest.raises(UserError, match=r"part-2.jsonl has no column text"):
        prepared(stored)
    (stored / "part-2.jsonl").unlink()
    pyarrow.parquet.write_table(pyarrow.table({"content": ["lost"] * 50}), stored / "part-2.parquet")
    with pytest.raises(UserError, match=r"part-2.parquet has no column text"):
        prepared(stored)


@pytest.mark.parametrize("ending", ["parquet", "jsonl.gz"])
def test_a_shard_of_0_bytes_is_no_whole_file(stored: Path, ending: str) -> None:
    (stored / f"part-2.{ending}").write_bytes(b"")
    with pytest.raises(IsobatchError, match=rf"part-2.{ending}: is no whole .* 0 bytes"):
        prepared(stored)
