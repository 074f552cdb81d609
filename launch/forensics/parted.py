"""What differs where two runs part: the samples of a step, rows of the data, or what the step computed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import IsobatchError, UserError
from isobatch.core.terminal.status import doing
from isobatch.data.base import MEASURES
from isobatch.engine.forensics.compare_logs import EXACT_FLOOR
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.step_rows import differences
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.launch.local.run_setup import locate_data

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan
    from isobatch.data.base import Data, Source
    from isobatch.engine.forensics.compare_logs import LogDifference
    from isobatch.engine.forensics.observed_step import ObservedStep
    from isobatch.engine.runs.run_folder import RunFolder

Runs = tuple["RunFolder", "RunFolder"]
AT_A_TIME = 1024
"""Rows of data."""
MOST_NAMED = 10
"""Samples and rows."""


def parted_samples(runs: Runs, parted: LogDifference) -> dict[str, Any]:
    """`step` and what either alone took there, where the orders differ; what `changed_rows` says, where the
    data does; `why_not` where the data of one is not at hand.
    """
    sides = []
    for run in runs:
        try:
            locate_data(run, run.recipe, None)
        except UserError as error:
            bring = f"`isobatch seen {run.folder} --step 1 --data PATH` brings it here"
            return {"why_not": f"{error}; {bring}"}
        sides.append((workload_of(run.recipe).make(run.recipe)[1], run.facts))
    sources = [data.open(Path(facts.folder), "train") for data, facts in sides]
    found: dict[str, Any] = {"rows": list(map(len, sources))}
    if parted.kind == "samples":
        found |= _first_other_batch(runs, sources, parted)
    if runs[0].facts.fingerprint != runs[1].facts.fingerprint:
        doing("comparing the data")
        found |= changed_rows(*sides)
    return found


def changed_rows(one: tuple[Data, Facts], other: tuple[Data, Facts]) -> dict[str, Any]:
    """`changed`: the first numbers of training rows whose content differs, and `changed_rows` how many do, of
    those that both have.

    `tokenizers_differ`: as one that was trained on the data may after a changed word. Then all tokens do, and
    rows are compared by their texts.
    """
    by_text = len({_tokenizer(facts) for _, facts in (one, other)}) > 1
    width = max(facts.longest for _, facts in (one, other))
    rows = zip(*(_contents(*side, width, by_text) for side in (one, other)), strict=False)
    changed = [row for row, (a, b) in enumerate(rows) if a != b]
    named = {"changed": changed[:MOST_NAMED], "changed_rows": len(changed)}
    return {**named, "tokenizers_differ": by_text}


def _tokenizer(facts: Facts) -> bytes:
    """Empty where the data has none."""
    name = facts.extra.get("tokenizer")
    file = Path(facts.folder) / str(name)
    return file.read_bytes() if name and file.is_file() else b""


def _contents(data: Data, facts: Facts, width: int, by_text: bool) -> Iterator[bytes]:
    """What each training row holds, padded to `width`: equal where the rows are."""
    source = data.open(Path(facts.folder), "train")
    for start in range(0, len(source), AT_A_TIME):
        rows = np.arange(start, min(start + AT_A_TIME, len(source)))
        batch = source.fetch(rows, width)
        if by_text:
            yield from (text.encode() for text in data.describe_rows(facts, batch))
        else:  # but for the column that `fetch` adds, the number of the row
            columns = [np.ascontiguousarray(batch[name]) for name in sorted(batch) if name != MEASURES[0]]
            yield from (b"".join(column[at].tobytes() for column in columns) for at in range(len(rows)))


def _first_other_batch(runs: Runs, sources: list[Source], parted: LogDifference) -> dict[str, Any]:
    """By the recipes: the first of the steps in question whose samples differ."""
    samplers = [
        make_sampler(run.recipe, source, workload_of(run.recipe).make(run.recipe)[0].cohort)
        for run, source in zip(runs, sources, strict=True)
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
