"""Part 3, GPT-2 124M from scratch: tokens/s, MFU and memory, beside a bare loop and Trainer.

All train the same shape on the same blocks of 1,024 tokens in the same order, in bf16. The goal on an H100 is
45 % MFU.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isobatch.benchmarks.gpu.runner import COMMAND_LINE, GPU, Part, Trial

if TYPE_CHECKING:
    from collections.abc import Sequence

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


SIZES = {
    "whole": Size("gpt2-124m", 50257, 1024, 64, 40),
    "quick": Size("tiny", 512, 64, 8, 14),
}
RATE = 6e-4


def trials(quick: bool) -> Sequence[Trial]:
    if quick:
        peers = [Trial(kind, f"gpu.peers:{kind}", ("quick", "4", "off"), 60) for kind in ("bare", "trainer")]
        return [Trial("as planned", "gpu.scratch:ours", ("quick", "auto", "auto"), 60), *peers]
    needs = (*COMMAND_LINE, GPU)

    def ours(mode: str, micro: str) -> Trial:
        return Trial(f"compile {mode}, {micro} rows", "gpu.scratch:ours", ("whole", mode, micro), 150, needs)

    modes = ("on", "off", "reduce-overhead")
    sizes = [ours(mode, micro) for micro, mode in itertools.product(("64", "16"), modes)]
    return [
        Trial("as planned", "gpu.scratch:ours", ("whole", "auto", "auto"), 150, needs),
        Trial("bare loop, compiled, 64 rows", "gpu.peers:bare", ("whole", "64", "on"), 150, needs),
        Trial("Trainer, compiled, 16 rows", "gpu.peers:trainer", ("whole", "16", "on"), 150, needs),
        sizes[0],
        Trial("bare loop, compiled, 16 rows", "gpu.peers:bare", ("whole", "16", "on"), 150, needs),
        *sizes[1:],
        Trial("bare loop, 64 rows", "gpu.peers:bare", ("whole", "64", "off"), 150, needs),
        ours("on", "32"),
        ours("on", "8"),
    ]


def headline(rows: Sequence[Row]) -> str:
    """The fastest of ours and the fastest of the others."""
    ours = [row for row in rows if "predicted GB" in row]
    theirs = [row for row in rows if "predicted GB" not in row]
    found = [max(some, key=lambda row: row["tokens/s"]) for some in (ours, theirs) if some]
    return "; ".join(f"{r['trial']}: {r['tokens/s']:,} tokens/s, MFU {r['MFU']}" for r in found)


PART = Part("GPT-2 124M: speed and memory", trials, headline)


def ours(name: str, mode: str, micro: str) -> Row:
    """A run of the command line; `micro` rows of a micro-batch, `auto` the plan's."""
    from isobatch.benchmarks.gpu import runs

    size = SIZES[name]
    words = ["--model", size.model, "--max-length", str(size.length), "--batch-size", str(size.batch)]
    words += ["--steps", str(size.steps), "--lr", str(RATE), "--compile", mode]
    words += ["--precision", "bf16"] if name == "whole" else []
    words += [] if micro == "auto" else ["--micro-batch", micro]
    rows = size.batch * size.steps
    run = runs.train_on_tokens(f"{mode}-{micro}", *words, vocabulary=size.vocabulary, rows=rows)
    plan = run.plan
    return {
        "compile": plan.compile,
        "rows": min(plan.micro_batch_samples, plan.micro_batch_tokens // size.length, size.batch),
        **runs.speed(run),
        **runs.memory(run),
        "predicted s": round(plan.predicted_step_seconds, 4),
        "step s": round(runs.step_rows(run)[-1]["step_seconds"], 4),
        "loss": round(runs.losses(run)[-1], 3),
    }
