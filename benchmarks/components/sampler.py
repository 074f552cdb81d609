"""Rows a second of `Sampler` and `ArraySource`, against a DataLoader: `python -m benchmarks sampler`.

The DataLoader takes a map-style data set row by row. Rows are uint16 tokens in memory-mapped files, as in
prepared data.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.benchmarks.report import Row, interleaved, middle
from isobatch.data.base import ArraySource, Ragged, load, save
from isobatch.engine.loading.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BATCH = 65_536
LOADER_ROWS = 65_536
"""Rows that the DataLoader is timed on; all of them would take minutes."""


def measure(quick: bool) -> list[Row]:
    """Rows per width and form of the column."""
    sizes = ((16, 400_000), (128, 100_000)) if quick else ((16, 8_000_000), (16, 4_200_000), (128, 1_000_000))
    return [row for width, count in sizes for row in _width(width, count, 2 if quick else 7)]


def _width(width: int, count: int, repeats: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place:
        sources = {form: _source(Path(place) / form, form, width, count) for form in ("matrix", "blocks")}
        sampler = Sampler(count, BATCH, seed=1)
        contenders: dict[str, Callable[[], Row]] = {
            form: lambda source=source: _ours(sampler, source, width)  # type: ignore[misc]
            for form, source in sources.items()
        }
        contenders["DataLoader"] = lambda: _loader(sources["matrix"])
        found = interleaved(contenders, repeats)
    for name, rows in found.items():
        yield {
            "tokens a row": width,
            "rows": count,
            "through": f"Sampler + ArraySource, {name}" if name in sources else "DataLoader, row by row",
            **{column: round(middle(rows, column), 3) for column in rows[0]},
        }


def _source(folder: Path, form: str, width: int, count: int) -> ArraySource:
    tokens = np.random.default_rng(0).integers(0, 50_000, count * width, dtype=np.uint16)
    blocks = Ragged.of_lengths(tokens, np.full(count, width))
    save(folder, {"tokens": blocks if form == "blocks" else tokens.reshape(count, width)})
    return ArraySource(load(folder))


def _ours(sampler: Sampler, source: ArraySource, width: int) -> Row:
    source.fetch(sampler.batch(0), width)  # so that page faults do not count
    steps = range(min(12, sampler.steps_per_epoch))
    began = time.perf_counter()
    batches = [sampler.batch(step) for step in steps]
    ordered = time.perf_counter()
    for batch in batches:
        source.fetch(batch, width)
    ended = time.perf_counter()
    million = sum(map(len, batches)) / 1e6
    return {
        "million rows/s": million / (ended - began),
        "order alone": million / (ordered - began),
        "fetch alone": million / (ended - ordered),
    }


def _loader(source: ArraySource) -> Row:
    import torch
    from torch.utils.data import DataLoader, RandomSampler

    rows: Any = np.array(source.columns["tokens"])
    order = RandomSampler(rows, num_samples=LOADER_ROWS, generator=torch.Generator().manual_seed(0))
    loader: Iterable[Any] = DataLoader(rows, batch_size=BATCH, sampler=order)
    began = time.perf_counter()
    count = sum(len(batch) for batch in loader)
    return {"million rows/s": count / 1e6 / (time.perf_counter() - began)}
