"""`runs`: the runs in a folder, with their state, their progress and their Slurm jobs."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.flags import value_text
from isobatch.core.measures import aligned, format_duration, printable
from isobatch.engine.registry import TASKS, workload_of
from isobatch.engine.runs.run_folder import RunFolder, list_runs
from isobatch.engine.runs.slurm_queue import JobStatus, SlurmSilentError, job_statuses, last_job_of
from isobatch.launch.control.run_state import run_progress, run_state
from isobatch.launch.local.arguments import read_command

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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


HEAD = ("run", "made", "task", "state", "steps", "result")


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as text, with their heads; what belongs to one run alone stands behind its line."""
    lines = aligned([HEAD, *map(_cells, rows)])
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


PLAN = ("device", "processes", "strategy", "precision", "compile", "invariance")
"""Fields of a plan that may move results by rounding."""
SWEEP_FILE = "sweep.json"
TOO_FEW = "runs compare: give two runs or more, as in: runs compare runs/a runs/b (`runs` lists them)"
FIGURES = ("steps", "train_seconds", "peak_memory_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """Flags of `runs compare`."""

    json: bool = False
    """One JSON object on standard output."""


def compare(words: Sequence[str]) -> int:
    """Usage: runs compare RUN RUN... [--json]: what differs between runs, and their metrics side by side.

    A folder of runs stands for all of them.
    """
    positional, options = read_command(words, CompareOptions, "runs compare")
    runs = [run for place in positional for run in _runs_at(place, alone=len(positional) == 1)]
    if len(runs) < 2:
        raise UserError(TOO_FEW)
    found = compared(runs)
    print(atomic_files.json_text(found) if options.json else printable_lines(found))
    return DONE


def _runs_at(place: str, alone: bool) -> list[RunFolder]:
    """The run in this folder, or else the runs that lie in it. Raises UserError where there is none.

    `alone`: whether no other place was given.
    """
    folder = Path(place).expanduser()
    if not alone and (folder / SWEEP_FILE).is_file():
        return []  # no run, but the table of some: `compare runs/*` names it, too
    inside = [] if (folder / "recipe.json").exists() else list(list_runs(folder))
    if alone and not inside:
        raise UserError(TOO_FEW)
    return inside or [RunFolder.open(place)]


def compared(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The answer of --json: in each part name -> a value per run, None where a run has none."""
    summaries = [run.summary() or {} for run in runs]
    metrics = [_numbers_and_words(s.get("metrics")) for s in summaries]
    plans = [run.plan.to_dict() if run.has_plan else {} for run in runs]
    pairs = zip(runs, summaries, strict=True)
    data = _differing([{"data": run.facts.fingerprint, "held-out split": s.get("split")} for run, s in pairs])
    return {
        "runs": [str(run.folder) for run in runs],
        "recipe": _differing([run.recipe.to_compare() for run in runs]),
        "data": data,
        "plan": _differing([{name: plan.get(name) for name in PLAN} for plan in plans]),
        "split": None if "held-out split" in data else summaries[0].get("split"),
        "metrics": _side_by_side(metrics),
        "figures": _side_by_side([{name: s.get(name) for name in FIGURES} for s in summaries]),
    }


def _numbers_and_words(metrics: Any) -> dict[str, Any]:
    """Of a summary's metrics those that fit into a cell; none where a received run has something else."""
    found = metrics if isinstance(metrics, dict) else {}
    return {name: value for name, value in found.items() if isinstance(value, float | int | str)}


def _side_by_side(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [column.get(name) for column in columns] for name in names}


def _differing(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    rows = _side_by_side(columns)
    return {name: values for name, values in rows.items() if any(v != values[0] for v in values)}


def printable_lines(found: Mapping[str, Any]) -> str:
    """The comparison as a table with a section for each part."""
    if not found["recipe"]:
        remark = "the same recipe" + ("" if found["data"] else " and data")
    else:
        remark = "another protocol: metrics are not comparable" if found["data"] else ""
    cells = [["", *found["runs"]]]
    for part in ("recipe", "data", "plan"):
        cells += _section(part, found[part], lambda value: "" if value is None else value_text(value))
    metrics = f"metrics, {found['split']}" if found["split"] else "metrics"
    for title, rows in ((metrics, found["metrics"]), ("figures", found["figures"])):
        cells += _section(title, rows, _figure)
    return "\n".join([*map(printable, aligned(cells)), *([remark] if remark else [])])


def _section(part: str, rows: Mapping[str, list[Any]], form: Callable[[Any], str]) -> list[list[str]]:
    if not rows:
        return []
    width = len(next(iter(rows.values())))
    return [[part, *[""] * width], *([f"  {n.replace('_', ' ')}", *map(form, v)] for n, v in rows.items())]


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, float | int):
        return "" if value is None else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
