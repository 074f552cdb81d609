"""Prove that a run is what its recipe says: its records, and logged steps redone in another cut."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from isobatch.core.errors import TrainingError
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import Plan, PlanOptions, StrategyChoice
from isobatch.engine.planning.detect import detect
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.verification.audit import recipe_problems, record_problems
from isobatch.launch.local.redo_steps import redo_steps
from isobatch.launch.local.run_setup import locate_data, plan_for_this_machine

TOLERANCE = {"exact": (1e-4, 1e-2), "rounding": (2e-3, 5e-2), "precision": (2e-2, 2e-1), "noise": (1e-1, 1.0)}
"""Invariance -> largest difference of loss and gradient norm that rounding (or noise) explains.

"rounding" is for exact plans of tasks that round activations: a flipped level was seen to move a loss by
1.4e-4 within three steps.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions:
    """Flags of `verify`."""

    steps: Positive = 3
    """Steps to redo from each starting point."""
    processes: Positive = 1
    """World size to redo them in."""
    strategy: StrategyChoice = "auto"
    """Strategy to redo them under, with --processes 2 or more."""
    micro_batch: Positive | None = None
    """Samples per micro-batch; by default half of what the run used."""
    data: str | None = None
    """Where the data lies now, if it has moved."""
    json: bool = False
    """One JSON object on standard output."""


def verify_run(run: RunFolder, own: VerifyOptions, owns_process: bool = True) -> dict[str, Any]:
    """What was found: `verified`, `problems` (a sentence each), `steps` (each redone step as JSON)."""
    report: dict[str, Any] = {"run": str(run.folder), "problems": recipe_problems(run), "steps": []}
    if not report["problems"]:
        locate_data(run, run.recipe, own.data)
        report["problems"] = record_problems(run)
    if not report["problems"]:
        other = _other_plan(run, own)
        looser: str = max(run.plan.invariance, other.invariance, key=list(TOLERANCE).index)
        if looser == "exact" and workload(run.recipe.task).task.rounds:
            looser = "rounding"
        report |= {"world_size": other.processes, "micro_batch_samples": other.micro_batch_samples}
        try:
            report["steps"] = redo_steps(run, other, own.steps, owns_process)
            report["problems"] = _differences(report["steps"], looser)
        except TrainingError as error:
            report["problems"] = [str(error)]
    report["verified"] = not report["problems"]
    return report


def _other_plan(run: RunFolder, own: VerifyOptions) -> Plan:
    """A plan for this machine in another cut than the run's, and in as many processes as asked."""
    plan = run.plan
    samples = own.micro_batch or max(1, plan.micro_batch_samples // 2)
    here = detect().kind
    asked = PlanOptions(
        device=here,
        processes=own.processes,
        strategy=own.strategy,
        micro_batch=min(samples, run.recipe.batch_size),
        precision=plan.precision if plan.device == here else "auto",
        compile="off",
    )
    made = plan_for_this_machine(run.recipe, run.facts, asked)
    return dataclasses.replace(made, reduction="explicit")


def _differences(rows: list[dict[str, Any]], invariance: str) -> list[str]:
    loss, norm = TOLERANCE[invariance]
    if not rows:
        return ["no logged step could be redone: metrics.jsonl has none after the start or a checkpoint"]
    return [
        f"phase {r['phase']}, step {r['step']}: loss {r['loss']:.6f} redone, {r['logged_loss']:.6f} logged"
        for r in rows
        if not (r["loss_difference"] <= loss and r["norm_difference"] <= norm)
    ]
