"""`runs`: the runs in a folder, with their state, their progress and their Slurm jobs."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.measures import format_duration, printable
from isobatch.engine.registry import TASKS, workload, workload_of
from isobatch.engine.runs.run_folder import RunFolder, list_runs
from isobatch.engine.runs.slurm_queue import JobStatus, SlurmSilentError, job_statuses, last_job_of
from isobatch.launch.control.run_state import run_progress, run_state
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.words.config_files import value_text

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
    positional, flags = split_words(words)
    options = command_options(flags, RunsOptions, "runs")
    folder = Path(positional[0] if positional else options.out).expanduser()
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    found = list(list_runs(folder))
    jobs = [_job_or_none(run) for run in found]
    statuses = _statuses([job for job in jobs if job])
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
    cells = [HEAD] + [(*_cells(row), different) for row, different in zip(rows, differs, strict=True)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells]
    return (
        [line.rstrip() + _remark(row) for line, row in zip(lines, [None, *rows], strict=True)] if rows else []
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    steps = f"{row['step'] or 0}/{row['steps_total'] or '?'}"
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["made"])) if row["made"] else ""
    name, value = row["metric"], row["metrics"].get(row["metric"])
    result = f"{row['split'] or ''} {name} {value:.4g}".lstrip() if isinstance(value, float | int) else ""
    return row["folder"], made, row["task"] or "", row["state"], steps, result


def _remark(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return (
        ("" if row["seconds_left"] is None else f"  ETA {format_duration(row['seconds_left'])}")
        + _job_text(row)
        + (f"  {row['reason']}" if row["state"] == "failed" and row["reason"] else "")
    )


MOST_DIFFERENCES = 5


def differences(recipes: Sequence[dict[str, Any]]) -> list[str]:
    """Of each recipe the values in which the recipes of its task differ, the first few in words.

    Where they differ in their preset, it stands for what it sets: its values, and in runs without it the
    usual ones, come last.
    """
    found = []
    for recipe in recipes:
        alike = [other for other in recipes if other.get("task") == recipe.get("task")]
        given = [name for name, value in recipe.items() if value is not None]
        names = [n for n in given if any(other.get(n) != recipe[n] for other in alike)]
        siblings = [other for other in alike if other.get("preset") == recipe.get("preset")]
        names.sort(key=partial(_rank_of_difference, recipe, siblings, _presets_of(alike)))
        shown = [f"{name.replace('_', '-')} {value_text(recipe[name])}" for name in names[:MOST_DIFFERENCES]]
        found.append(", ".join(shown) + (" ..." if len(names) > MOST_DIFFERENCES else ""))
    return found


def _presets_of(recipes: Sequence[dict[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    """The presets of these recipes of one task, if they differ in them."""
    task, named = recipes[0].get("task"), {recipe.get("preset") for recipe in recipes}
    if task not in TASKS or len(named) < 2:
        return {}
    return {name: values for name, values in workload(task).task.presets.items() if name in named}


def _rank_of_difference(
    recipe: dict[str, Any],
    siblings: Sequence[dict[str, Any]],
    presets: Mapping[str, Mapping[str, Any]],
    name: str,
) -> int:
    """0 for the preset, 1 for what somebody chose, 2 for what follows from the preset or from its absence.

    `siblings`: the recipes with the same preset.
    """
    if name == "preset":
        return 0
    own = presets.get(recipe.get("preset") or "", {})
    chosen = name in own and own[name] != recipe[name]
    differ = any(other.get(name) != recipe[name] for other in siblings)
    return 2 if any(name in of for of in presets.values()) and not chosen and not differ else 1


def _reason(state: str, status: JobStatus | None, summary: dict[str, Any]) -> str:
    """Why a run is in this state: Slurm's word where a job waits or was ended, else the run's own."""
    if state in ("queued", "unfinished"):
        return status.reason if status else ""
    return str(summary.get("reason", "")) if state in ("failed", "stopped") else ""


def _job_text(row: dict[str, Any]) -> str:
    if not row["job"]:
        return ""
    if row["job_state"] is None:
        return f"  job {row['job']} (Slurm does not answer)"
    status = JobStatus(row["job_state"], row["job_reason"], (row["leg"] or 1) - 1)
    return f"  job {row['job']} {status}".rstrip()


def _job_or_none(run: RunFolder) -> str:
    try:
        return last_job_of(run)
    except UserError:
        return ""


def _statuses(jobs: Sequence[str]) -> dict[str, JobStatus] | None:
    """Job -> status by one call of squeue; None, with a line for the user, where Slurm does not answer."""
    try:
        return job_statuses(jobs)
    except SlurmSilentError as error:
        print(f"isobatch: {error}: whether jobs wait or run is not known", file=sys.stderr)
        return None


def _row_or_unreadable(run: RunFolder, job: str, statuses: dict[str, JobStatus] | None) -> dict[str, Any]:
    """A run's row; one with state "unreadable" where its files are damaged, so that others are shown."""
    try:
        return _row(RunFolder.open(run.folder), job, statuses)
    except UserError as error:
        print(printable(f"isobatch: {error}"), file=sys.stderr)
        nothing = dict.fromkeys(("task", "steps", "step", "steps_total", "seconds_left"))
        unreadable = {"status": "unreadable", "state": "unreadable", "reason": str(error)}
        job_fields = {"job": "", "job_state": "", "job_reason": "", "leg": None}
        unknown: dict[str, Any] = {"made": None, "recipe": {}, "metric": "loss", "split": None, "metrics": {}}
        return {"folder": str(run.folder), **nothing, **unreadable, **unknown, **job_fields}


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
