"""`runs`: the runs in a folder, what they do now by their files and by the clusters that train them, and how
far they are; and some side by side.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core.errors import UserError, nearest_file
from isobatch.core.flags import value_text
from isobatch.core.measures import format_duration
from isobatch.core.recipe import differing, side_by_side
from isobatch.core.terminal import print_answer, print_lines, table
from isobatch.engine.optimization.schedule import schedules_of
from isobatch.engine.planning.cost_model import steps_per_epoch
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.log_reader import newest_rows
from isobatch.engine.runs.run_folder import SWEEP, RunFolder, list_runs
from isobatch.launch.clusters.cluster import JobState, job_states
from isobatch.launch.local.arguments import read_command
from isobatch.launch.local.options import ListingOptions
from isobatch.launch.report.tables import metrics_of, own_first

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
    recipe, summary, lengths = run.recipe, run.summary() or {}, dict[str, int]()
    with contextlib.suppress(UserError):  # of each phase, unless it takes code that came with the run
        task, _ = workload_of(recipe).make(recipe)
        schedules = schedules_of(task, run.facts, steps_per_epoch(recipe, run.facts))
        lengths = {schedule.name: schedule.steps for schedule in schedules}
    saved = (file.parent.name.rpartition("-") for file in run.checkpoints.glob("[!.]*-*/index.json"))
    placed = [{"phase": p, "step": int(step)} for p, _, step in saved if step.isdecimal()] + rows[-1:]
    starts = dict(zip(lengths, itertools.accumulate(lengths.values(), initial=0), strict=False))
    reached = (int(row["step"]) + starts.get(row.get("phase"), 0) for row in placed)
    step = max(reached, default=summary.get("steps"))
    state, said = "unfinished", summary.get("status")
    if said == "done":
        state, step = "done", summary.get("steps")
    elif job is not None and job.stage != "over":
        state = job.stage
    # A later leg may have trained on, and left no summary.
    elif said == "failed" or (said == "stopped" and (step or 0) <= (summary.get("steps") or 0)):
        state = said
    total = sum(lengths.values()) or round(sum(run.recipe.steps or [])) or summary.get("planned_steps")
    paces = [row["step_seconds"] for row in rows if isinstance(row.get("step_seconds"), float | int)]
    left = None
    if state == "running" and step is not None and total is not None and paces:
        left = round(max(0, total - step) * sum(paces) / len(paces), 1)
    return RunView(run=run, state=state, step=step, total=total, seconds_left=left, job=job or NO_JOB)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsOptions(ListingOptions):
    """Flags of `runs`, and of `doctor`."""

    out: str = "runs"
    """Folder that holds the runs."""


def runs(words: Sequence[str]) -> int:
    """Usage: runs [FOLDER] [--json]: what each run does or came to, how far it is, and its job."""
    positional, options = read_command(words, RunsOptions, "runs")
    folder = Path(positional[0] if positional else options.out).expanduser()
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}{nearest_file(folder)}")
    found = list(list_runs(folder))
    jobs = job_states(found)
    for reason in {job.reason for job in jobs.values() if job.stage == "unknown"}:
        print_lines(f"isobatch: {reason}: whether jobs wait or run is not known")
    rows, lines = [], []
    for run in found:
        try:  # one whose files are damaged is no reason not to show the others
            seen = view(RunFolder.open(run.folder), jobs.get(run.folder))
            rows.append(_row(seen))
            lines.append((*_cells(rows[-1]), _remark(seen, rows[-1]["reason"])))
        except UserError as error:
            print_lines(f"isobatch: {error}")
    text = table([HEAD, *lines]) if rows else f"no runs in {folder}"
    return print_answer({"runs": rows}, text, options.json)


HEAD = ("run", "made", "task", "state", "steps", "result", "")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    steps = f"{row['step'] or 0}/{row['steps_total'] or '?'}"
    form = "%H:%M" if time.time() - row["made"] < 86400 else "%Y-%m-%d"
    made = time.strftime(form, time.localtime(row["made"]))
    name, value = row["metric"], row["metrics"].get(row["metric"])
    result = f"{row['split'] or ''} {name} {value:.4g}".lstrip() if isinstance(value, float | int) else ""
    return row["folder"], made, row["task"].rpartition("/")[2], row["state"], steps, result


def _remark(seen: RunView, reason: str) -> str:
    """What belongs to one run alone, behind its line."""
    eta = "" if seen.seconds_left is None else f"ETA {format_duration(seen.seconds_left)}"
    is_stopped = seen.state == "stopped"  # the job ends with 75, which Slurm calls FAILED
    job = f"job {seen.job.job} {'' if is_stopped else seen.job}".rstrip() if seen.job.job else ""
    said = f"`doctor {seen.run.folder}` says why" if seen.state == "unfinished" and "FAILED" in job else ""
    return "  ".join(
        filter(None, (eta, job, reason if seen.state == "failed" or (job and is_stopped) else said))
    )


def _row(seen: RunView) -> dict[str, Any]:
    run, job, summary = seen.run, seen.job, seen.run.summary() or {}
    # Its cluster's word where a job waits or was ended, else the run's own.
    of_job, own = seen.state in ("queued", "unfinished"), seen.state in ("failed", "stopped")
    return {
        "folder": str(run.folder),
        "task": run.recipe.task,
        "status": run.status(),
        "state": seen.state,
        "reason": job.reason if of_job else str(summary.get("reason", "")) if own else "",
        "steps": summary.get("steps"),
        "step": seen.step,
        "steps_total": seen.total,
        "seconds_left": seen.seconds_left,
        "made": (run.folder / "recipe.json").stat().st_mtime,
        "recipe": run.recipe.to_compare(),
        "metric": str(summary.get("monitor", "loss")),
        "split": summary.get("split"),
        "metrics": metrics_of(summary),
        "job": job.job,
        "job_state": None if job.stage == "unknown" else job.state,
        "job_reason": job.reason,
        "leg": job.restarts + 1 if job.state else None,
    }


PLAN = (
    *("device", "processes", "strategy", "copies", "precision", "attention", "compile", "pack", "reduction"),
    *("pad_multiple", "micro_batch_samples", "micro_batch_tokens", "activation_checkpointing", "invariance"),
)
"""Fields of a plan that may move results by rounding, or beyond."""
FIGURES = ("steps", "train_seconds", "peak_memory_bytes")


def compare(words: Sequence[str]) -> int:
    """Usage: runs compare RUN RUN... [--json]: what differs between runs, and their metrics side by side."""
    positional, options = read_command(words, ListingOptions, "runs compare")
    runs = [RunFolder.open(place) for place in positional if not Path(place, SWEEP).is_file()]
    if len(runs) < 2:
        raise UserError("runs compare: give two runs or more, as in: runs compare runs/a runs/b")
    found = compared(runs)
    return print_answer(found, as_table(found), options.json)


def compared(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """The answer of --json: in each part name -> a value per run, None where a run has none."""
    summaries = [run.summary() or {} for run in runs]
    pairs = [(run.facts, s.get("split")) for run, s in zip(runs, summaries, strict=True)]
    data = differing([{"data": facts.fingerprint, "held-out split": split} for facts, split in pairs])
    tests = {(facts.extra.get("held_out", facts.fingerprint), split) for facts, split in pairs}
    return {
        "runs": [str(run.folder) for run in runs],
        "recipe": differing([run.recipe.to_compare() for run in runs]),
        "data": data,
        "comparable": len(tests) == 1,
        "plan": differing_plans(runs),
        "split": None if "held-out split" in data else summaries[0].get("split"),
        "metrics": side_by_side(
            [{k: v for k, v in own_first(s).items() if isinstance(v, float | int | str)} for s in summaries]
        ),
        "remarks": [s.get("remark") for s in summaries],
        "figures": side_by_side([{name: s.get(name) for name in FIGURES} for s in summaries]),
    }


def differing_plans(runs: Sequence[RunFolder]) -> dict[str, list[Any]]:
    """The fields of PLAN that differ."""
    plans = [run.plan.to_dict() if run.has_plan else {} for run in runs]
    return differing([{name: plan.get(name) for name in PLAN} for plan in plans])


def as_table(found: Mapping[str, Any]) -> str:
    """The comparison as a table with a section for each part."""
    names = [Path(place).name for place in found["runs"]]
    cells = [["", *(names if len(set(names)) == len(names) else found["runs"])]]
    for part in ("recipe", "data", "plan", "metrics", "figures"):
        if found[part]:
            title = f"{part}, {found['split']}" if part == "metrics" and found["split"] else part
            cells.append([title, *[""] * len(found["runs"])])
            cells += [[f"  {name.replace('_', ' ')}", *map(_cell, row)] for name, row in found[part].items()]
    remarks = [f"{name}: {said}" for name, said in zip(cells[0][1:], found["remarks"], strict=True) if said]
    if not found["recipe"]:
        remarks.append("the same recipe" + ("" if found["data"] else " and data"))
    elif found["data"]:
        same, other = "the same test: metrics are comparable", "another protocol: metrics are not comparable"
        remarks.append(same if found["comparable"] else other)
    return "\n".join([table(cells), *remarks])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else value_text(value)
