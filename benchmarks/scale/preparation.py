"""What preparing data costs: text beside the tokenizers' own rates, memory a row of tables, digests.

With ISOBATCH_EARLIER=FOLDER, a checkout of an earlier commit, that is measured in the same run, as `before`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.package import CACHE, ROOT
from isobatch.data.digests import file_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED = ROOT.parent / "shared" / "data"
EARLIER = "ISOBATCH_EARLIER"
CHILD = Path(__file__).with_name("preparation_child.py")
MEGABYTE = 1_000_000
LABELLED, EVENTS = (25_000, 100_000), (250_000, 1_000_000)
"""Rows of two tables, from which the bytes a row follow."""


def measure(quick: bool) -> Iterator[dict[str, Any]]:
    """Rows of text, of digests, and of labelled texts and interactions in two sizes."""
    if not SHARED.is_dir():
        raise UserError(f"{SHARED} is not on this machine: texts and vocabularies are read there")
    roots = {"before": Path(os.environ[EARLIER])} if EARLIER in os.environ else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield from _text(folder, {**roots, "now": ROOT}, 1 if quick else 5)
        yield _digests(folder, 4 if quick else 500)
        for task, sizes, write in (
            ("classifier", LABELLED, write_reviews),
            ("recommender", EVENTS, write_events),
        ):
            for root in {**roots, "now": ROOT}.items():
                yield _slope(folder, task, root, [size // (20 if quick else 1) for size in sizes], write)


def prepare_alone(root: Path, folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What the child says that runs the code under `root`, with a cache of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        words = [sys.executable, "-P", str(CHILD), str(root), json.dumps(values)]
        done = subprocess.run(words, env={**os.environ, CACHE: cache}, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _text(folder: Path, roots: dict[str, Path], megabytes: int) -> Iterator[dict[str, Any]]:
    (folder / "text").mkdir()
    text = (SHARED / "wikitext2" / "train.txt").read_text(encoding="utf-8")[: megabytes * MEGABYTE]
    (folder / "text" / "train.txt").write_text(text, encoding="utf-8")
    (folder / "text" / "valid.txt").write_text(text[:20_000], encoding="utf-8")
    tokenizer, file = str(SHARED / "gpt2-bpe"), str(folder / "text" / "train.txt")
    libraries = {
        f"{library} alone": (ROOT, {"library": library, "vocabulary": tokenizer, "file": file})
        for library in ("tokenizers", "tiktoken")
    }
    flags = {"task": "causal-lm", "data": str(folder / "text"), "tokenizer": tokenizer, "max_length": 256}
    contenders: dict[str, tuple[Path, dict[str, Any]]] = {
        **libraries,
        **{name: (root, flags) for name, root in roots.items()},
    }
    for by, (root, values) in contenders.items():
        found = prepare_alone(root, folder, values)
        yield {
            "text by": by,
            "MB/s": round(megabytes / found["seconds"], 2),
            "CPU s/MB": round(found["cpu_seconds"] / megabytes, 3),
            "memory, MB": round(found.get("peak_bytes", 0) / MEGABYTE),
            "fingerprint": found.get("fingerprint", ""),
        }


def _digests(folder: Path, megabytes: int) -> dict[str, Any]:
    """The digest of a file, read and then remembered."""
    file, before = folder / "raw.bin", os.environ.get(CACHE)
    file.write_bytes(bytes(megabytes * MEGABYTE))
    time.sleep(2.1)  # a file that has just changed is read again
    os.environ[CACHE] = str(folder / "cache")
    seconds = []
    for _ in range(2):
        began = time.process_time()
        file_hash(file)
        seconds.append(time.process_time() - began)
    os.environ.pop(CACHE) if before is None else os.environ.update({CACHE: before})
    file.unlink()
    return {
        "digest of MB": megabytes,
        "first, CPU s": round(seconds[0], 3),
        "again, CPU s": round(seconds[1], 5),
    }


def _slope(
    folder: Path,
    task: str,
    root: tuple[str, Path],
    sizes: list[int],
    write: Callable[[Path, int], dict[str, Any]],
) -> dict[str, Any]:
    found = []
    for size in sizes:
        place = folder / f"{task}-{size}"
        place.mkdir(exist_ok=True)
        found.append(prepare_alone(root[1], folder, {"task": task, "data": str(place), **write(place, size)}))
    peaks, cpu = ([one[name] for one in found] for name in ("peak_bytes", "cpu_seconds"))
    rows = sizes[1] - sizes[0]
    return {
        "rows of": task,
        "by": root[0],
        "rows": sizes[1],
        "memory, MB": round(peaks[1] / MEGABYTE),
        "bytes a row": round((peaks[1] - peaks[0]) / rows),
        "CPU s per million": round(1e6 * (cpu[1] - cpu[0]) / rows, 1),
        "fingerprint": found[1]["fingerprint"],
    }


def write_reviews(folder: Path, count: int) -> dict[str, Any]:
    """Sentences of SST-2, each with a number behind it: no two are the same."""
    given = (SHARED / "sst2" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    with (folder / "train.tsv").open("w", encoding="utf-8") as stream:
        stream.write("sentence\tlabel\n")
        for number in range(count):
            text, label = given[number % len(given)].rsplit("\t", 1)
            stream.write(f"{text} {number}\t{label}\n")
    return {"tokenizer": str(SHARED / "bert-vocab"), "max_length": 128, "model": "tiny"}


def write_events(folder: Path, count: int) -> dict[str, Any]:
    """Interactions by chance: a hundred a user, of 20,000 items of which few are popular."""
    import pyarrow as pa
    from pyarrow import parquet

    names = [("user", pa.int32()), ("item", pa.int32()), ("timestamp", pa.int64())]
    draw, step = np.random.default_rng(0), 1_000_000
    with parquet.ParquetWriter(folder / "interactions.parquet", pa.schema(names)) as writer:
        for start in range(0, count, step):
            rows = min(step, count - start)
            user = draw.integers(0, max(100, count // 100), rows).astype(np.int32)
            item = (draw.random(rows) ** 2 * 20_000).astype(np.int32)
            when = draw.integers(1_000_000_000, 1_700_000_000, rows)
            writer.write_table(pa.table([user, item, when], schema=pa.schema(names)))
    return {}
