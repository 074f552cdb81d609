"""What a run does now, by its files and by the cluster that trains it, and how far it is."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.planning.cost_model import steps_per_epoch
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.cluster import JobState, job_states

if TYPE_CHECKING:
    from pathlib import Path

NO_JOB = JobState(stage="over", cluster="local")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run as it stood when it was looked at."""

    run: RunFolder
    state: str
    """queued: its job waits, for the first leg or a later one. running: a job or a process here trains it.
    stopped: it saved and ended. unfinished: nobody trains it, and how it ended nobody wrote. done, failed;
    unknown: its cluster does not answer.
    """
    step: int | None
    """Optimizer steps of all phases so far, of which not every one is logged; None before the first logged
    or saved one."""
    total: int | None
    """Optimizer steps of all phases; None where only code that came with the run could say."""
    seconds_left: float | None
    """At the pace of the newest steps, without evaluations and saves; None where it does not train."""
    job: JobState
    """What trains it, or did last."""

    @property
    def is_over(self) -> bool:
        """Whether nobody trains it, or will without being asked."""
        return self.state not in ("queued", "running", "unknown")


def look(folder: Path) -> RunView:
    """Look at a run and its job anew. Raises UserError where the run's records are damaged."""
    run = RunFolder(folder)
    return view(run, job_states([run]).get(folder))


def view(run: RunFolder, job: JobState | None) -> RunView:
    """A run with what is known of its job. How far it is: by the end of metrics.jsonl, and the names of
    checkpoints, which may be later than it. Raises UserError where the run's records are damaged.
    """
    rows = [row for row in newest_rows(run.metrics) if isinstance(row.get("step"), int)]
    lengths, summary = _phase_lengths(run), run.summary() or {}
    saved = (file.parent.name.rpartition("-") for file in run.checkpoints.glob("[!.]*-*/index.json"))
    placed = [{"phase": p, "step": int(step)} for p, _, step in saved if step.isdecimal()] + rows[-1:]
    step = max((_steps_until(row, lengths) for row in placed), default=summary.get("steps"))
    state, said = "unfinished", summary.get("status")
    if said == "done":
        state, step = "done", summary.get("steps")
    elif job is not None and job.stage != "over":
        state = job.stage
    # A later leg may have trained on, and left no summary.
    elif said == "failed" or (said == "stopped" and (step or 0) <= (summary.get("steps") or 0)):
        state = said
    total = sum(lengths.values()) or round(sum(run.recipe.steps or [])) or None
    paces = [row["step_seconds"] for row in rows if isinstance(row.get("step_seconds"), float | int)]
    left = None
    if state == "running" and step is not None and total is not None and paces:
        left = round(max(0, total - step) * sum(paces) / len(paces), 1)
    return RunView(run=run, state=state, step=step, total=total, seconds_left=left, job=job or NO_JOB)


def _steps_until(row: dict[str, Any], lengths: dict[str, int]) -> int:
    """Optimizer steps up to a logged row; phases before its own count in full."""
    names = list(lengths)
    before = names[: names.index(row["phase"])] if row.get("phase") in lengths else []
    return int(row["step"]) + sum(lengths[name] for name in before)


def _phase_lengths(run: RunFolder) -> dict[str, int]:
    """Phase -> its optimizer steps; empty where that takes code that came with the run."""
    recipe = run.recipe
    with contextlib.suppress(UserError):
        task, _ = workload_of(recipe).make(recipe)
        schedules = phase_schedules(recipe, task.phases(), steps_per_epoch(recipe, run.facts))
        return {schedule.name: schedule.steps for schedule in schedules}
    return {}
