"""`seen`: which steps of a run saw a row of its data, or which rows a step saw; nothing is logged for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.errors import UserError
from isobatch.core.number_ranges import Count, Positive
from isobatch.core.terminal import doing, print_answer, rendered
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.verification.run_order import RunOrder, require_step
from isobatch.launch.local.run_setup import DataOptions, locate_data, open_single_run

SHOWN = 20
"""Most steps of a row that are written out; --json has all."""
PREVIEW_CHARACTERS = 70


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenOptions(DataOptions):
    """Flags of `seen`."""

    sample: Count | None = None
    """A row of the training data as it was prepared; the first is 0."""
    step: Positive | None = None
    """A step, of which the rows are listed; the first is 1."""
    phase: str | None = None
    """The phase of --step; by default the first."""

    def __post_init__(self) -> None:
        if (self.sample is None) == (self.step is None):
            raise UserError("seen: what shall be looked for? Give --sample ROW or --step N")
        if self.phase is not None and self.step is None:
            raise UserError(f"--phase {self.phase}: belongs to --step; --sample says every phase")


def seen(words: Sequence[str]) -> int:
    """Usage: seen RUN --sample 1204 | --step 120 [--phase NAME] [--data PATH] [--json]

    Rows are numbered as they were prepared, from 0; steps from 1.
    """
    run, options = open_single_run(words, "seen", SeenOptions)
    answer = answer_question(run, options)
    text = rendered(Path(__file__).with_name("seen.jinja"), answer=answer, most=SHOWN)
    return print_answer(answer, text, options.json)


def answer_question(run: RunFolder, options: SeenOptions) -> dict[str, Any]:
    """The answer as JSON. Raises UserError."""
    if run.recipe.hash() != run.recorded_hash:
        raise UserError(f"{run.folder}/recipe.json was changed: the order of its samples is not known")
    doing("looking for the data")
    locate_data(run, run.recipe, options.data)
    order = RunOrder.of(run.recipe, run.facts)
    counted = order.counted_steps(run)
    answer: dict[str, Any] = {
        "run": str(run.folder),
        "status": run.status(),
        "training_rows": order.sampler.count,
        "steps": {schedule.name: schedule.steps for schedule in order.schedules},
        "steps_done": counted,
    }
    if options.step is None:
        row = options.sample or 0
        if row >= order.sampler.count:
            raise UserError(f"--sample {row}: the last row for training is {order.sampler.count - 1}")
        return {**answer, "rows": [_rows(order, run, [row])[0] | {"seen": order.sightings(run, [row])[row]}]}
    phase, step = options.phase or order.schedules[0].name, options.step
    require_step(order.schedules, phase, step)
    rows_of_step = {
        **order.place(phase, step),
        "counted": step <= counted[phase] and step not in left_out_steps(run).get(phase, ()),
        "rows": _rows(order, run, order.sampler.batch(step - 1).tolist()),
    }
    return {**answer, "rows_of_step": rows_of_step}


def _rows(order: RunOrder, run: RunFolder, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Training rows, each with the beginning of its text."""
    described = order.data.describe_rows(run.facts, order.source.fetch(np.array(rows, np.int64)))
    return [{"row": row, "text": shortened(text)} for row, text in zip(rows, described, strict=True)]


def shortened(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= PREVIEW_CHARACTERS else f"{line[:PREVIEW_CHARACTERS]}…"
