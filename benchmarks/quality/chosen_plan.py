"""Is the chosen plan the fastest? Every plan of a recipe is tried: `python -m benchmarks chosen-plan`.

First each of them once; then the chosen one and the two fastest in turns.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from isobatch.benchmarks import report
from isobatch.benchmarks.quality.predictions import step_seconds, train
from isobatch.core.errors import WRONG_INPUT
from isobatch.engine.runs.run_folder import RunFolder

STEPS = {
    "lm small": 8,
    "classifier tiny": 40,
    "qat tiny": 30,
    "recommender lora": 15,
    "vae transformer": 12,
    "vae gru": 20,
}
"""Recipe of `predictions` -> optimizer steps of a run."""
QUICK = ("vae gru",)
WARM = 3
FASTEST = 2
ROUNDS = 2
CHOSEN = "chosen"


def measure(quick: bool, only: str = "") -> list[dict[str, Any]]:
    """A row per recipe: the speed of the chosen plan over that of the fastest."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        names = [n for n in (QUICK if quick else STEPS) if only in n]
        return [_compare(recipe, home, 1 if quick else ROUNDS) for recipe in names]


def _compare(recipe: str, home: Path, rounds: int) -> dict[str, Any]:
    chosen = _train(recipe, "", home)
    batch = chosen["batch"]
    seconds = {}
    for words in plans(batch):
        print(f"{recipe}: {words}", file=sys.stderr)
        if tried := _train(recipe, words, home):
            seconds[words] = tried["step"]
    fastest = sorted(seconds, key=lambda words: seconds[words])[:FASTEST]
    contenders = {CHOSEN: "", **{words: words for words in fastest}}
    found = report.interleaved(
        {name: partial(_train, recipe, words, home) for name, words in contenders.items()}, rounds
    )
    best = min(fastest, key=lambda words: report.middle(found[words], "step"))
    row = {
        "recipe": recipe,
        "plans tried": len(seconds),
        "chosen": chosen["plan"],
        "chosen step": round(report.middle(found[CHOSEN], "step"), 4),
        "fastest": best,
        "fastest step": round(report.middle(found[best], "step"), 4),
        "slowest over fastest": round(max(seconds.values()) / min(seconds.values()), 2),
        "chosen reaches": round(report.paired_ratio(found[best], found[CHOSEN], "step"), 3),
    }
    print(row, file=sys.stderr)
    return row


def plans(batch: int) -> list[str]:
    """The flags of every plan: processes, strategy, samples of a micro-batch, activation checkpointing."""
    cores = len(os.sched_getaffinity(0))
    found = []
    for processes, strategy in [(1, "single"), (cores, "ddp"), (cores, "zero2")][: 3 if cores > 1 else 1]:
        share = -(-batch // processes)
        sizes = [share // 2**power for power in range(4) if share // 2**power]
        words = f"--processes {processes} --strategy {strategy}"
        found += [f"{words} --micro-batch {size}" for size in (sizes[:1] if strategy == "zero2" else sizes)]
        if strategy == "single":
            found.append(f"{words} --activation-checkpointing on")
    return found


def _train(recipe: str, plan: str, home: Path) -> dict[str, Any]:
    """The median seconds of a run's steps; empty where the plan is refused."""
    shutil.rmtree(home / "runs", ignore_errors=True)
    done = train(recipe, "run", home, *plan.split(), "--steps", str(STEPS[recipe]), "--eval-every", "1000")
    if done.returncode == WRONG_INPUT:  # such as ZeRO where it would save nothing
        return {}
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    run = RunFolder.open(home / "runs" / "run")
    chosen = f"{run.plan.processes} x {run.plan.micro_batch_tokens} tokens, {run.plan.strategy}"
    return {"step": step_seconds(run, WARM), "plan": chosen, "batch": run.recipe.batch_size}
