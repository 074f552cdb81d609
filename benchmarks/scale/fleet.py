"""What grows with the fleet, from 8 to 16,384 GPUs, simulated on this machine: `python -m benchmarks fleet`.

Host work a step of one rank, with the code that training uses: the order of a global batch, and its cut into
micro-batches. The files of a checkpoint, one from each node. The goodput of a run whose machines fail,
simulated, with the interval between checkpoints that loses least, and with others.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.benchmarks import child_process
from isobatch.core.measures import peak_resident_bytes
from isobatch.data.base import Source
from isobatch.engine.checkpointing.checkpoint import CHECKSUMS, TEXTS
from isobatch.engine.checkpointing.layout import make_layout
from isobatch.engine.checkpointing.portable_state import TensorEntry, element_ranges
from isobatch.engine.loading.microbatching import MicroBatchBudget, cut_batch
from isobatch.engine.loading.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable

WORLDS = (8, 64, 512, 4096, 16384)
SAMPLES_A_RANK = 16
LONGEST = 512
TOKENS = 2 * LONGEST
"""Of a micro-batch: a rank has about 16 samples of 100 tokens, in one or two."""
GPU_HOURS_A_FAILURE = 54 * 24 * 16_384 / 419
"""Of Llama 3's 405B run: 419 unexpected interruptions in 54 days on 16,384 GPUs (Grattafiori et al. 2024)."""
SAVE_SECONDS, RESTART_SECONDS = 10.0, 600.0
"""That training waits for a checkpoint, and from a failure to the next step. Assumed, for a large model."""
DAYS = 54
RANKS_A_NODE = 8
ENTRIES = {
    f"{kind}layer.{number}": TensorEntry((1024, 4096), "float32")
    for kind in ("weight/", "moment/exp_avg/", "moment/exp_avg_sq/")
    for number in range(24)
}
"""100 M parameters with Adam's moments, dealt as DDP deals them."""


def measure(quick: bool) -> list[dict[str, Any]]:
    """Rows per world: milliseconds of host work a step, the balance of the cut, goodput, files."""
    worlds = (*WORLDS[:3], WORLDS[-1]) if quick else WORLDS
    rows = [
        {**_host_work(world, 3 if quick else 9), **_goodput(world), **_checkpoint(world)} for world in worlds
    ]
    return [*rows, _largest_source()]


def _checkpoint(world: int) -> dict[str, Any]:
    shares = []
    for rank in range(world):
        dealt = element_ranges(dict.fromkeys(ENTRIES, 1024 * 4096), rank, world)
        numbered = [([*ENTRIES].index(name), first, stop) for name, first, stop in dealt]
        shares.append((rank // RANKS_A_NODE, np.array(numbered)))
    layout = make_layout(ENTRIES, shares)
    return {
        "checkpoint files": len(layout.files) + len({*TEXTS, CHECKSUMS}),
        "a node's file MB": round(max(layout.sizes) / 1e6, 1),
    }


def _host_work(world: int, repeats: int) -> dict[str, Any]:
    batch = SAMPLES_A_RANK * world
    lengths_of = _Lengths(1_000_000_000).lengths
    sampler = Sampler(1_000_000_000, batch, seed=1)
    grouped = Sampler(1_000_000_000, batch, seed=1, lengths=lengths_of)
    lengths = lengths_of(sampler.batch(0))
    padded, packed = (MicroBatchBudget(samples=64, tokens=TOKENS, packed=p) for p in (False, True))
    steps = iter(range(1000))
    found: dict[str, Any] = {"world": world, "global batch": batch}
    found["order ms"] = _milliseconds(lambda: sampler.batch(next(steps)), repeats)
    began = time.process_time()
    for step in range(64):  # a window of like lengths, which is sorted once
        grouped.batch(step)
    found["order by length ms"] = round(1e3 * (time.process_time() - began) / 64, 2)
    for name, budget in (("padded", padded), ("packed", packed)):
        found[f"{name} cut ms"] = _milliseconds(lambda: cut_batch(lengths, world, budget).of_rank(1), repeats)  # noqa: B023
        cut = cut_batch(lengths, world, budget)
        loads = np.bincount(cut.ranks, cut.costs, world)
        found[f"{name} load max/mean"] = round(float(loads.max() / loads.mean()), 3)
    return found


def _milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Of the processor: what neighbours take is not counted. The least of some repeats."""
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return round(1e3 * min(taken), 2)


def best_interval(save: float, between_failures: float) -> float:
    """Seconds between checkpoints that lose least (Young 1974, with Daly's term of 2006); all in seconds."""
    return max(save, math.sqrt(2 * save * between_failures) - save)


def simulated_goodput(interval: float, save: float, restart: float, between: float, seconds: float) -> float:
    """Share of the time that a run computes steps which are not lost. Failures come by chance, at any moment,
    and a run goes on from its last whole checkpoint.
    """
    draws = np.random.default_rng(0)
    now = kept = 0.0
    while now < seconds:
        failure = min(draws.exponential(between), seconds - now)
        kept += interval * int(failure // (interval + save))
        now += failure + restart
    return kept / now


def _goodput(world: int) -> dict[str, Any]:
    between = 3600 * GPU_HOURS_A_FAILURE / world
    best = best_interval(SAVE_SECONDS, between)
    found = {"hours between failures": round(between / 3600, 1), "save every, minutes": round(best / 60, 1)}
    for name, interval in (("so", best), ("every hour", 3600.0), ("every minute", 60.0)):
        share = simulated_goodput(interval, SAVE_SECONDS, RESTART_SECONDS, between, 100 * DAYS * 86_400)
        found[f"goodput {name}"] = round(share, 3)
    return found


class _Lengths(Source):
    """As many samples as one likes: their lengths follow from their numbers."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.table = np.minimum(LONGEST, np.random.default_rng(0).lognormal(4.3, 0.8, 1 << 16)).astype(
            np.uint16
        )

    def __len__(self) -> int:
        return self.count

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.maximum(8, self.table[indices & 0xFFFF])

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        width = max(pad_to, int(self.lengths(indices).max()))
        return {"tokens": (indices[:, None] + np.arange(width)) % 50_000}


def _largest_source() -> dict[str, Any]:
    """The first step of 10^10 samples at world 4,096, as one rank makes it, in a process of its own."""
    seconds, memory = child_process.call("scale.fleet:first_step")
    return {"samples": "10^10", "world": 4096, "first batch, s": seconds, "peak memory, MB": memory}


def first_step() -> list[float]:
    """[seconds from the sampler to the batches of the last rank, peak memory of the process in MB]"""
    began, world = time.perf_counter(), 4096
    source = _Lengths(10**10)
    sampler = Sampler(len(source), SAMPLES_A_RANK * world, seed=1)
    samples = sampler.batch(0)
    cut = cut_batch(source.lengths(samples), world, MicroBatchBudget(samples=64, tokens=TOKENS))
    for micro in cut.of_rank(4095):
        source.fetch(samples[micro.positions], micro.width)
    return [round(time.perf_counter() - began, 3), round(peak_resident_bytes() / 1e6)]
