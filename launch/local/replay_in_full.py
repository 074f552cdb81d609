"""Trains a run again from its beginning and compares everything: the level `full` of verify."""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import DONE, TrainingError
from isobatch.core.flags import Interval
from isobatch.engine.optimization.left_out import copy_asked
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.train.figures import step_rows
from isobatch.engine.verification.audit import DERIVED_DECISIONS
from isobatch.engine.verification.compare_export import compare_folders, is_own_card
from isobatch.engine.verification.tolerance import HELD_OUT, tolerances
from isobatch.engine.verification.windows import INITIAL, Redone, redone_step
from isobatch.launch.local.launch_run import launch_run

if TYPE_CHECKING:
    from isobatch.core.plan import Plan
    from isobatch.engine.verification.log_audit import LogRecord
    from isobatch.engine.verification.proof import Proof

PLACE = ("phase", "step", "split")
"""Fields of an evaluation's row that are no metrics."""
NEVER = Interval(10**6, "minutes")


def replay_in_full(run: RunFolder, plan: Plan, proof: Proof, log: LogRecord, owns_process: bool) -> bool:
    """Train the recipe again under a plan and judge every row, decision and held-out metric.

    Returns whether final/ came out the same bit for bit; else nothing is said about it.
    """
    with tempfile.TemporaryDirectory() as temporary:
        options = RunOptions(out=temporary, name="again", save_every=NEVER, quiet=True)
        again = RunFolder.create(Path(temporary) / "again", run.recipe, run.facts, options)
        again.write_plan(plan)
        copy_asked(run, again)
        with contextlib.redirect_stdout(io.StringIO()):
            ended = launch_run(again, options, owns_process)
        if ended.code != DONE:
            raise TrainingError(f"trained again, the run ended: {ended.reason}")
        redone = _redone(run, again)
        proof.add(redone, partial(tolerances, run, plan))
        if run.status() != "done":
            return True
        allowed, _ = tolerances(run, plan, log.steps)
        proof.problems += _wrong_evaluations(run, again, allowed)
        task, _ = workload_of(run.recipe).make(run.recipe)
        same_files = compare_folders(run.final, again.final)["identical"]
        identical = bool(same_files and is_own_card(run, task, again.final, run.facts))
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
    decided = [row for row in rows_in(again.decisions) if "phase" in row]
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
    return [row for row in rows_in(run.metrics) if "split" in row]
