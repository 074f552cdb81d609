"""Parts 3 and 4, GPT-2 124M from scratch: tokens/s, MFU and memory; a bare loop and Trainer beside it.

All train the same shape on the same blocks of 1,024 tokens in the same order, in bf16. The goal on an H100 is
45 % MFU.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.benchmarks.gpu.runner import COMMAND_LINE, GPU, Part, Trial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.benchmarks.report import Row


@dataclass(frozen=True, slots=True)
class Size:
    """What every contender trains."""

    model: str
    vocabulary: int
    length: int
    batch: int
    """Rows of an optimizer step."""
    steps: int


SIZES = {"whole": Size("gpt2-124m", 50257, 1024, 64, 40), "quick": Size("tiny", 512, 64, 8, 14)}
RATE = 6e-4
LONG = 20_000
"""Steps of the run whose plan is measured: a plan of the few steps here would compile nothing."""


def trials(quick: bool) -> Sequence[Trial]:
    if quick:
        return [Trial("as planned", "gpu.scratch:ours", ("quick", "auto", "auto"), 60)]
    modes = ("on", "max-autotune", "off", "reduce-overhead")
    sizes = [("64", mode) for mode in modes] + [("16", "on"), ("16", "off"), ("32", "on"), ("8", "on")]
    return [
        _trial("as planned", "gpu.scratch:ours", "auto", "auto"),
        *(_trial(f"compile {mode}, {micro} rows", "gpu.scratch:ours", mode, micro) for micro, mode in sizes),
    ]


def peers(quick: bool) -> Sequence[Trial]:
    if quick:
        return [Trial(kind, f"gpu.peers:{kind}", ("quick", "4", "off"), 60) for kind in ("bare", "trainer")]
    return [
        _trial("bare loop, compiled, 64 rows", "gpu.peers:bare", "64", "on"),
        _trial("Trainer, compiled, 16 rows", "gpu.peers:trainer", "16", "on"),
        _trial("TRL, packing", "gpu.peers:trainer", "16", "off", "packing", needs=("trl", "datasets")),
        _trial("bare loop, compiled, 16 rows", "gpu.peers:bare", "16", "on"),
        _trial("bare loop, 64 rows", "gpu.peers:bare", "64", "off"),
    ]


def _trial(name: str, place: str, *words: str, needs: tuple[str, ...] = ()) -> Trial:
    return Trial(name, place, ("whole", *words), 150, (*COMMAND_LINE, *needs, GPU))


def headline(rows: Sequence[Row]) -> str:
    """The first, which is what was planned or the best peer, and the fastest."""
    found = {row["trial"]: row for row in (rows[0], max(rows, key=lambda row: row["tokens/s"]))}
    return "; ".join(f"{r['trial']}: {r['tokens/s']:,} tokens/s, MFU {r['MFU']}" for r in found.values())


SPEED = Part("GPT-2 124M: speed and memory", trials, headline, 310)
PEERS = Part("GPT-2 124M: a bare loop and Trainer", peers, headline, 190)


def ours(name: str, mode: str, micro: str) -> Row:
    """A run of the command line; `mode` and `micro` rows of a micro-batch: `auto` is a long run's plan."""
    from isobatch.benchmarks.gpu import runs

    size = SIZES[name]
    words = ["--model", size.model, "--max-length", str(size.length), "--batch-size", str(size.batch)]
    words += ["--lr", str(RATE), *(["--precision", "bf16"] if name == "whole" else [])]
    named = {"vocabulary": size.vocabulary, "rows": size.batch * size.steps}
    if mode == "auto":
        plan = json.loads(runs.plan_on_tokens(*words, "--steps", str(LONG), **named))["plan"]
        mode, micro = plan["compile"], str(_rows(plan, size))
    words += ["--steps", str(size.steps), "--compile", mode, "--micro-batch", micro]
    run = runs.train_on_tokens(f"{mode}-{micro}", *words, **named)
    return {
        "compile": run.plan.compile,
        "rows": _rows(dataclasses.asdict(run.plan), size),
        **runs.speed(run),
        **runs.memory(run),
        "predicted s": round(run.plan.predicted_step_seconds, 4),
        "step s": round(runs.step_rows(run)[-1]["step_seconds"], 4),
        "loss": round(runs.losses(run)[-1], 3),
    }


def _rows(plan: Mapping[str, Any], size: Size) -> int:
    return min(plan["micro_batch_samples"], plan["micro_batch_tokens"] // size.length, size.batch)
