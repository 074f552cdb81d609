"""Which samples every step of a run takes: a function of its recipe and its prepared data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.data.base import Data, Source
from isobatch.engine.loading.sampler import Sampler, make_sampler
from isobatch.engine.optimization.left_out import left_out_steps
from isobatch.engine.optimization.schedule import PhaseSchedule, schedules_of
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.metrics_log import SEAL
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.train.figures import is_step
from isobatch.models.base import Task


@dataclass(frozen=True, slots=True, eq=False)
class RunOrder:
    """The samples, the batches and the phases that a recipe makes of prepared data."""

    task: Task
    data: Data
    source: Source
    """The training samples."""
    sampler: Sampler
    schedules: list[PhaseSchedule]

    @classmethod
    def of(cls, recipe: Recipe, facts: Facts) -> RunOrder:
        """`facts`: of data that lies here."""
        task, data = workload_of(recipe).make(recipe)
        source = data.open(Path(facts.folder), "train")
        sampler = make_sampler(recipe, source, task.cohort)
        return cls(task, data, source, sampler, schedules_of(task, facts, sampler.steps_per_epoch))

    def place(self, phase: str, step: int) -> dict[str, Any]:
        """A step, from 1 within its phase, with its epoch."""
        return {"phase": phase, "step": step, "epoch": (step - 1) // self.sampler.steps_per_epoch + 1}

    def sightings(self, run: RunFolder, rows: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
        """Row -> the steps that the log of a run counts and that hold it, as often as each does."""
        found: dict[int, list[dict[str, Any]]] = {row: [] for row in rows}
        left_out = left_out_steps(run)
        for phase, steps in self.counted_steps(run).items():
            unseen = left_out.get(phase, ())
            for step, batch in enumerate(itertools.islice(self.sampler.batches(), steps), 1):
                for row in batch[np.isin(batch, rows)].tolist() if step not in unseen else ():
                    found[row].append(self.place(phase, step))
        return found

    def counted_steps(self, run: RunFolder) -> dict[str, int]:
        """Phase -> the last step of it in the log; 0 for one that has not begun. Raises UserError where
        the log has other phases.
        """
        found = dict.fromkeys((schedule.name for schedule in self.schedules), 0)
        for row in rows_in(run.metrics):
            if is_step(row) or (SEAL in row and "split" not in row):
                if (phase := row["phase"]) not in found:  # as with --pruned MODEL, which spares one
                    said = f"its log has phase {phase}, its task here {', '.join(found)}"
                    raise UserError(f"{run.folder}: {said}: bring the model that it began with here")
                found[phase] = row["step"]
        return found


def require_step(schedules: Sequence[PhaseSchedule], phase: str, step: int) -> None:
    """Raises UserError where a run has no such step, from 1."""
    steps = {schedule.name: schedule.steps for schedule in schedules}
    if step > steps.get(phase, 0):
        has = ", ".join(f"{name} with {count:,} steps" for name, count in steps.items())
        raise UserError(f"--phase {phase} --step {step}: this run has {has}")
