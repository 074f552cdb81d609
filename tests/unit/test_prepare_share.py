"""Tests of `prepare --shard I/N`: tasks with one cache make what one machine makes, also after a kill."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.package import own_command
from isobatch.data.preparation import encoding
from isobatch.data.preparation.encoding import EncodedShard, Share
from isobatch.engine.loading import prepare as preparing
from isobatch.engine.loading.prepare import prepare_share
from isobatch.launch.commands import plan
from isobatch.tests.integration.helpers import command
from isobatch.tests.unit.test_prepared_bytes import CASES, RECORDED, described, sentences

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.core.facts import Facts

SHARED = ("text, cleaned", "documents", "chats", "mixture", "labels in csv", "pairs held out")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOBATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoding, "SHARD_CHARACTERS", 2000)
    monkeypatch.setattr(preparing, "allowed_cpus", lambda *_: 1)
    return tmp_path / "cache" / "prepared"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that were encoded."""
    names: list[str] = []
    keep = EncodedShard.keep

    def counting(self: EncodedShard, file: Path, made_from: str) -> None:
        names.append(file.name)
        keep(self, file, made_from)

    monkeypatch.setattr(EncodedShard, "keep", counting)
    return names


def prepare(case: str, data: Path, number: int, count: int) -> Facts | None:
    return prepare_share(CASES[case](data), Share(number, count))


def recorded(case: str) -> Any:
    return json.loads(RECORDED.read_text())[case]


@pytest.mark.parametrize("case", SHARED)
def test_shares_make_what_one_machine_makes(case: str, data: Path, cache: Path, made: list[str]) -> None:
    assert prepare(case, data, 2, 3) is None
    assert prepare(case, data, 3, 3) is None
    before, last = len(made), Share(1, 3)
    found = prepare_share(CASES[case](data), last)
    assert found is not None
    assert described(found, data) == recorded(case)
    assert len(made) == len(set(made)), "each shard is encoded once"
    assert 0 < len(made) - before <= last.taken, "the one that joins them encodes its share alone"
    assert before > last.taken
    assert not list(cache.glob(".*"))


def test_tasks_at_once_make_what_one_machine_makes(data: Path) -> None:
    case = "documents"
    tasks = [CASES[case](data) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:  # the third share by two tasks
        found = list(pool.map(prepare_share, tasks, (Share(n, 3) for n in (1, 2, 3, 3))))
    joined = [facts for facts in found if facts is not None]
    assert joined
    assert all(described(facts, data) == recorded(case) for facts in joined)


def test_a_killed_task_is_run_again(data: Path, made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case, replace = "documents", EncodedShard.pack
    calls: list[int] = []

    def killed(self: EncodedShard, made_from: str = "") -> bytes:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return replace(self, made_from)

    with monkeypatch.context() as patch:
        patch.setattr(EncodedShard, "pack", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(case, data, 1, 2)
    assert prepare(case, data, 2, 2) is None, "the killed task's shards are not there"
    found = prepare(case, data, 1, 2)
    assert found is not None
    assert described(found, data) == recorded(case)
    assert len(made) - len(set(made)) == 1, "the shard within which it was killed is made again, no other"


def test_a_task_that_comes_late_leaves_nothing(data: Path, cache: Path, made: list[str]) -> None:
    found = preparing.prepare(CASES["documents"](data))
    done = len(made)
    assert prepare("documents", data, 1, 2) == found
    assert len(made) == done
    assert not list(cache.glob(".*"))


def test_what_is_not_encoded_in_shards_is_refused(data: Path) -> None:
    with pytest.raises(UserError, match="--shard 1/2: data of this kind is not encoded in shards"):
        prepare("leave one out", data, 1, 2)


@pytest.mark.parametrize("words", ["0/4", "5/4", "4", "a/b"])
def test_a_share_that_is_none_is_refused(words: str) -> None:
    with pytest.raises(UserError, match=f"--shard {words}: is not I/N with I from 1 to N, such as 3/16"):
        plan.prepare(["--task", "causal-lm", "--shard", words])


@pytest.mark.slow
def test_processes_of_which_one_is_killed(tmp_path: Path, data: Path, cache: Path) -> None:
    """Three tasks at once, one killed while it encodes and run again, against one machine."""
    (data / "train.txt").write_text("\n".join(sentences(1, 300_000)))
    words = ["prepare", "--task", "causal-lm", "--data", str(data), "--vocab-size", "400", "--json"]
    tasks = [
        subprocess.Popen(
            own_command(*words, "--shard", f"{n}/3"), cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        for n in (1, 2, 3)
    ]
    while len(list(cache.glob(".*.shards/*.shard"))) < 4:
        assert tasks[2].poll() is None
        time.sleep(0.01)
    tasks[2].kill()
    said = [task.communicate()[0] for task in tasks]
    assert '"missing"' in said[0]
    assert '"missing"' in said[1]
    again = command(own_command(*words, "--shard", "3/3"), tmp_path)
    alone = command(own_command(*words), tmp_path, ISOBATCH_CACHE=str(tmp_path / "alone"))
    found, wanted = json.loads(again.stdout), json.loads(alone.stdout)
    assert found["digest"] == wanted["digest"]
    assert {**found, "folder": ""} == {**wanted, "folder": ""}
