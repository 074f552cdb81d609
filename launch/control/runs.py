"""`runs`: the runs in a folder, with their state, their progress and their Slurm jobs."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import value_text
from isobatch.core.measures import aligned, format_duration, printable
from isobatch.engine.registry import TASKS, workload_of
from isobatch.engine.runs.run_folder import RunFolder, list_runs
from isobatch.engine.runs.slurm_queue import JobStatus, SlurmSilentError, job_statuses, last_job_of
from isobatch.launch.control.run_state import run_progress, run_state
from isobatch.launch.local.arguments import read_command

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.core.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsOptions:
    """Flags of `runs`."""

    json: bool = False
    """One JSON object on standard output."""
    out: str = "runs"
    """Folder that holds the runs."""


def runs(words: Sequence[str]) -> int:
    """Usage: runs [FOLDER] [--json]: what each run does or came to, how far it is, and its Slurm job."""
    positional, options = read_command(words, RunsOptions, "runs")
    folder = Path(positional[0] if positional else options.out).expanduser()
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    found = list(list_runs(folder))
    jobs = [_job_or_none(run) for run in found]
    statuses: dict[str, JobStatus] | None = None
    try:
        statuses = job_statuses([job for job in jobs if job])
    except SlurmSilentError as error:
        print(f"isobatch: {error}: whether jobs wait or run is not known", file=sys.stderr)
    rows = [_row_or_unreadable(run, job, statuses) for run, job in zip(found, jobs, strict=True)]
    if options.json:
        print(atomic_files.json_text({"runs": rows}))
        return 0
    for line in table(rows):
        print(printable(line))
    if not rows:
        print(f"no runs in {folder}")
    return 0


HEAD = ("run", "made", "task", "state", "steps", "result", "what differs")


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as text, with their heads; what belongs to one run alone stands behind its line."""
    differs = differences([row["recipe"] for row in rows])
    lines = aligned([HEAD, *((*_cells(row), text) for row, text in zip(rows, differs, strict=True))])
    behind = ["", *map(_remark, rows)] if rows else []
    return [line + remark for line, remark in zip(lines, behind, strict=False)]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    steps = f"{row['step'] or 0}/{row['steps_total'] or '?'}"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["made"])) if row["made"] else ""
    name, value = row["metric"], row["metrics"].get(row["metric"])
    result = f"{row['split'] or ''} {name} {value:.4g}".lstrip() if isinstance(value, float | int) else ""
    return row["folder"], made, row["task"] or "", row["state"], steps, result


def _remark(row: dict[str, Any]) -> str:
    parts = [] if row["seconds_left"] is None else [f"ETA {format_duration(row['seconds_left'])}"]
    if row["job_state"] is None:
        parts.append(f"job {row['job']} (Slurm does not answer)")
    elif row["job"]:
        status = JobStatus(row["job_state"], row["job_reason"], (row["leg"] or 1) - 1)
        parts.append(f"job {row['job']} {status}".rstrip())
    parts += [row["reason"]] if row["state"] == "failed" and row["reason"] else []
    return "".join(f"  {part}" for part in parts)


MOST_DIFFERENCES = 5


def differences(recipes: Sequence[dict[str, Any]]) -> list[str]:
    """Of each recipe the values in which the recipes of its task differ, the preset and the first few."""
    found = []
    for recipe in recipes:
        alike = [other for other in recipes if other.get("task") == recipe.get("task")]
        given = [name for name, value in recipe.items() if value is not None]
        names = [n for n in given if any(other.get(n) != recipe[n] for other in alike)]
        names.sort(key=lambda name: name != "preset")
        shown = [f"{name.replace('_', '-')} {value_text(recipe[name])}" for name in names[:MOST_DIFFERENCES]]
        found.append(", ".join(shown) + (" ..." if len(names) > MOST_DIFFERENCES else ""))
    return found


def _reason(state: str, status: JobStatus | None, summary: dict[str, Any]) -> str:
    """Why a run is in this state: Slurm's word where a job waits or was ended, else the run's own."""
    if state in ("queued", "unfinished"):
        return status.reason if status else ""
    return str(summary.get("reason", "")) if state in ("failed", "stopped") else ""


def _job_or_none(run: RunFolder) -> str:
    try:
        return last_job_of(run)
    except UserError:
        return ""


def _row_or_unreadable(run: RunFolder, job: str, statuses: dict[str, JobStatus] | None) -> dict[str, Any]:
    """A run's row; one with state "unreadable" where its files are damaged, so that others are shown."""
    try:
        return _row(RunFolder.open(run.folder), job, statuses)
    except UserError as error:
        print(printable(f"isobatch: {error}"), file=sys.stderr)
        unknown = ("task", "steps", "step", "steps_total", "seconds_left", "made", "split", "leg")
        unreadable = {"status": "unreadable", "state": "unreadable", "reason": str(error)}
        empty = {"recipe": {}, "metric": "loss", "metrics": {}, "job": "", "job_state": "", "job_reason": ""}
        return {"folder": str(run.folder), **dict.fromkeys(unknown), **unreadable, **empty}


def _row(run: RunFolder, job: str, statuses: dict[str, JobStatus] | None) -> dict[str, Any]:
    summary = run.summary() or {}
    metrics = summary.get("metrics")
    status = (statuses or {}).get(job)
    found = run_progress(run)
    silent = job and statuses is None
    state = "unknown" if silent and run.status() != "done" else run_state(run, found, status)
    return {
        "folder": str(run.folder),
        "task": run.recipe.task,
        "status": run.status(),
        "state": state,
        "reason": _reason(state, status, summary),
        "steps": summary.get("steps"),
        "step": found.step,
        "steps_total": found.total,
        "seconds_left": found.seconds_left if state == "running" else None,
        "made": (run.folder / "recipe.json").stat().st_mtime,
        "recipe": run.recipe.to_compare(),
        "metric": main_metric(run.recipe, summary),
        "split": summary.get("split"),
        "metrics": metrics if isinstance(metrics, dict) else {},
        "job": job,
        "job_state": None if silent else status.state if status else "",
        "job_reason": status.reason if status else "",
        "leg": status.restarts + 1 if status else None,
    }


def main_metric(recipe: Recipe, summary: Mapping[str, Any]) -> str:
    """The metric that a task is judged by. The code of a user's own is not run: its summary says it."""
    if recipe.task in TASKS:
        with contextlib.suppress(UserError):  # code that came with the run, or values of another version
            return workload_of(recipe).make(recipe)[0].compared_by[0]
    return str(summary.get("monitor", "loss"))
