"""A run's own records for its report and plots: metrics, and the curves of its training."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.measures import format_bytes, format_fields, printable
from isobatch.engine import consent
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.log_reader import damaged_rows, newest_rows, thinned_rows
from isobatch.launch.report.machine_use import CURVES, memory_table, use_table
from isobatch.launch.report.tables import format_value, in_words
from isobatch.models.protocols import Reports, TaskReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.engine.runs.run_folder import RunFolder

POINTS = 400
"""Most points of a curve; more are not visible."""
SUMMARY_FIELDS = (
    "train_seconds", "steps", "samples_seen", "parameters", "trainable_parameters", "metrics", "split",
    "world_size", "precision", "peak_memory_bytes", "sample",
    "remark",
)  # fmt: skip


EVENTS = 200
"""Most decisions that are shown, the newest."""
NO_EVENT = ("decision", "phase", "step")
"""Fields of a decision that stand in columns of their own."""


def report_of(run: RunFolder) -> TaskReport | None:
    """The report of the run's task; None where it makes none, or would execute code not agreed to."""
    try:
        consent.require(run.recipe, run.folder)
        task, _ = workload_of(run.recipe).make(run.recipe)
    except UserError as error:
        print(f"{run.folder} without its task's own part: {error}", file=sys.stderr)
        return None
    return task.report() if isinstance(task, Reports) else None


def read_records(run: RunFolder, report: TaskReport | None) -> dict[str, Any]:
    """Run, task, the fields of its summary, `training` and `evaluations` (columns), `reported` (rows).

    `evaluations` are on the validation split while it trained, `final_evaluations` of the exported weights.
    And how it used its machine: `machine` (columns), `use`, `memory`, `plan` and `events` (tables). `notes`
    are on files that cannot be read: the run is shown with what there is.
    """
    notes: list[str] = []
    summary = _readable(run.summary, notes) or {}
    plan = _readable(lambda: run.plan.to_dict(), notes) or {}
    task = _readable(lambda: run.recipe.task, notes) or ""
    curves = report.curves if report else _monitored(run, summary)
    wanted = ("seal", "split", *(report.reported if report else ()))  # phases end with a seal
    rows = [row for row in thinned_rows(run.metrics, 4 * POINTS, wanted) if _is_placed(row)]
    if damaged := damaged_rows(run.metrics):
        notes.append(f"damaged rows of metrics.jsonl that are left out: {damaged}")
    steps, starts = [r for r in rows if "lr" in r], _phase_starts(rows)
    evaluated, final = _split_evaluations([r for r in rows if "split" in r], starts)
    return {
        "run": printable(run.folder.name),
        "task": printable(task),
        "state": _state(run, summary),
        **{name: summary.get(name) for name in SUMMARY_FIELDS},
        "training": _curve(steps, ("loss", *curves), starts),
        "evaluations": _curve(evaluated, ("loss", *curves), starts),
        "final_evaluations": _curve(final, ("loss", *curves), starts),
        "curves": curves,
        "recipe": _readable(lambda: run.recipe.to_compare(), notes) or {},
        "reported": _reported(steps, report.reported if report else (), starts),
        "machine": (machine := _curve(steps, CURVES, starts)),
        "predicted_peak_memory_bytes": plan.get("predicted_peak_memory_bytes"),
        "use": use_table(machine, summary, plan),
        "memory": memory_table(machine, summary, plan),
        "plan": _plan_table(plan),
        "events": _events(run),
        "notes": notes,
    }


def _monitored(run: RunFolder, summary: dict[str, Any]) -> tuple[str, ...]:
    """The metric that a run without a report of its own is judged by, beside the loss."""
    if isinstance(said := summary.get("monitor"), str):
        return (said,)
    try:  # it still trains
        consent.require(run.recipe, run.folder)
        return (workload_of(run.recipe).make(run.recipe)[0].best_metric[0],)
    except UserError:  # damaged, or of code that is not agreed to: told elsewhere
        return ()


def _readable(read: Callable[[], Any], notes: list[str]) -> Any:
    """What `read` returns; None, and a note, where a file is missing or damaged."""
    try:
        return read()
    except UserError as error:
        notes.append(printable(error))
        return None


def _state(run: RunFolder, summary: dict[str, Any]) -> str:
    """done, stopped, failed, training or unfinished, with the reason where there is one."""
    status = "training" if run.is_training() else str(summary.get("status") or "unfinished")
    reason = summary.get("reason")
    return printable(f"{status}: {reason}" if reason and status != "training" else status)


def _plan_table(plan: dict[str, Any]) -> list[list[str]]:
    """Rows (field, value, reason)."""
    reasons = plan.get("reasons") or {}
    shown = {name: plan[name] for name in plan if name in reasons}
    return [
        [in_words(name), _plan_value(name, value), printable(reasons[name])] for name, value in shown.items()
    ]


def _plan_value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return format_fields(value)
    return format_bytes(value) if name.endswith("_bytes") else format_value(value)


def _events(run: RunFolder) -> list[list[str]]:
    """Rows (where, decision, its facts) of decisions.jsonl, the oldest first."""
    rows = newest_rows(run.decisions)[-EVENTS:]
    return [
        [
            printable(f"{row['phase']} {row.get('step', '')}".strip() if row.get("phase") else "launch"),
            printable(row.get("decision", "")),
            printable(", ".join(f"{k} {_plain(v)}" for k, v in row.items() if k not in NO_EVENT)),
        ]
        for row in rows
    ]


def _plain(value: Any) -> str:
    """A value of a decision in few characters."""
    text = format_value(value) if isinstance(value, float | int | str) else json.dumps(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def _is_placed(row: dict[str, Any]) -> bool:
    """Whether a row says its phase and step; a received run's may say anything."""
    return isinstance(row.get("phase"), str) and isinstance(row.get("step"), int)


def _phase_starts(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Phase -> steps of the phases before it."""
    last: dict[str, int] = {}
    for row in rows:
        last[row["phase"]] = max(last.get(row["phase"], 0), row["step"])
    return {phase: sum(list(last.values())[:place]) for place, phase in enumerate(last)}


def _split_evaluations(
    rows: list[dict[str, Any]], starts: dict[str, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Evaluations on the validation split: each one later than all before it, and the others.

    The exported weights are measured at the end, and may be those of an earlier step: a line through them
    would run back.
    """
    line: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    newest = -1
    for row in rows:
        if row["split"] == "valid":
            step = starts.get(row["phase"], 0) + row["step"]
            (line if step > newest else others).append(row)
            newest = max(newest, step)
    return line, others


def _curve(
    rows: list[dict[str, Any]], names: tuple[str, ...], starts: dict[str, int]
) -> dict[str, list[Any]]:
    """Columns of at most about 2 * POINTS rows; steps are counted through all phases."""
    thinned = rows[:: max(1, len(rows) // POINTS)]
    found = {"step": [starts.get(row["phase"], 0) + row["step"] for row in thinned]}
    found |= {name: [_number(row.get(name)) for row in thinned] for name in names}
    return {k: v for k, v in found.items() if any(x is not None for x in v)}


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, float | int) else None


def _reported(
    steps: list[dict[str, Any]], names: tuple[str, ...], starts: dict[str, int]
) -> list[dict[str, Any]]:
    """`step` and these fields of the rows that have any, thinned as curves are."""
    rows = [row for row in steps if any(name in row for name in names)]
    return [
        {"step": starts[row["phase"]] + row["step"], **{name: row[name] for name in names if name in row}}
        for row in rows[:: max(1, len(rows) // POINTS)]
    ]
