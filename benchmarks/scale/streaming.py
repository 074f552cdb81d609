"""What training from a store costs beside prepared local data: `python -m benchmarks streaming [--quick]`.

An S3 server on this machine holds Parquet shards of made-up text, and the same rows are prepared here. Tokens
a second, the share of time that the loop waits for data, seconds until the first batch: of groups that are
read from the store and tokenized meanwhile (cold), with 50 ms before each answer, and of groups that are here
already (warm). `loader` is an epoch without optimizer steps, `training` the first steps of a small model.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isobatch.benchmarks import child_process
from isobatch.benchmarks.sessions import make_builder
from isobatch.core.measures import now
from isobatch.engine.train.hooks import Hooks
from isobatch.engine.train.step import train_step
from isobatch.tests.object_store import object_store

BUCKET = "corpus"
WORDS_A_DOCUMENT = 160
LATENCY = 0.05
SETTINGS: dict[str, Any] = {"batch_size": 16, "max_length": 128, "vocab_size": 2048, "epochs": (1.0,)}
TRAINED_STEPS = 30
GROUPS = "groups"


class Way(NamedTuple):
    """A way to the data."""

    name: str
    data: str
    address: str
    """Of the store."""
    warm: bool
    """Whether what was read before is kept."""


def measure(quick: bool) -> list[dict[str, Any]]:
    """A row for each way to the data."""
    with tempfile.TemporaryDirectory() as name, object_store() as store:
        folder = Path(name)
        _write_corpus(folder, *((6, 500) if quick else (16, 2400)))
        for shard in folder.glob("local/*.parquet"):
            store.put(BUCKET, shard.name, shard.read_bytes())
        remote = f"s3://{BUCKET}/*.parquet"
        with store.flaky(seconds=LATENCY) as late:
            ways = [
                Way("prepared", f"{folder}/local", store.address, True),
                Way("streamed, cold", remote, store.address, False),
                Way("streamed, cold, 50 ms", remote, late, False),
                Way("streamed, warm", remote, store.address, True),
            ]
            rows = [
                {"what": f"preparing: {way.name}", **_run(way, store.environment, folder, "prepared")}
                for way in ways[:2]
            ]
            for kind in ("loader", "training"):
                for way in ways:
                    found = _run(way, store.environment, folder, "epoch", kind)
                    rows.append({"what": f"{kind}: {way.name}", **found})
    return rows


def _run(way: Way, environment: dict[str, str], folder: Path, function: str, *words: str) -> dict[str, Any]:
    if not way.warm:
        shutil.rmtree(folder / GROUPS, ignore_errors=True)
    places = {"ISOBATCH_CACHE": str(folder / "cache"), "ISOBATCH_STREAM_CACHE": str(folder / GROUPS)}
    given = {**os.environ, **environment, **places, "AWS_ENDPOINT_URL": way.address}
    found: dict[str, Any] = child_process.call(
        f"scale.streaming:{function}", way.data, *words, environment=given
    )
    return found


def _write_corpus(folder: Path, shards: int, documents: int) -> None:
    """Parquet shards of so many documents, of words as frequent as words are (Zipf)."""
    import pyarrow
    from pyarrow import parquet

    chance, numbers = random.Random(0), np.random.default_rng(0)
    letters = "etaoinshrdlucmfw"
    words = np.array(["".join(chance.choices(letters, k=chance.randrange(2, 9))) for _ in range(20_000)])
    (folder / "local").mkdir()
    for shard in range(shards):
        drawn = words[numbers.zipf(1.3, (documents, WORDS_A_DOCUMENT)) % len(words)]
        table = pyarrow.table({"text": [" ".join(row) for row in drawn.tolist()]})
        parquet.write_table(table, folder / "local" / f"train-{shard:02}.parquet", row_group_size=documents)


def _values(data: str) -> dict[str, Any]:
    return {**SETTINGS, "data": data, **({"shuffle_window": 2} if "://" in data else {})}


def prepared(data: str) -> dict[str, Any]:
    """Seconds to prepare, or to index."""
    began, busy = now(), time.process_time()
    with make_builder("causal-lm", _values(data)) as builder:
        samples = len(builder.state.splits["train"])
    return {
        "seconds": round(now() - began, 1),
        "CPU s": round(time.process_time() - busy, 1),
        "samples": samples,
    }


def epoch(data: str, kind: str) -> dict[str, Any]:
    """An epoch of batches, or the first steps of training."""
    tokens, waited, first = 0, 0.0, 0.0
    with make_builder("causal-lm", _values(data)) as builder:
        schedule, hooks = builder.schedules[0], Hooks()
        with builder.phase(schedule) as state:
            began, busy = now(), time.process_time()
            steps = TRAINED_STEPS if kind == "training" else schedule.steps
            for loaded in state.batches(0, steps):
                first = first or now() - began
                waited += loaded.wait_seconds
                tokens += loaded.work.tokens
                if kind == "training":
                    train_step(state, loaded, hooks)
            seconds = now() - began
    return {
        "tokens/s": round(tokens / seconds),
        "waiting": round(waited / seconds, 3),
        "first batch s": round(first, 2),
        "seconds": round(seconds, 1),
        "CPU s": round(time.process_time() - busy, 1),
    }
