"""Predictions corrected by what runs on this machine took."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

from isobatch.engine.machine.history import Measured
from isobatch.engine.planning.memory_model import CONTEXT_BYTES, ExecutionChoices, memory_footprint

if TYPE_CHECKING:
    from isobatch.core.plan import Plan
    from isobatch.engine.machine.history import Correction
    from isobatch.engine.planning.cost_model import PlanningCase


def history_key(case: PlanningCase, choices: ExecutionChoices) -> tuple[str, str, float]:
    """(key, kind, size) of a run in the machine's history: see `history.Measured`.

    The key holds all that decides memory and time but the micro-batch, which follows from it.
    """
    recipe, facts = case.recipe, case.facts
    shape = {
        "task": recipe.task,
        "size": dataclasses.asdict(case.model_size),
        "lengths": [case.longest, round(facts.mean_length, 2)],
        "batch": [recipe.batch_size, recipe.optimizer],
        "choices": dataclasses.asdict(choices),
        "compile": case.compile,
    }
    key = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
    kind = f"{recipe.task} {choices.device} {choices.precision}"
    tokens = min(recipe.batch_size * facts.mean_length, 1e5)
    footprint = memory_footprint(recipe, case.model_size, choices, tokens, case.longest)
    return key, kind, footprint.step - footprint.workspace


def correction_for(case: PlanningCase, choices: ExecutionChoices) -> Correction:
    """The correction that this machine's history has for a run."""
    return case.measured.history.correction(*history_key(case, choices))


def correct_bytes(case: PlanningCase, predicted: float, correction: Correction) -> float:
    """Predicted bytes of a process, with what is beside the process itself corrected."""
    process = min(predicted, CONTEXT_BYTES[case.device])
    return process + correction.memory * (predicted - process)


def uncorrected_limit(case: PlanningCase, limit: float, correction: Correction) -> float:
    """The uncorrected prediction that becomes `limit` bytes when it is corrected."""
    process = min(limit, CONTEXT_BYTES[case.device])
    return process + (limit - process) / correction.memory


def measured_run(plan: Plan, peak: int, seconds: float | None) -> Measured | None:
    """The row of a run for the history: its peak bytes and the median seconds of its steps, if they count.

    None where the plan was made without a key, or where the figures are below what the process itself takes.
    Where other programs disturbed the steps, or the rates that predicted them, the old ratio stays.
    """
    if not plan.correction:
        return None
    process = CONTEXT_BYTES[plan.device]
    corrected = (plan.predicted_peak_memory_bytes - process) / plan.correction["memory"]
    predicted = plan.predicted_step_seconds / plan.correction["seconds"]
    if min(corrected, predicted, peak - process) <= 0:
        return None
    if seconds is None or plan.correction.get("disturbed"):
        seconds = plan.predicted_step_seconds
    return Measured(
        key=plan.correction["key"],
        kind=plan.correction["kind"],
        size=plan.correction["size"],
        memory=(peak - process) / corrected,
        seconds=seconds / predicted,
    )
