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
from isobatch.engine.runs.step_rows import step_rows
from isobatch.engine.verification.audit import DERIVED_DECISIONS
from isobatch.engine.verification.compare_export import compare_folders, is_own_card
from isobatch.engine.verification.tolerance import HELD_OUT, tolerances
from isobatch.engine.verification.windows import INITIAL, Redone, redone_step
from isobatch.launch.local.launch_run import launch_run

if TYPE_CHECKING:
    from isobatch.core.plan import Plan
    from isobatch.engine.verification.proof import Proof

NEVER = Interval(10**6, "minutes")


def replay_in_full(run: RunFolder, plan: Plan, proof: Proof, owns_process: bool) -> bool:
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
            proof.notes.append(f"the run is {run.status()}, not finished")
            return True
        allowed, _ = tolerances(run, plan, proof.audit.steps)
        proof.problems += _wrong_evaluations(run, again, allowed)
        task, _ = workload_of(run.recipe).make(run.recipe)
        same_files = compare_folders(run.final, again.final)["identical"]
        identical = bool(same_files and is_own_card(run, task, again.final, run.facts))
        if identical:
            proof.covered.append("final weights reproduced bit for bit")
            proof.add_metrics(redone, run.facts.samples, HELD_OUT[run.plan.invariance])
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
    redone.changes = [
        r for r in rows_in(again.decisions) if "phase" in r and r["decision"] not in DERIVED_DECISIONS
    ]
    redone.metrics = {
        r["split"]: {k: v for k, v in r.items() if k not in ("phase", "step", "split")}
        for r in rows_in(again.metrics)
        if "split" in r
    }
    return redone


def _wrong_evaluations(run: RunFolder, again: RunFolder, allowed: float) -> list[str]:
    pairs: Any = itertools.zip_longest(*(_evaluations(one) for one in (run, again)))
    for old, new in pairs:
        if old is None or new is None or old[0] != new[0]:
            return ["trained again, the run evaluates at other steps"]
        if abs(old[1] - new[1]) > allowed * max(1.0, abs(old[1])):
            return [f"the evaluation after step {old[0][1]} gives {new[1]}, and {old[1]} is logged"]
    return []


def _evaluations(run: RunFolder) -> list[tuple[tuple[str, int], float]]:
    """((phase, step), loss) of every evaluation."""
    rows = (row for row in rows_in(run.metrics) if "split" in row and "loss" in row)
    return [((row["phase"], row["step"]), row["loss"]) for row in rows]
