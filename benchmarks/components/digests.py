"""What checking prepared data costs: `python -m benchmarks digests`.

The speed of digests, the time to fetch prepared data that is checked on the way, or was checked before, and
what share of an epoch the checks are.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.benchmarks.report import Row, interleaved, middle
from isobatch.data import digests
from isobatch.data.base import ArraySource, Ragged, save

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH, BATCH = 128, 256
TOKENS_PER_SECOND = 1_000_000
"""More than one GPU trains GPT-2 124M on: a slower run spends a smaller share on checks."""


def measure(quick: bool) -> list[Row]:
    """Gigabytes a second of each digest, then the cost for rows of 128 tokens."""
    return [*_speeds(3 if quick else 9), *_costs(100_000 if quick else 1_000_000, 2 if quick else 5)]


def _speeds(repeats: int) -> list[Row]:
    block = np.random.default_rng(0).bytes(digests.CHUNK)
    functions: dict[str, Callable[[bytes], Any]] = {
        "sha256": lambda b: hashlib.sha256(b).digest(),
        "sha1": lambda b: hashlib.sha1(b).digest(),
        "blake2b": lambda b: hashlib.blake2b(b, digest_size=16).digest(),
        "crc32 (anybody can forge it)": zlib.crc32,
    }
    contenders = {name: partial(_timed, partial(digest, block)) for name, digest in functions.items()}
    found = interleaved(contenders, repeats)
    gigabytes = len(block) / 1e9
    return [{"digest": n, "GB/s": round(gigabytes / middle(r, "seconds"), 2)} for n, r in found.items()]


def _costs(count: int, repeats: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokens = np.random.default_rng(0).integers(0, 50_000, count * WIDTH, dtype=np.uint16)
        save(folder / "train", {"tokens": Ragged.from_blocks(tokens, WIDTH)})
        digests.write_digests(folder)
        order = np.random.default_rng(0).permutation(count)
        found = interleaved({"epoch": lambda: _epoch(folder, order)}, repeats)["epoch"]
        size = sum(f.stat().st_size for f in folder.rglob("*.npy"))
        rows = {name: middle(found, name) for name in found[0]}
    training = count * WIDTH / TOKENS_PER_SECOND
    return [
        {
            "prepared MB": round(size / 1e6),
            "fetch of an epoch, s": round(rows["unchecked"], 3),
            "with checks, first epoch, s": round(rows["first"], 3),
            "with checks, second, s": round(rows["second"], 3),
            f"share of an epoch at {TOKENS_PER_SECOND:,} tokens/s, %": round(
                100 * max(0.0, rows["first"] - rows["unchecked"]) / training, 3
            ),
        }
    ]


def _epoch(folder: Path, order: np.ndarray) -> Row:
    plain = ArraySource.open(folder / "train")
    source = ArraySource(plain.columns)
    _fetch(source, order)  # page faults
    return {
        "unchecked": _timed(lambda: _fetch(source, order))["seconds"],
        "first": _timed(lambda: _fetch(plain, order))["seconds"],
        "second": _timed(lambda: _fetch(plain, order))["seconds"],
    }


def _fetch(source: ArraySource, order: np.ndarray) -> None:
    for start in range(0, len(order), BATCH):
        source.fetch(order[start : start + BATCH])


def _timed(function: Callable[[], Any]) -> Row:
    began = time.perf_counter()
    function()
    return {"seconds": time.perf_counter() - began}
