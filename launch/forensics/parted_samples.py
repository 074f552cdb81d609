"""The first step for which two runs took other samples, by their recipes; and rows whose content differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.terminal.status import doing
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.registry import workload_of
from isobatch.launch.local.run_setup import locate_data

if TYPE_CHECKING:
    from isobatch.data.base import Source
    from isobatch.engine.forensics.compare_logs import LogDifference
    from isobatch.engine.runs.run_folder import RunFolder

ROWS_AT_A_TIME = 256
MOST_NAMED = 10


def parted_samples(one: RunFolder, other: RunFolder, parted: LogDifference) -> dict[str, Any]:
    """`step` and what either alone took there, where the orders differ; `changed`, the first rows whose
    content differs; `why_not` where the data of one is not at hand.
    """
    try:
        sources = [_source(run) for run in (one, other)]
    except UserError as error:
        return {"why_not": str(error)}
    found: dict[str, Any] = {"rows": [len(source) for source in sources]}
    if parted.kind == "samples":
        found |= _first_other_batch(one, other, sources, parted)
    if one.facts.fingerprint != other.facts.fingerprint:
        doing("comparing the data")
        found["changed"] = changed_rows(*sources)
    return found


def _source(run: RunFolder) -> Source:
    locate_data(run, run.recipe, None)
    _, data = workload_of(run.recipe).make(run.recipe)
    return data.open(Path(run.facts.folder), "train")


def _first_other_batch(
    one: RunFolder, other: RunFolder, sources: list[Source], parted: LogDifference
) -> dict[str, Any]:
    """By the recipes: the first of the steps in question whose samples differ."""
    samplers = []
    for run, source in zip((one, other), sources, strict=True):
        task, _ = workload_of(run.recipe).make(run.recipe)
        samplers.append(make_sampler(run.recipe, source, task.cohort))
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


def changed_rows(one: Source, other: Source) -> list[int]:
    """The first numbers of rows whose content differs, MOST_NAMED at most; rows that only one has are not
    compared.
    """
    changed: list[int] = []
    for start in range(0, min(len(one), len(other)), ROWS_AT_A_TIME):
        rows = np.arange(start, min(start + ROWS_AT_A_TIME, len(one), len(other)))
        if _equal(one, other, rows):
            continue
        changed += [int(row) for row in rows if not _equal(one, other, np.array([row]))]
        if len(changed) >= MOST_NAMED:
            break
    return changed[:MOST_NAMED]


def _equal(one: Source, other: Source, rows: np.ndarray) -> bool:
    if not np.array_equal(one.lengths(rows), other.lengths(rows)):
        return False
    pair = one.fetch(rows), other.fetch(rows)
    return pair[0].keys() == pair[1].keys() and all(
        np.array_equal(np.asarray(pair[0][name]), np.asarray(pair[1][name])) for name in pair[0]
    )
