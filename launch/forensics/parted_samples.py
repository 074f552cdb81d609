"""The first step for which two runs took other samples, by their recipes; and rows whose content differs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.terminal.status import doing
from isobatch.engine.forensics.compare_data import MOST_NAMED, TrainingRows, compare_data
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.registry import workload_of
from isobatch.launch.local.run_setup import locate_data

if TYPE_CHECKING:
    from isobatch.engine.forensics.compare_logs import LogDifference
    from isobatch.engine.runs.run_folder import RunFolder


def parted_samples(one: RunFolder, other: RunFolder, parted: LogDifference) -> dict[str, Any]:
    """`step` and what either alone took there, where the orders differ; what `compare_data` says, where the
    data does; `why_not` where the data of one is not at hand.
    """
    sides = []
    for run in (one, other):
        try:
            sides.append(_training_rows(run))
        except UserError as error:
            bring = f"`isobatch seen {run.folder} --step 1 --data PATH` brings it here"
            return {"why_not": f"{error}; {bring}"}
    found: dict[str, Any] = {"rows": [len(side) for side in sides]}
    if parted.kind == "samples":
        found |= _first_other_batch(one, other, sides, parted)
    if one.facts.fingerprint != other.facts.fingerprint:
        doing("comparing the data")
        found |= compare_data(*sides)
    return found


def _training_rows(run: RunFolder) -> TrainingRows:
    locate_data(run, run.recipe, None)
    _, data = workload_of(run.recipe).make(run.recipe)
    return TrainingRows(data, run.facts)


def _first_other_batch(
    one: RunFolder, other: RunFolder, sides: list[TrainingRows], parted: LogDifference
) -> dict[str, Any]:
    """By the recipes: the first of the steps in question whose samples differ."""
    samplers = []
    for run, side in zip((one, other), sides, strict=True):
        task, _ = workload_of(run.recipe).make(run.recipe)
        samplers.append(make_sampler(run.recipe, side.source, task.cohort))
    left_out = [left_out_steps(run).get(parted.phase, frozenset()) for run in (one, other)]
    for step in range(parted.previous + 1, parted.step + 1):
        if (step in left_out[0]) != (step in left_out[1]):
            return {"step": step, "left_out_by": 0 if step in left_out[0] else 1}
        batches = [sampler.batch(step - 1) for sampler in samplers]
        if not np.array_equal(batches[0], batches[1]):
            own = [np.setdiff1d(a, b)[:MOST_NAMED].tolist() for a, b in (batches, batches[::-1])]
            same_set = not own[0] and not own[1] and len(batches[0]) == len(batches[1])
            return {"step": step, "only": own, "sizes": [len(b) for b in batches], "other_order": same_set}
    return {"step": None}
