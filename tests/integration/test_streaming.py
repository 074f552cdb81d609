"""A run whose data stays in an S3 server: killed, on another world, with a store that fails."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from isobatch.engine.runs.run_folder import RunFolder
from isobatch.tests.integration.helpers import killed_at_random, launch, ledger, losses, succeed, summary
from isobatch.tests.object_store import CREDENTIALS, ObjectStore, object_store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUCKET, SHARDS, ROWS = "corpus", 10, 30
WORDS = ["the", "river", "house", "stone", "sees", "old", "new", "under", "light", "door"]
SETTINGS = [
    *("auto", "--task", "causal-lm", "--data", f"s3://{BUCKET}/text/*.parquet", "--vocab-size", "300"),
    *("--epochs", "2", "--batch-size", "16", "--max-length", "32", "--shuffle-window", "3", "--ledger"),
    *("--save-every", "5", "--quiet", "--lr", "1e-3", "--precision", "fp32"),
]


def shard(number: int) -> bytes:
    """A Parquet file of documents, with a column that is not read."""
    import pyarrow
    from pyarrow import parquet

    chance = random.Random(number)
    texts = [" ".join(chance.choices(WORDS, k=chance.randrange(20, 60))) for _ in range(ROWS)]
    table = pyarrow.table({"id": [number] * ROWS, "text": texts})
    out = io.BytesIO()
    parquet.write_table(table, out, row_group_size=ROWS)
    return out.getvalue()


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as made:
        for number in range(SHARDS):
            made.put(BUCKET, f"text/part-{number:02}.parquet", shard(number))
        yield made


@pytest.fixture(scope="module")
def undisturbed(store: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    succeed(*SETTINGS, "--name", "ref", "--processes", "1", cwd=folder, **store.environment)
    return folder / "runs" / "ref"


def test_a_killed_run_goes_on_in_another_world_and_takes_every_sample_once(
    store: ObjectStore, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**store.environment, "ISOBATCH_STREAM_CACHE": str(tmp_path / "groups")}.items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "runs" / "killed"
    words = [*SETTINGS, "--name", "killed", "--processes", "1"]
    reached = killed_at_random(words, run, random.Random(7), steps=11)
    steps = summary(undisturbed)["steps"]
    assert 0 < reached < steps
    shutil.rmtree(tmp_path / "groups", ignore_errors=True)  # another node has nothing yet
    succeed("resume", str(run), "--processes", "2", "--precision", "fp32", cwd=tmp_path)
    assert summary(run)["resumed_from"].startswith("train-")
    count = RunFolder(run).facts.samples["train"]
    by_epoch = [Counter[int](), Counter[int]()]
    for row in ledger(run):
        by_epoch[(row["step"] - 1) // (steps // 2)].update(row["samples"])
    assert by_epoch == [Counter(range(count))] * 2
    assert ledger(run) == ledger(undisturbed)
    assert max(abs(a - b) for a, b in zip(losses(run), losses(undisturbed), strict=True)) < 1e-5
    done = succeed("verify", str(run), "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["verified"] is True


def test_a_flaky_store_costs_time_only(store: ObjectStore, undisturbed: Path, tmp_path: Path) -> None:
    with store.flaky(share=0.1, seconds=0.02) as address:
        places = {"ISOBATCH_CACHE": str(tmp_path / "cache"), "AWS_ENDPOINT_URL": address}
        words = [*SETTINGS, "--name", "flaky", "--processes", "1"]
        done = launch(*words, cwd=tmp_path, **{**store.environment, **places})
    assert done.returncode == 0, done.stderr
    assert store.faults
    assert losses(tmp_path / "runs" / "flaky") == losses(undisturbed)
    wrote = b"".join(p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file())
    for secret in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert CREDENTIALS[secret].encode() not in wrote


def test_seen_knows_the_steps_of_a_sample(store: ObjectStore, undisturbed: Path, tmp_path: Path) -> None:
    done = succeed("seen", str(undisturbed), "--sample", "5", "--json", cwd=tmp_path, **store.environment)
    found = json.loads(done.stdout)["rows"][0]
    steps = [row["step"] for row in ledger(undisturbed) if 5 in row["samples"]]
    assert [one["step"] for one in found["seen"]] == steps
    assert len(steps) == 2
