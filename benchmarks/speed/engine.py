"""Speed and memory against a bare PyTorch loop and Trainer: `python -m benchmarks engine`.

All train the same model on the same samples in the same order; their losses must agree. Each contender is a
process of its own, in turn, whose idle threads soon sleep: spinning threads
would make the figures depend on other processes. Speed is that of the median step after the first few, memory
the process's peak until its last step. Processor time does not count what other processes took.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.benchmarks import child_process
from isobatch.benchmarks.report import Row, interleaved, middle, paired_ratio
from isobatch.core.flags import Interval
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.machine.detect import detect
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.models.causal_lm.model_sizes import PRESETS

WORKLOAD = Path(__file__).with_name("random_tokens.py")
WARM = 3
"""First steps that are not counted."""
TOLERANCE = 2e-5
"""Largest relative difference of losses between contenders, which add the same floats in other orders."""


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison."""

    name: str
    task: str
    batch: int
    length: int
    model: str
    steps: int
    others: tuple[tuple[str, str, int], ...]
    """(label, kind, micro-batch) of the other contenders; micro-batch 0 is the plan's."""


def cases(quick: bool) -> list[Case]:
    fixed = (
        ("bare loop, batch in one", "bare", 32),
        ("Trainer, batch in one", "trainer", 32),
        ("bare loop, same micro-batch", "bare", 0),
        ("Trainer, same micro-batch", "trainer", 0),
    )
    whole = ("Trainer, batch in one", "trainer", 256)
    varied = (whole, ("Trainer, accumulated by 32", "trainer", 32), ("bare loop, batch in one", "bare", 256))
    instructions = (
        ("Trainer, batch in one", "trainer", 128),
        ("Trainer, accumulated by 32", "trainer", 32),
        ("Trainer, accumulated by 8", "trainer", 8),
    )
    if quick:
        return [
            Case("blocks, tiny", "BlockLM", 32, 64, "tiny", 12, fixed),
            Case("varied", "VariedLM", 256, 512, "tiny", 6, (whole,)),
        ]
    return [
        Case("blocks, small", "BlockLM", 32, 128, "small", 10, fixed),
        Case("blocks, tiny", "BlockLM", 32, 128, "tiny", 24, fixed),
        Case("varied", "VariedLM", 256, 512, "tiny", 7, varied),
        Case("instructions", "InstructionsLM", 128, 1536, "tiny", 7, instructions),
    ]


def measure(quick: bool) -> list[Row]:
    return [row for case in cases(quick) for row in compare(case, 1 if quick else 3)]


def compare(case: Case, repeats: int) -> list[Row]:
    """One row per contender, ours first."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ |= {
            "ISOBATCH_CACHE": str(folder / "cache"),
            "BENCHMARK_ROWS": str(case.batch * (case.steps + 4)),
        }
        run, spec = setup(case, folder)
        contenders: dict[str, Any] = {"isobatch": lambda: _ours(run, spec, folder)}
        for label, kind, micro in case.others:
            named = {**spec, "micro_batch": micro or spec["micro_batch"]}
            contenders[label] = lambda kind=kind, named=named: _child(kind, named, folder)
        found = interleaved(contenders, repeats)
    return [_row(case, label, found) for label in contenders]


def setup(case: Case, folder: Path) -> tuple[RunFolder, dict[str, Any]]:
    """A run folder with the planner's plan, and the settings by which the others train the same."""
    recipe = Recipe(
        task=f"{WORKLOAD}:{case.task}",
        model=case.model,
        steps=(case.steps,),
        batch_size=case.batch,
        max_length=case.length,
        schedule="constant",
        warmup=Interval(0, "steps"),
        dropout=0.0,
    )
    task, data = workload(recipe.task).make(recipe)
    facts = prepare(data)
    plan = make_plan(
        recipe, facts, task.model_size(facts), detect(), PlanOptions(device="cpu", precision="fp32")
    )
    run = RunFolder.create(folder / "run", recipe, facts, RunOptions(quiet=True))
    run.write_plan(plan)
    order = make_sampler(recipe, data.open(Path(facts.folder), "train"), 1)
    np.save(folder / "order.npy", np.stack([order.batch(step) for step in range(case.steps)]))
    model = PRESETS[case.model].config(facts.extra["vocabulary"], case.length)
    columns = Path(facts.folder) / "train"
    return run, {
        "tokens": str(columns / "tokens-values.npy"),
        "offsets": str(columns / "tokens-offsets.npy"),
        "order": str(folder / "order.npy"),
        "folder": str(folder / "trainer"),
        "run": str(run.folder),
        "model": {k: v for k, v in model.items() if k != "model_type"},
        "micro_batch": _micro_batch(plan, case),
        **{name: getattr(recipe, name) for name in ("lr", "weight_decay", "seed")},
        "threads": plan.threads,
    }


def _micro_batch(plan: Plan, case: Case) -> int:
    """The plan's micro-batch in blocks, lowered to a divisor of the batch, as Trainer needs."""
    most = max(1, min(case.batch, plan.micro_batch_samples, plan.micro_batch_tokens // case.length))
    return max(k for k in range(1, most + 1) if case.batch % k == 0)


def _ours(run: RunFolder, spec: dict[str, Any], folder: Path) -> Row:
    for made in ("checkpoints", "final"):
        shutil.rmtree(run.folder / made, ignore_errors=True)
    for made in ("metrics.jsonl", "decisions.jsonl", "summary.json", "exit.json", "log.txt"):
        (run.folder / made).unlink(missing_ok=True)
    return _child("isobatch", spec, folder)


def _child(kind: str, spec: dict[str, Any], folder: Path) -> Row:
    (folder / "spec.json").write_text(json.dumps(spec))
    found: Row = child_process.call("speed.contenders:contend", kind, str(folder / "spec.json"))
    found["micro_batch"] = spec["micro_batch"]
    found["cost"] = float(np.median(np.diff(found["processor"])[WARM - 1 :]))
    found["rate"] = 1 / float(np.median(found["seconds"][WARM:]))
    return found


def _row(case: Case, label: str, found: dict[str, list[Row]]) -> Row:
    """Figures of one contender; a ratio is ours over its, a median over the rounds."""
    ours, theirs = found["isobatch"], found[label]
    first = theirs[0]
    return {
        "case": case.name,
        "contender": label,
        "micro-batch": "plan" if label == "isobatch" else first["micro_batch"],
        "samples/s": round(middle(theirs, "rate") * case.batch, 2),
        "ours/its speed": round(paired_ratio(ours, theirs, "rate"), 4),
        "processor s/step": round(middle(theirs, "cost"), 3),
        "ours/its processor time": round(paired_ratio(ours, theirs, "cost"), 4),
        "MB": round(middle(theirs, "peak") / 1e6),
        "ours/its memory": round(paired_ratio(ours, theirs, "peak"), 4),
        "data wait": round(float(np.median([_waited(r) for r in theirs])), 4) if "waited" in first else "-",
        "padding": round(first["padding"], 3) if "padding" in first else "-",
        "loss": round(first["losses"][-1], 5),
        "loss difference": difference(ours[0]["losses"], first["losses"]),
    }


def _waited(row: Row) -> float:
    return float(sum(row["waited"][WARM:]) / sum(row["seconds"][WARM:]))


def difference(ours: list[float], theirs: list[float]) -> float:
    """Largest relative difference of losses over the steps; above TOLERANCE no comparison is fair."""
    worst = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    assert worst < TOLERANCE, f"losses differ by {worst:.1e}: {ours} against {theirs}"
    return worst
