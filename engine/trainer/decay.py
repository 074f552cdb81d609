"""Ends the stable part of a run's schedule at a checkpoint: a run beside it, whose recipe says so.

Up to that checkpoint a run of the new recipe, with fewer steps, takes the same steps: it has the rows, sealed
anew, and the checkpoint. What follows is the recipe's last part.
"""

from __future__ import annotations

import dataclasses
import shutil

from isobatch.core import atomic_files
from isobatch.core.errors import UserError, explain_errors, refuse
from isobatch.core.flags import Interval
from isobatch.core.recipe import Recipe
from isobatch.engine.checkpointing import checkpoint
from isobatch.engine.checkpointing.digests import bytes_digest
from isobatch.engine.optimization.schedule import decay_steps
from isobatch.engine.runs.metrics_log import SEAL, MetricsLog
from isobatch.engine.runs.run_folder import FolderTakenError, RunFolder
from isobatch.models.capabilities import ChangesModel


def decayed(run: RunFolder, name: str | None) -> RunFolder:
    """The run that decays from the newest checkpoint of the stable part of `run`, made where it is not there.

    Raises UserError where there is no such part, or no checkpoint in it, or where somebody makes it just now.
    """
    recipe, phase, step = _ended_at_newest_stable(run)
    folder = run.folder.with_name(name or f"{run.folder.name}-decay-{step}")
    options = dataclasses.replace(run.options(), name=folder.name)
    try:
        fresh = RunFolder.create(folder, recipe, run.facts, options)
    except FolderTakenError:
        fresh = RunFolder.open(folder)
        if fresh.recipe != recipe:
            raise UserError(f"{folder} is there, and is another run: give this one a --name") from None
    with fresh.lock("launch"):
        # Without these it is new, or was killed before it had its checkpoint.
        if not (fresh.summary() or checkpoint.list_checkpoints(fresh.checkpoints, [phase])):
            fresh.write_plan(run.plan)
            _copy_until(run, fresh, checkpoint.checkpoint_name(phase, step))
    return fresh


def _ended_at_newest_stable(run: RunFolder) -> tuple[Recipe, str, int]:
    """(recipe that decays from the newest checkpoint of the stable part, phase, that checkpoint's step).

    What were shares of the phase are the steps they were.
    """
    from isobatch.engine.verification.run_order import RunOrder

    recipe, order, said = run.recipe, RunOrder.of(run.recipe, run.facts), f"--decay: {run.folder}"
    wrong = {
        f"{said} has --schedule {recipe.schedule}, without a stable part: train with wsd": (
            recipe.schedule not in ("wsd", "constant")
        ),
        f"{said} has --patience, which may end it before it decays: train without": recipe.patience,
        f"{said} has several phases, or changes its model by the step: it has no stable part": (
            len(order.schedules) > 1 or isinstance(order.task, ChangesModel)
        ),
    }
    refuse(wrong)
    schedule = order.schedules[0]
    steps, epoch = schedule.steps, schedule.steps_per_epoch
    begin, last = recipe.warmup.steps(epoch, steps), decay_steps(recipe, steps, epoch)
    end = steps if recipe.schedule == "constant" else steps - last
    there = checkpoint.list_checkpoints(run.checkpoints, [schedule.name])
    saved = [checkpoint.phase_and_step(path.name)[1] for path in there]
    if not (stable := [step for step in saved if begin <= step <= end]):
        raise UserError(
            f"{said} keeps no checkpoint of its steps {begin} to {end}, at the peak rate: it has"
            f" {', '.join(map(str, saved)) or 'none'}"
        )
    shorter = dataclasses.replace(
        recipe,
        schedule="wsd",
        steps=(stable[-1] + last,),
        epochs=None,
        least_steps=0,
        decay=Interval(last, "steps"),
        warmup=Interval(begin, "steps"),
        eval_every=Interval(schedule.eval_every, "steps"),
    )
    return shorter, schedule.name, stable[-1]


def _copy_until(run: RunFolder, fresh: RunFolder, name: str) -> None:
    """Copy a checkpoint and the rows before it, as a run of the new recipe would have written them."""
    target = fresh.checkpoints / f".{name}.copy"
    shutil.rmtree(target, ignore_errors=True)
    # It may be gone: a run that trains on keeps newer ones.
    with explain_errors(f"--decay: {run.checkpoints / name} cannot be copied", OSError):
        shutil.copytree(run.checkpoints / name, target)
    state = atomic_files.read_json(target / "state.json")
    log = MetricsLog(fresh, writes=True)
    log.begin([state["progress"]["phase"]])
    kept = run.metrics.read_bytes()[: state["logs"]["metrics"]].splitlines()
    for row in map(atomic_files.parse_json, kept):
        if SEAL not in row and "checkpoint" not in row:
            log.log_metrics(row)
    for source, size in ((run.samples, state["logs"]["ledger"]), (run.answers, None), (run.decisions, None)):
        if source.exists():  # resuming cuts answers and decisions at the checkpoint
            (fresh.folder / source.name).write_bytes(source.read_bytes()[:size])
    phase, step = checkpoint.phase_and_step(name)
    state |= {"logs": log.seal(phase, step), "recipe_hash": fresh.recipe.hash()}
    atomic_files.write_json(target / "state.json", state)
    sums = atomic_files.read_json(target / checkpoint.CHECKSUMS)
    sums["state.json"] = bytes_digest(target / "state.json")
    atomic_files.write_json(target / checkpoint.CHECKSUMS, sums)
    target.rename(fresh.checkpoints / name)
