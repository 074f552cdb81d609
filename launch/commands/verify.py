"""`verify`: prove that a run is what its recipe says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core.errors import DONE, FAILED, TrainingError, UserError
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import Plan, PlanOptions, StrategyChoice
from isobatch.engine.planning.detect import detect
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.local.redo_steps import redo_steps

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


def verify(words: Sequence[str]) -> int:
    """Usage: verify RUN [--steps 3] [--processes N] [--strategy S] [--micro-batch M] [--data PATH] [--json]

    Exit 3 on a difference.
    """
    from isobatch.engine.verification.audit import recipe_problems, record_problems
    from isobatch.launch.local.arguments import command_options, split_words
    from isobatch.launch.local.run_setup import locate_data

    positional, flags = split_words(words)
    if len(positional) != 1:
        raise UserError("verify: give the folder of one run (`runs` lists them)")
    run, own = RunFolder.open(positional[0]), command_options(flags, VerifyOptions, "verify")
    report: dict[str, Any] = {"run": str(run.folder), "problems": recipe_problems(run), "steps": []}
    if not report["problems"]:
        locate_data(run, run.recipe, own.data)
        report["problems"] = record_problems(run)
    plan = run.plan
    if not report["problems"]:
        other = _other_plan(run, own)
        looser: str = max(plan.invariance, other.invariance, key=list(TOLERANCE).index)
        if looser == "exact" and workload(run.recipe.task).task.rounds:
            looser = "rounding"
        report |= {"world_size": other.processes, "micro_batch_samples": other.micro_batch_samples}
        try:
            report["steps"] = redo_steps(run, other, own.steps)
            report["problems"] = _differences(report["steps"], looser)
        except TrainingError as error:
            report["problems"] = [str(error)]
    report["verified"] = not report["problems"]
    print(json.dumps(report) if own.json else _sheet(report, plan.invariance))
    return DONE if report["verified"] else FAILED


def _other_plan(run: RunFolder, own: VerifyOptions) -> Plan:
    """A plan for this machine in another cut than the run's, and in as many processes as asked."""
    from isobatch.launch.local.run_setup import plan_for_this_machine

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


def _sheet(report: dict[str, Any], invariance: str) -> str:
    lines = []
    if report["steps"]:
        lines.append(
            f"redone on {report['world_size']} process(es), micro-batches of {report['micro_batch_samples']}:"
        )
    for r in report["steps"]:
        lines.append(
            f"  {r['phase']} {r['step']:>6} from {r['start']}: loss {r['loss']:.6f}, logged"
            f" {r['logged_loss']:.6f},"
            f" difference {r['loss_difference']:.1e}; gradient norm {r['norm_difference']:.1e}"
        )
    lines += [f"  {problem}" for problem in report["problems"]]
    verdict = f"verified ({invariance})" if report["verified"] else "NOT what its recipe says"
    return "\n".join([*lines, f"{report['run']}: {verdict}"])
