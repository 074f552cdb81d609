"""Ends the stable part of a run's schedule at a checkpoint: a run beside it, whose recipe says so.

Up to that checkpoint a run of the new recipe, with fewer steps, takes the same steps: it has the rows, sealed
anew, and the checkpoint. What follows is the recipe's last part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import UserError
from isobatch.core.flags import Interval
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.loading.sampler import make_sampler
from isobatch.engine.optimization.schedule import PhaseSchedule, decay_steps, phase_schedules, stable_end
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.metrics_log import SEAL, MetricsLog
from isobatch.engine.runs.run_folder import FolderTakenError, RunFolder
from isobatch.models.capabilities import ChangesModel

if TYPE_CHECKING:
    from isobatch.core.recipe import Recipe


def decayed(run: RunFolder, name: str | None) -> RunFolder:
    """The run that decays from the newest checkpoint of the stable part of `run`, made where it is not there.

    Raises UserError where there is no such part, or no checkpoint in it.
    """
    schedule = _schedule(run)
    step, last = _newest_stable(run, schedule)
    recipe = _shortened(run.recipe, schedule, step, last)
    folder = run.folder.with_name(name or f"{run.folder.name}-decay-{step}")
    try:
        fresh = RunFolder.create(
            folder, recipe, run.facts, dataclasses.replace(run.options(), name=folder.name)
        )
    except FolderTakenError:
        fresh = RunFolder.open(folder)
        if fresh.recipe != recipe:
            raise UserError(f"{folder} is there, and is another run: give this one a --name") from None
        if fresh.summary() or checkpoint.list_checkpoints(fresh.checkpoints, [schedule.name]):
            return fresh  # else it was killed before it had its checkpoint
    fresh.write_plan(run.plan)
    _copy_until(run, fresh, checkpoint.checkpoint_name(schedule.name, step))
    return fresh


def _schedule(run: RunFolder) -> PhaseSchedule:
    recipe, said = run.recipe, f"--decay: {run.folder}"
    task, data = workload_of(recipe).make(recipe)
    if recipe.schedule not in ("wsd", "constant"):
        raise UserError(f"{said} has --schedule {recipe.schedule}, without a stable part: train with wsd")
    if recipe.patience:
        raise UserError(f"{said} has --patience, which may end it before it decays: train without")
    sampler = make_sampler(recipe, data.open(Path(run.facts.folder), "train"), task.cohort)
    schedules = phase_schedules(recipe, task.phases(), sampler.steps_per_epoch)
    if len(schedules) > 1 or isinstance(task, ChangesModel):
        raise UserError(f"{said} has several phases, or changes its model by the step: it has no stable part")
    return schedules[0]


def _newest_stable(run: RunFolder, schedule: PhaseSchedule) -> tuple[int, int]:
    """(step of the newest checkpoint in the stable part, steps of the last part)."""
    recipe, steps, epoch = run.recipe, schedule.steps, schedule.steps_per_epoch
    last, end = decay_steps(recipe, steps, epoch), stable_end(recipe, steps, epoch)
    end = steps if recipe.schedule == "constant" else end
    begin = recipe.warmup.steps(epoch, steps) if recipe.warmup.value else 0
    there = checkpoint.list_checkpoints(run.checkpoints, [schedule.name])
    saved = [checkpoint.phase_and_step(path.name)[1] for path in there]
    if not (stable := [step for step in saved if begin <= step <= end]):
        raise UserError(
            f"--decay: {run.folder} keeps no checkpoint of its steps {begin} to {end}, at the peak rate: it"
            f" has {', '.join(map(str, saved)) or 'none'}"
        )
    return max(stable), last


def _shortened(recipe: Recipe, schedule: PhaseSchedule, step: int, last: int) -> Recipe:
    """The recipe of `step` steps and the last part. What were shares of the phase are the steps they were."""
    epoch, warmup = schedule.steps_per_epoch, recipe.warmup
    return dataclasses.replace(
        recipe,
        schedule="wsd",
        steps=(step + last,),
        epochs=None,
        least_steps=0,
        decay=Interval(last, "steps"),
        warmup=Interval(warmup.steps(epoch, schedule.steps) if warmup.value else 0, "steps"),
        eval_every=Interval(schedule.eval_every, "steps"),
    )


def _copy_until(run: RunFolder, fresh: RunFolder, name: str) -> None:
    """Copy a checkpoint and the rows before it, as a run of the new recipe would have written them."""
    target = fresh.checkpoints / f".{name}.copy"
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(run.checkpoints / name, target)
    except OSError as error:  # such as a run that trains on, and keeps newer ones
        raise UserError(f"--decay: {run.checkpoints / name} cannot be copied: {error}") from None
    state = atomic_files.read_json(target / "state.json")
    log = MetricsLog(fresh, writes=True)
    log.begin([state["progress"]["phase"]])
    kept = run.metrics.read_bytes()[: state["logs"]["metrics"]].splitlines()
    for row in map(atomic_files.parse_json, kept):
        if SEAL not in row and "checkpoint" not in row:
            log.log_metrics(row)
    if run.samples.exists():
        fresh.samples.write_bytes(run.samples.read_bytes()[: state["logs"]["ledger"]])
    if run.answers.exists():
        fresh.answers.write_bytes(run.answers.read_bytes())  # resuming cuts it at the checkpoint
    for row in rows_in(run.decisions) if run.decisions.exists() else ():
        log.log_decision(row)
    phase, step = checkpoint.phase_and_step(name)
    state |= {"logs": log.seal(phase, step), "recipe_hash": fresh.recipe.hash()}
    atomic_files.write_json(target / "state.json", state)
    sums = atomic_files.read_json(target / checkpoint.CHECKSUMS)
    sums["state.json"] = hashlib.sha256((target / "state.json").read_bytes()).hexdigest()
    atomic_files.write_json(target / checkpoint.CHECKSUMS, sums)
    target.rename(fresh.checkpoints / name)
