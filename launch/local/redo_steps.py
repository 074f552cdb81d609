"""Redoes a run for verify: parts of it, in this process or in worker processes under accelerate; or all of it
(the level `full`), trained again from its beginning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, NotHereError, TrainingError, UserError
from isobatch.core.facts import Facts
from isobatch.core.flags import Interval
from isobatch.core.package import TRAIN_SCRIPT
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import doing
from isobatch.engine import consent
from isobatch.engine.checkpointing.weight_files import open_start
from isobatch.engine.optimization.left_out import copy_asked
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.runs.summary import PLACE
from isobatch.engine.train.figures import step_rows
from isobatch.engine.verification.audit import DERIVED_DECISIONS
from isobatch.engine.verification.compare_export import compare_folders, is_own_card
from isobatch.engine.verification.log_audit import LogRecord
from isobatch.engine.verification.proof import Proof
from isobatch.engine.verification.tolerance import HELD_OUT, claimed_rounding, tolerances
from isobatch.engine.verification.windows import INITIAL, Job, Redone, redone_step
from isobatch.launch.local.accelerate_launcher import launch_workers
from isobatch.launch.local.launch_run import launch_run
from isobatch.launch.local.run_setup import open_run, plan_for_this_machine

KEPT_ATTENTION = ("sdpa", "eager")
"""Attention of a run that is had everywhere."""


def plan_to_redo(run: RunFolder, micro_batch: int, **asked: Any) -> Plan:
    """A plan to redo a run's steps here, uncompiled, in micro-batches of at most so many samples.

    `asked`: fields of PlanOptions; by default one process with the run's own precision and attention. Raises
    UserError.
    """
    attention = run.plan.attention if run.plan.attention in KEPT_ATTENTION else "auto"
    own: dict[str, Any] = {"processes": 1, "strategy": "single", "activation_checkpointing": "off"}
    own |= {"precision": run.plan.precision, "attention": attention, **asked}
    options = PlanOptions(micro_batch=min(micro_batch, run.recipe.batch_size), compile="off", **own)
    try:
        if origin := run.here.starts_from:
            open_start(origin, workload_of(run.here).make(run.here)[0], run.facts)
        plan = plan_for_this_machine(run.here, run.facts, options)
    except NotHereError as error:
        way = "where it has moved, --base PLACE of `verify`, `replay` and `receipt check` finds it"
        raise UserError(f"{error}; {way}") from None
    return dataclasses.replace(plan, reduction="explicit")


def redo(run: RunFolder, jobs: list[tuple[Plan, Job]], owns_process: bool = True) -> list[Redone]:
    """Do each job under its plan; all plans are of one world size.

    Raises RuntimeError where worker processes end without a result.
    """
    if jobs[0][0].processes == 1:
        return _redo_here(run, jobs)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asked = [{"plan": plan.to_dict(), "job": dataclasses.asdict(job)} for plan, job in jobs]
        known = {"facts": run.facts.to_dict(), "here": run.here.to_dict()}
        task = {"run": str(run.folder.resolve()), "jobs": asked, **known}
        atomic_files.write_json(folder / "task.json", task)
        words = (str(TRAIN_SCRIPT), "--redo", str(folder))
        code, _ = launch_workers(jobs[0][0], words, folder, forward_signals=owns_process)
        if code != DONE or not (folder / "report.json").exists():
            sys.stderr.write((folder / "launcher.log").read_text(errors="replace")[-4000:])
            raise RuntimeError(f"the {jobs[0][0].processes} processes that redid the steps ended with {code}")
        return [Redone(**found) for found in atomic_files.read_json(folder / "report.json")["redone"]]


def _redo_here(run: RunFolder, jobs: list[tuple[Plan, Job]], folder: Path | None = None) -> list[Redone]:
    """Do the jobs in this process group; with `folder` rank 0 writes what they found to report.json there."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from isobatch.engine.verification.replay import Replay

    world, found = None, []
    for plan, job in jobs:
        doing("redoing steps")
        replay = Replay(run, plan, world=world)
        world = replay.world
        found.append(replay.redo(job))
    assert world is not None
    if folder is not None and world.is_main:
        report = {"redone": [dataclasses.asdict(redone) for redone in found]}
        atomic_files.write_text(folder / "report.json", json.dumps(report))  # with NaN where there is one
    world.close()
    world.exit_process(DONE)
    return found


def redo_task_file(folder: Path) -> int:
    """In a worker process: do what task.json in `folder` asks for; writes report.json there."""
    task = atomic_files.read_json(folder / "task.json")
    jobs = [(Plan.from_dict(asked["plan"]), Job.from_dict(asked["job"])) for asked in task["jobs"]]
    run = open_run(task["run"])
    run.facts, run.here = Facts.from_dict(task["facts"]), Recipe.from_dict(task["here"])
    consent.require(run.here, run.folder)
    _redo_here(run, jobs, folder)
    return DONE


NEVER = Interval(10**6, "minutes")


def replay_in_full(run: RunFolder, plan: Plan, proof: Proof, log: LogRecord, owns_process: bool) -> bool:
    """Train the recipe again under a plan and judge every row, decision and held-out metric.

    Returns whether final/ came out the same bit for bit; else nothing is said about it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        before = bool(log.before)
        options = RunOptions(out=temporary, name="again", before=before, save_every=NEVER, quiet=True)
        again = RunFolder.create(Path(temporary) / "again", run.here, run.facts, options)
        again.write_plan(plan)
        copy_asked(run, again)
        with contextlib.redirect_stdout(io.StringIO()):
            ended = launch_run(again, options, owns_process)
        if ended.code != DONE:
            raise TrainingError(f"trained again, the run ended: {ended.reason}")
        redone = _redone(run, again)
        proof.add(redone, partial(tolerances, run, plan), partial(claimed_rounding, run))
        if run.status() != "done":
            return True
        allowed, _ = tolerances(run, plan, log.steps)
        most = max(allowed, claimed_rounding(run, log.steps)[0])
        said = proof.problems if _wrong_evaluations(run, again, most) else proof.unproven
        said += _wrong_evaluations(run, again, allowed)
        task, _ = workload_of(run.here).make(run.here)
        same_files = compare_folders(run.final, again.final)["identical"]
        identical = bool(same_files and is_own_card(run, task, again.final))
        if identical:
            proof.covered.append("final weights reproduced bit for bit")
            proof.add_metrics(log, redone, run.facts.samples, HELD_OUT[run.plan.invariance])
        return identical


def _redone(run: RunFolder, again: RunFolder) -> Redone:
    """The logged steps of a run beside those of the run that was trained again."""
    redone = Redone()
    fresh = {row.place: row for row in step_rows(again.metrics)}
    last: dict[str, int] = {}
    for row in step_rows(run.metrics):
        last[row.phase] = row.step
        if row.place not in fresh:
            raise TrainingError(f"trained again, the run has no phase {row.phase}, step {row.step}")
        redone.steps.append(redone_step(row, fresh[row.place].figures, INITIAL, sum(last.values())))
    redone.covered = [[phase, 1, step] for phase, step in last.items()]
    decided = [row for row in atomic_files.rows_in(again.decisions) if "phase" in row]
    redone.changes = [row for row in decided if row["decision"] not in DERIVED_DECISIONS]
    redone.metrics = {
        row["split"]: {name: value for name, value in row.items() if name not in PLACE}
        for row in _evaluations(again)
    }
    return redone


def _wrong_evaluations(run: RunFolder, again: RunFolder, allowed: float) -> list[str]:
    nothing: dict[str, Any] = {}
    for row, fresh in itertools.zip_longest(_evaluations(run), _evaluations(again), fillvalue=nothing):
        place = "after {phase} step {step} of {split}".format(**row or fresh)
        if any(row.get(name) != fresh.get(name) for name in PLACE):
            return [f"trained again, the run evaluates otherwise {place}"]
        loss, redone = row.get("loss", 0.0), fresh.get("loss", 0.0)
        if not abs(loss - redone) <= allowed * max(1.0, abs(loss)):
            return [f"the evaluation {place} gives a loss of {redone}, and {loss} is logged"]
    return []


def _evaluations(run: RunFolder) -> list[dict[str, Any]]:
    return [row for row in atomic_files.rows_in(run.metrics) if "split" in row]
