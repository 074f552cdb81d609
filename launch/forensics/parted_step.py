"""Redoes the step where two runs part, on both sides, and says what in it differs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import IsobatchError
from isobatch.core.terminal.status import doing
from isobatch.engine.forensics.compare_logs import EXACT_FLOOR
from isobatch.engine.forensics.compare_steps import StepDifference, compare_steps, not_reproduced
from isobatch.engine.forensics.observed_step import observe_step, redo_figures, window_to
from isobatch.engine.verification.replay import Replay
from isobatch.launch.forensics.replay import ReplayOptions, replay_plan
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.launch.local.run_setup import locate_data

if TYPE_CHECKING:
    from isobatch.core.plan import Plan
    from isobatch.engine.forensics.compare_logs import LogDifference
    from isobatch.engine.forensics.observed_step import ObservedStep
    from isobatch.engine.runs.run_folder import RunFolder


def parted_step(one: RunFolder, other: RunFolder, parted: LogDifference, level: str) -> dict[str, Any]:
    """What differs in the step: `module`, `weights`, and what either run logged that its recipe does not give
    here; `why_not` where the step cannot be redone.

    Each side is redone from its own weights, and the second also from the first one's: then what still
    differs comes from its data, its code or its arithmetic alone.
    """
    micro_batch = min(run.plan.micro_batch_samples for run in (one, other))
    plans = []
    try:
        for run in (one, other):
            locate_data(run, run.recipe, None)
            plans.append(replay_plan(run, ReplayOptions(micro_batch=micro_batch)))
        if parted.step - parted.previous > 1:
            parted = _within_the_gap(one, other, plans, parted)
        doing(f"redoing step {parted.step} of {parted.phase} of both")
        own = [_observed(run, run, plan, parted) for run, plan in zip((one, other), plans, strict=True)]
        difference = compare_steps(own[0], own[1])
        if difference.weights > 0:
            doing("redoing the second from the weights of the first")
            same_start = compare_steps(own[0], _observed(one, other, plans[1], parted))
        else:
            same_start = difference
    except IsobatchError as error:
        return {"why_not": " ".join(str(error).split())}
    return {
        "step": parted.step,
        "redone_from": [seen.start for seen in own],
        "unexplained": [not_reproduced(seen) for seen in own],
        "weights": {"difference": difference.weights, "parameter": difference.parameter},
        "loss_from_same_weights": same_start.loss,
        "module": _module(same_start, level),
        "first_bits": same_start.first_bits,
    }


def _within_the_gap(
    one: RunFolder, other: RunFolder, plans: list[Plan], parted: LogDifference
) -> LogDifference:
    """With the first step that differs when redone, where a run logged only some of its steps."""
    found = []
    for run, plan in zip((one, other), plans, strict=True):
        doing(f"redoing steps {parted.previous + 1} to {parted.step} of {run.folder.name}")
        with preserve_process_state():
            replay = Replay(run, plan)
            window = window_to(run, replay.session.phases, parted.phase, parted.previous + 1)
            longer = dataclasses.replace(window, count=parted.step - window.start)
            found.append(redo_figures(replay, longer)[parted.previous - window.start :])
    allowed_loss, allowed_norm = EXACT_FLOOR
    for step, ((loss, norm), (other_loss, other_norm)) in enumerate(
        zip(*found, strict=True), parted.previous + 1
    ):
        apart = abs(loss - other_loss) / max(1.0, abs(loss)), abs(norm - other_norm) / max(1e-12, abs(norm))
        if not (apart[0] <= allowed_loss and apart[1] <= allowed_norm):
            return dataclasses.replace(parted, step=step)
    return parted


def _observed(weights: RunFolder, recipe: RunFolder, plan: Plan, parted: LogDifference) -> ObservedStep:
    """The step by the recipe of one run, from the kept weights of another."""
    with preserve_process_state():  # accelerate keeps one precision for the whole process
        replay = Replay(weights, plan, recipe.recipe)
        window = window_to(weights, replay.session.phases, parted.phase, parted.step)
        return observe_step(replay, window, alone=False)


def _module(found: StepDifference, level: str) -> dict[str, Any] | None:
    if found.module is None:
        return None
    values = dataclasses.asdict(found.module)
    if level != "sample":
        values.pop("samples")
    return values
