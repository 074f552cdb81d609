"""The order in which a run takes its samples, from its folder alone; prepared data adds the texts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.data.base import Data, Source
from isobatch.engine.loading.sampler import Sampler, make_sampler
from isobatch.engine.optimization.schedule import PhaseSchedule, phase_schedules
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.metrics_log import SEAL
from isobatch.engine.runs.step_rows import is_step
from isobatch.engine.task_files import is_task_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.core.recipe import Recipe
    from isobatch.engine.runs.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Sighting:
    """A step whose global batch holds a sample."""

    phase: str
    step: int
    """From 1, within the phase."""
    epoch: int
    """From 1, within the phase."""


@dataclass(frozen=True, slots=True, eq=False)
class RunOrder:
    """A run's sampler and phases, and how far it got."""

    data: Data
    facts: Facts
    source: Source | None
    """The prepared training samples; None where they are not at hand."""
    sampler: Sampler
    schedules: list[PhaseSchedule]
    counted: dict[str, int]
    """Phase -> its steps that the log counts."""

    def sightings(self, rows: Sequence[int]) -> dict[int, list[Sighting]]:
        """Row -> the steps that the log counts and that hold it; in order, and as often as a step holds it.
        Every batch is computed once.
        """
        found: dict[int, list[Sighting]] = {row: [] for row in rows}
        for schedule in self.schedules:
            for step, batch in enumerate(
                itertools.islice(self.sampler.batches(), self.counted[schedule.name]), 1
            ):
                for row in batch[np.isin(batch, rows)].tolist():
                    found[row].append(Sighting(schedule.name, step, self.epoch_of(step)))
        return found

    def epoch_of(self, step: int) -> int:
        return (step - 1) // self.sampler.steps_per_epoch + 1


def open_order(run: RunFolder, at_hand: bool) -> RunOrder:
    """A run's order. `at_hand`: whether its prepared data is on this machine. Raises UserError."""
    recipe, facts = run.recipe, run.facts
    if recipe.hash() != run.recorded_hash:
        raise UserError(f"{run.folder}/recipe.json was changed: the order of its samples is not known")
    task, data = workload_of(recipe).make(recipe)
    source = data.open(Path(facts.folder), "train") if at_hand else None
    if source is not None and len(source) != facts.samples["train"]:
        raise UserError(
            f"{run.folder}/facts.json says {facts.samples['train']:,} training samples, and the prepared data"
            f" has {len(source):,}: `isobatch verify {run.folder}` says more"
        )
    sampler = make_sampler(recipe, source or CountedSource(facts, data), task.cohort)
    schedules = phase_schedules(recipe, task.phases(), sampler.steps_per_epoch)
    counted = counted_steps(run, schedules)
    return RunOrder(data, facts, source, sampler, schedules, counted)


def counted_steps(run: RunFolder, schedules: Sequence[PhaseSchedule]) -> dict[str, int]:
    """Phase -> the last step of it in the log; 0 for one that has not begun.

    Raises UserError where the log has other phases.
    """
    found = dict.fromkeys((schedule.name for schedule in schedules), 0)
    for row in rows_in(run.metrics):
        if is_step(row) or (SEAL in row and "split" not in row):
            if row["phase"] not in found:  # as with --pruned MODEL, which spares one of a finished classifier
                raise UserError(
                    f"{run.folder}: its log has phase {row['phase']}, its task here {', '.join(found)}:"
                    " bring the model that it began with to this machine"
                )
            found[row["phase"]] = row["step"]
    return found


def needs_data(recipe: Recipe) -> bool:
    """Whether the order depends on more of the data than facts.json says."""
    return recipe.group_by_length or recipe.order == "shards" or is_task_file(recipe.task)


class CountedSource(Source):
    """The number of samples, of every set where there are several, without the samples."""

    def __init__(self, facts: Facts, data: Data) -> None:
        self.count = facts.samples["train"]
        sizes = [one["samples"].get("train", 0) for one in facts.extra.get("sets", ())]
        shares = getattr(data.options, "mix", None) or map(float, sizes)
        self.parts = tuple(zip(sizes, shares, strict=True)) if sizes else ()

    def __len__(self) -> int:
        return self.count

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        raise NotImplementedError("lengths are in the prepared data")

    def fetch(self, indices: np.ndarray, pad_to: int = 0) -> dict[str, np.ndarray]:
        raise NotImplementedError("samples are in the prepared data")
