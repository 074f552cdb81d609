"""`seen`: which steps of a run saw a row of its data, or which rows a step saw; nothing is logged for it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
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
from isobatch.launch.local.options import DataOptions
from isobatch.launch.local.run_setup import locate_data, open_single_run

SHOWN = 20
"""Most steps of a row that are written out; --json has all."""
PREVIEW_CHARACTERS = 70
ROWS_AT_A_TIME = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenOptions(DataOptions):
    """Flags of `seen`."""

    sample: Count | None = None
    """A row of the training data as it was prepared; the first is 0."""
    text: str | None = None
    """A part of a row's text, of any split: its letters and digits count, not case, signs or accents."""
    step: Positive | None = None
    """A step, of which the rows are listed; the first is 1."""
    phase: str | None = None
    """The phase of --step; by default the first."""

    def __post_init__(self) -> None:
        if [self.sample, self.step, self.text].count(None) != 2:
            raise UserError("seen: what shall be looked for? Give --sample ROW, --text PART or --step N")
        if self.phase is not None and self.step is None:
            raise UserError(f"--phase {self.phase}: belongs to --step; the others say every phase")


def seen(words: Sequence[str]) -> int:
    """Usage: seen RUN --sample 1204 | --text "a part of a row" | --step 120 [--phase NAME] [--data PATH]
    [--json]

    Rows are numbered as they were prepared, from 0; steps from 1.
    """
    run, options = open_single_run(words, "seen", SeenOptions)
    answer = answer_question(run, options)
    text = rendered(__file__, "seen", answer=answer, most=SHOWN)
    return print_answer(answer, text, options.json)


def answer_question(run: RunFolder, options: SeenOptions) -> dict[str, Any]:
    """The answer as JSON. Raises UserError."""
    if run.recipe.hash() != run.recorded_hash:
        raise UserError(f"{run.folder}/recipe.json was changed: the order of its samples is not known")
    doing("looking for the data")
    locate_data(run, options.data)
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
        if (row := options.sample or 0) >= order.sampler.count:
            raise UserError(f"--sample {row}: the last row for training is {order.sampler.count - 1}")
        rows = _rows(order, run, [row]) if options.text is None else [*_find(order, run, options.text)]
        seen = order.sightings(run, [one["row"] for one in rows if "split" not in one])
        for one in rows:
            one["seen"] = [] if "split" in one else seen[one["row"]]
        return {**answer, "rows": rows}
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


def _find(order: RunOrder, run: RunFolder, text: str) -> Iterator[dict[str, Any]]:
    """The rows that hold a text, of training and of held-out splits, with its name."""
    for split in run.facts.samples:
        source = order.source if split == "train" else order.data.open(Path(run.facts.folder), split)
        whose = {} if split == "train" else {"split": split}
        for start in range(0, len(source), ROWS_AT_A_TIME):
            rows = np.arange(start, min(start + ROWS_AT_A_TIME, len(source)))
            for row, held in enumerate(order.data.describe_rows(run.facts, source.fetch(rows)), start):
                if _letters(text) in _letters(held):
                    yield {"row": row, "text": shortened(held), **whose}


def _letters(text: str) -> str:
    """What every tokenizer keeps of it: no case, blanks, signs and accents."""
    return re.sub(r"[\W_]", "", unicodedata.normalize("NFKD", text.casefold()))


def shortened(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= PREVIEW_CHARACTERS else f"{line[:PREVIEW_CHARACTERS]}…"
