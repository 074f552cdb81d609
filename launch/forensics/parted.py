"""What differs where two runs part: the samples of a step, rows of the data, or what the step computed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import IsobatchError, UserError
from isobatch.core.terminal.status import doing
from isobatch.engine.forensics.compare_data import MOST_NAMED, TrainingRows, compare_data
from isobatch.engine.forensics.compare_logs import EXACT_FLOOR
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.step_rows import differences
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.launch.local.run_setup import locate_data

if TYPE_CHECKING:
    from isobatch.core.plan import Plan
    from isobatch.engine.forensics.compare_logs import LogDifference
    from isobatch.engine.forensics.observed_step import ObservedStep
    from isobatch.engine.runs.run_folder import RunFolder

Runs = tuple["RunFolder", "RunFolder"]


def parted_samples(runs: Runs, parted: LogDifference) -> dict[str, Any]:
    """`step` and what either alone took there, where the orders differ; what `compare_data` says, where the
    data does; `why_not` where the data of one is not at hand.
    """
    sides = []
    for run in runs:
        try:
            locate_data(run, run.recipe, None)
        except UserError as error:
            bring = f"`isobatch seen {run.folder} --step 1 --data PATH` brings it here"
            return {"why_not": f"{error}; {bring}"}
        sides.append(TrainingRows(workload_of(run.recipe).make(run.recipe)[1], run.facts))
    found: dict[str, Any] = {"rows": list(map(len, sides))}
    if parted.kind == "samples":
        found |= _first_other_batch(runs, sides, parted)
    if runs[0].facts.fingerprint != runs[1].facts.fingerprint:
        doing("comparing the data")
        found |= compare_data(*sides)
    return found


def _first_other_batch(runs: Runs, sides: list[TrainingRows], parted: LogDifference) -> dict[str, Any]:
    """By the recipes: the first of the steps in question whose samples differ."""
    samplers = [
        make_sampler(run.recipe, side.source, workload_of(run.recipe).make(run.recipe)[0].cohort)
        for run, side in zip(runs, sides, strict=True)
    ]
    left_out = [left_out_steps(run).get(parted.phase, frozenset()) for run in runs]
    for step in range(parted.previous + 1, parted.step + 1):
        if (step in left_out[0]) != (step in left_out[1]):
            return {"step": step, "left_out_by": 0 if step in left_out[0] else 1}
        batches = [sampler.batch(step - 1) for sampler in samplers]
        if not np.array_equal(batches[0], batches[1]):
            own = [np.setdiff1d(a, b)[:MOST_NAMED].tolist() for a, b in (batches, batches[::-1])]
            return {"step": step, "only": own, "other_order": not any(own)}
    return {"step": None}


def parted_step(runs: Runs, parted: LogDifference, level: str) -> dict[str, Any]:
    """What differs in the step: `module`, `weights`, and what either run logged that its recipe does not give
    here; `why_not` where the step cannot be redone.

    Each side is redone from its own weights, and the second also from the first one's: then what still
    differs comes from its data, its code or its arithmetic alone.
    """
    from isobatch.engine.forensics.compare_steps import compare_steps, not_reproduced
    from isobatch.launch.local.redo_steps import plan_to_redo

    micro_batch = min(run.plan.micro_batch_samples for run in runs)
    try:
        for run in runs:
            locate_data(run, run.recipe, None)
        plans = [plan_to_redo(run, micro_batch) for run in runs]
        if parted.step - parted.previous > 1:
            parted = _within_the_gap(runs, plans, parted)
        doing(f"redoing step {parted.step} of {parted.phase} of both")
        own = [_observed(run, run, plan, parted) for run, plan in zip(runs, plans, strict=True)]
        same_start = difference = compare_steps(*own)
        if difference.weights > 0:
            doing("redoing the second from the weights of the first")
            same_start = compare_steps(own[0], _observed(*runs, plans[1], parted))
    except IsobatchError as error:
        return {"why_not": " ".join(str(error).split())}
    module = dataclasses.asdict(same_start.module) if same_start.module else None
    if module and level != "sample":
        del module["samples"]
    return {
        "step": parted.step,
        "redone_from": [seen.start for seen in own],
        "unexplained": [not_reproduced(seen) for seen in own],
        "weights": {"difference": difference.weights, "parameter": difference.parameter},
        "module": module,
    }


def _within_the_gap(runs: Runs, plans: list[Plan], parted: LogDifference) -> LogDifference:
    """With the first step that differs when redone, where a run logged only some of its steps."""
    from isobatch.engine.verification.replay import Replay
    from isobatch.engine.verification.windows import window_to

    found = []
    for run, plan in zip(runs, plans, strict=True):
        doing(f"redoing steps {parted.previous + 1} to {parted.step} of {run.folder.name}")
        with preserve_process_state():
            replay = Replay(run, plan)
            window = window_to(run, replay.session.phases, parted.phase, parted.previous + 1)
            longer = dataclasses.replace(window, count=parted.step - window.start)
            found.append(replay.figures(longer)[parted.previous - window.start :])
    for step, pair in enumerate(zip(*found, strict=True), parted.previous + 1):
        if any(d > most for d, most in zip(differences(*pair), EXACT_FLOOR, strict=True)):
            return dataclasses.replace(parted, step=step)
    return parted


def _observed(weights: RunFolder, recipe: RunFolder, plan: Plan, parted: LogDifference) -> ObservedStep:
    """The step by the recipe of one run, from the kept weights of another."""
    from isobatch.engine.forensics.observed_step import observe_step
    from isobatch.engine.verification.replay import Replay
    from isobatch.engine.verification.windows import window_to

    with preserve_process_state():  # accelerate keeps one precision for the whole process
        replay = Replay(weights, plan, recipe.recipe)
        window = window_to(weights, replay.session.phases, parted.phase, parted.step)
        return observe_step(replay, window, alone=False)
