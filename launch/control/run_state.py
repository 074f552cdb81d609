"""What a run does now, by its files, its locks and its Slurm job, and how far it is."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core.errors import UserError
from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.planning.cost_model import steps_per_epoch
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.slurm_queue import JobStatus, SlurmSilentError, job_statuses, last_job_of
from isobatch.launch.local.arguments import read_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

RunState = Literal["queued", "running", "stopped", "failed", "done", "unfinished"]
"""queued: its job waits, for the first leg or a later one. running: a job or a process here trains it.
stopped: it saved and ended. unfinished: nobody trains it, and how it ended nobody wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """How far a run is, by its newest step that is logged or saved."""

    step: int | None
    """Optimizer steps of all phases so far, of which not every one is logged; None before the first logged
    or saved one."""
    total: int | None
    """Optimizer steps of all phases; None where only code that came with the run could say."""
    seconds_left: float | None
    """At the pace of the newest steps, without evaluations and saves; None before the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run as it stood when it was looked at."""

    run: RunFolder
    state: str
    """RunState, or `unknown` where Slurm does not answer."""
    progress: RunProgress
    job: str
    """Its last Slurm job; empty where there was none."""
    status: JobStatus | None
    """Of that job; None where Slurm does not know it."""

    @property
    def is_over(self) -> bool:
        """Whether nobody trains it, or will without being asked."""
        return self.state not in ("queued", "running", "unknown")

    @property
    def in_job(self) -> bool:
        return self.status is not None and not self.status.is_over


def look(folder: Path) -> RunView:
    """Look at a run and its job anew. Raises UserError where the run's records are damaged."""
    run = RunFolder(folder)
    progress, job, status = run_progress(run), last_job_of(run), None
    try:
        if job and run.status() != "done":
            status = job_statuses([job]).get(job)
        state: str = run_state(run, progress, status)
    except SlurmSilentError:
        state = "unknown"
    return RunView(run=run, state=state, progress=progress, job=job, status=status)


def one_run(words: Sequence[str], kind: type, command: str) -> tuple[RunFolder, Any]:
    """The run and the options in a command's words. Raises UserError."""
    positional, options = read_command(words, kind, command)
    if len(positional) != 1:
        raise UserError(
            f"{command}: give the folder of one run (`runs` lists them), as in: {command} runs/mine"
        )
    return RunFolder.open(positional[0]), options


def run_state(run: RunFolder, progress: RunProgress, job: JobStatus | None) -> RunState:
    """One word for the same situation, whichever leg it is in. `job`: of the run's last job, if known."""
    summary = run.summary() or {}
    said = summary.get("status")
    if said == "done":
        return "done"
    if job is not None and not job.is_over:
        return "queued" if job.waits else "running"
    if run.is_training():
        return "running"
    if said == "failed":
        return "failed"
    # A later leg may have trained on, and left no summary.
    trained_on = (progress.step or 0) > (summary.get("steps") or 0)
    return "stopped" if said == "stopped" and not trained_on else "unfinished"


def run_progress(run: RunFolder) -> RunProgress:
    """Read the end of metrics.jsonl, and the names of checkpoints, which may be later than it:
    not every step is logged. Raises UserError where the run's records are damaged.
    """
    rows = [row for row in newest_rows(run.metrics) if isinstance(row.get("step"), int)]
    lengths = _phase_lengths(run)
    saved = (file.parent.name.rpartition("-") for file in run.checkpoints.glob("[!.]*-*/index.json"))
    placed = [{"phase": p, "step": int(step)} for p, _, step in saved if step.isdecimal()] + rows[-1:]
    total = sum(lengths.values()) or round(sum(run.recipe.steps or [])) or None
    summary = run.summary() or {}
    step = summary.get("steps") if summary.get("status") == "done" or not placed else None
    step = max(_steps_until(row, lengths) for row in placed) if placed and step is None else step
    paces = [row["step_seconds"] for row in rows if isinstance(row.get("step_seconds"), float | int)]
    if step is None or total is None or not paces:
        return RunProgress(step=step, total=total, seconds_left=None)
    left = max(0, total - step) * sum(paces) / len(paces)
    return RunProgress(step=step, total=total, seconds_left=round(left, 1))


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
