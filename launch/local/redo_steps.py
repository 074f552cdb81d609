"""Redoes parts of a run for verify: in this process, or in worker processes under accelerate."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE
from isobatch.core.facts import Facts
from isobatch.core.package import TRAIN_SCRIPT
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.terminal.status import doing
from isobatch.engine.verification.windows import Job, Redone
from isobatch.launch.local.accelerate_launcher import launch_workers
from isobatch.launch.local.run_setup import open_run, plan_for_this_machine

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

Jobs = list[tuple[Plan, Job]]
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
    made = plan_for_this_machine(run.recipe, run.facts, options)
    return dataclasses.replace(made, reduction="explicit")


def redo(run: RunFolder, jobs: Jobs, owns_process: bool = True) -> list[Redone]:
    """Do each job under its plan; all plans are of one world size.

    Raises RuntimeError where worker processes end without a result.
    """
    if jobs[0][0].processes == 1:
        return _redo_here(run, jobs)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asked = [{"plan": plan.to_dict(), "job": dataclasses.asdict(job)} for plan, job in jobs]
        task = {"run": str(run.folder.resolve()), "facts": run.facts.to_dict(), "jobs": asked}
        atomic_files.write_json(folder / "task.json", task)
        code = launch_workers(
            jobs[0][0], TRAIN_SCRIPT, ["--redo", str(folder)], folder, forward_signals=owns_process
        ).code
        if code != DONE or not (folder / "report.json").exists():
            sys.stderr.write((folder / "launcher.log").read_text(errors="replace")[-4000:])
            raise RuntimeError(f"the {jobs[0][0].processes} processes that redid the steps ended with {code}")
        return [Redone(**found) for found in atomic_files.read_json(folder / "report.json")["redone"]]


def _redo_here(run: RunFolder, jobs: Jobs, folder: Path | None = None) -> list[Redone]:
    """Do the jobs in this process group; with `folder` rank 0 writes what they found to report.json there."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from accelerate.state import AcceleratorState

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
    AcceleratorState._reset_state()  # noqa: SLF001  the next jobs may be of another precision
    return found


def redo_task_file(folder: Path) -> int:
    """In a worker process: do what task.json in `folder` asks for; writes report.json there."""
    task = atomic_files.read_json(folder / "task.json")
    jobs = [(Plan.from_dict(asked["plan"]), Job.from_dict(asked["job"])) for asked in task["jobs"]]
    run = open_run(task["run"])
    run.facts = Facts.from_dict(task["facts"])
    _redo_here(run, jobs, folder)
    return DONE
