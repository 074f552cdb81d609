"""Verifies a run against its recipe: its records, and logged steps redone with other micro-batches."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import TrainingError
from isobatch.core.flags import check_fields
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import Plan, PlanOptions, StrategyChoice
from isobatch.engine.planning.detect import detect
from isobatch.engine.verification.audit import recipe_problems, record_problems
from isobatch.engine.verification.tolerance import tolerances
from isobatch.launch.local.redo_steps import redo_steps
from isobatch.launch.local.run_setup import TrustOptions, locate_data, plan_for_this_machine

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyOptions(TrustOptions):
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

    def __post_init__(self) -> None:
        check_fields(self)


def verify_run(run: RunFolder, options: VerifyOptions, owns_process: bool = True) -> dict[str, Any]:
    """A dict of `run`, `verified`, `problems` (a sentence each) and `steps` (each redone step as JSON).

    Where steps were redone also `world_size` and `micro_batch_samples`. Raises UserError.
    """
    report: dict[str, Any] = {"run": str(run.folder), "problems": recipe_problems(run), "steps": []}
    if not report["problems"]:
        locate_data(run, run.recipe, options.data)
        report["problems"] = record_problems(run)
    if not report["problems"]:
        other_plan = _other_plan(run, options)
        report |= {"world_size": other_plan.processes, "micro_batch_samples": other_plan.micro_batch_samples}
        try:
            report["steps"] = redo_steps(run, other_plan, options.steps, owns_process)
            report["problems"] = _differences(report["steps"], tolerances(run, other_plan, options.steps))
        except TrainingError as error:
            report["problems"] = [str(error)]
    report["verified"] = not report["problems"]
    return report


def _other_plan(run: RunFolder, options: VerifyOptions) -> Plan:
    """A plan for this machine with half the run's micro-batch unless given, and the processes asked for."""
    plan = run.plan
    samples = options.micro_batch or max(1, plan.micro_batch_samples // 2)
    device = detect().kind
    plan_options = PlanOptions(
        device=device,
        processes=options.processes,
        strategy=options.strategy,
        micro_batch=min(samples, run.recipe.batch_size),
        precision=plan.precision if plan.device == device else "auto",
        compile="off",
    )
    new_plan = plan_for_this_machine(run.recipe, run.facts, plan_options)
    return dataclasses.replace(new_plan, reduction="explicit")


def _differences(rows: list[dict[str, Any]], largest: tuple[float, float]) -> list[str]:
    loss, norm = largest
    if not rows:
        return ["no logged step could be redone: metrics.jsonl has none after the start or a checkpoint"]
    return [
        f"phase {r['phase']}, step {r['step']}: loss {r['loss']:.6f} redone, {r['logged_loss']:.6f} logged"
        for r in rows
        if not (r["loss_difference"] <= loss and r["norm_difference"] <= norm)
    ]
