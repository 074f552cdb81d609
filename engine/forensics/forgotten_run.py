"""The beginning of a run that never sees certain rows, taken from a run that saw them later.

A recipe's `forgets` leaves the rows out of every batch. Before the first batch that holds one, a run of that
recipe and a run of the recipe without it are the same; so the first begins with the second's checkpoints and
logs, which name the new recipe and are sealed anew.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import rows_in
from isobatch.core.recipe import Recipe
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.forensics.run_order import CountedSource, Sighting
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.left_out import copy_asked, decided, steps_of
from isobatch.engine.runs.metrics_log import SEAL, MetricsLog

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.forensics.run_order import RunOrder
    from isobatch.engine.runs.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class Forgetting:
    """What it takes that a run forgets rows."""

    recipe: Recipe
    """The run's, with these rows and those that it forgot before."""
    first: Sighting
    """The first step that saw one of the rows."""
    kept: list[Path]
    """The checkpoints before that step, oldest first; without one, training begins anew."""
    undone: list[dict[str, Any]]
    """Decisions by the rule on spikes that fell behind: it decides anew, without the rows."""
    retrained: int
    """Steps that the run made, and that are made again."""
    done: int
    """Steps that the run made."""

    @property
    def saved(self) -> Path | None:
        """The checkpoint from which training goes on."""
        return self.kept[-1] if self.kept else None


def plan_forgetting(run: RunFolder, order: RunOrder, rows: Sequence[int]) -> Forgetting | None:
    """None where no step of the run holds one of the rows, not even of those to come.

    Raises UserError where a row does not exist, or a batch would lose all its rows.
    """
    recipe = dataclasses.replace(run.recipe, forgets=sorted({*(run.recipe.forgets or ()), *rows}))
    sampler = make_sampler(recipe, order.source or CountedSource(order.facts, order.data), order.cohort)
    order = dataclasses.replace(order, left_out=steps_of(decided(run, by_hand=True)))
    sightings = [sighting for row in sorted(set(rows)) for sighting in order.sightings(row)]
    if not sightings:
        return None
    for step in sorted({sighting.step for sighting in sightings}):
        sampler.batch(step - 1)  # which refuses an empty one
    names = [schedule.name for schedule in order.schedules]
    first = min(sightings, key=lambda s: (names.index(s.phase), s.step))

    def place(name: str) -> tuple[int, int]:
        phase, step = checkpoint.phase_and_step(name)
        return names.index(phase), step

    border = names.index(first.phase), first.step
    by_rule = decided(run, by_hand=False)
    undone = [row for row in by_rule if (names.index(row["of"]), row["last"]) >= border]
    border = min([border, *((names.index(row["of"]), row["first"]) for row in undone)])
    saved = checkpoint.list_checkpoints(run.checkpoints, names)
    kept = [folder for folder in saved if place(folder.name) < border]
    done, before = sum(order.counted.values()), 0
    if kept:
        phase, step = place(kept[-1].name)
        before = sum(order.counted[name] for name in names[:phase]) + step
    return Forgetting(recipe, first, kept, undone, done - before, done)


def begin_forgotten_run(run: RunFolder, fresh: RunFolder, plan: Forgetting) -> None:
    """Copy what a run did up to `plan.saved` into a new run's folder, under the new recipe."""
    if plan.saved is None:
        copy_asked(run, fresh)
        return
    logs = SavedCheckpoint(plan.saved).state["logs"]
    log = MetricsLog(fresh, writes=True)
    log.begin([plan.first.phase])
    for folder in plan.kept:
        shutil.copytree(folder, fresh.checkpoints / folder.name)
    if run.samples.exists():
        _copy_beginning(run.samples, fresh.samples, logs["ledger"])
    for row in rows_in(run.decisions) if run.decisions.exists() else ():
        if row not in plan.undone:
            log.log_decision(row)  # `resume` cuts what came later
    earlier = fresh.folder / "earlier.jsonl"
    _copy_beginning(run.metrics, earlier, logs["metrics"])
    for row in rows_in(earlier):
        _seal_anew(row, fresh, log)
    log.close()
    earlier.unlink()


def _seal_anew(row: dict[str, Any], fresh: RunFolder, log: MetricsLog) -> None:
    """Log a row of the other run. The checkpoints that were kept name the new recipe, and the new seals."""
    if "checkpoint" in row:
        folder = fresh.checkpoints / row["checkpoint"]
        if folder.is_dir():
            log.log_metrics({**row, "digest": checkpoint.recorded_digest(folder)})
    elif SEAL in row:
        sizes = log.seal(row["phase"], row["step"])
        folder = fresh.checkpoints / checkpoint.checkpoint_name(row["phase"], row["step"])
        if folder.is_dir():
            state = SavedCheckpoint(folder).state
            logs = {**sizes, "ledger": state["logs"]["ledger"]}
            checkpoint.replace_state(folder, {**state, "logs": logs, "recipe_hash": fresh.recipe.hash()})
    else:
        log.log_metrics(row)


def _copy_beginning(source: Path, target: Path, size: int) -> None:
    with source.open("rb") as read, target.open("wb") as write:
        while size and (block := read.read(min(size, 1 << 20))):
            write.write(block)
            size -= len(block)
