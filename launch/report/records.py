"""A run's own records for its report and plots: metrics, curves, and how it used its machine."""

from __future__ import annotations

import sys
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.measures import format_bytes, printable
from isobatch.engine import consent
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.log_reader import damaged_rows, thinned_rows
from isobatch.models.protocols import Reports, TaskReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.models.base import Task

    Curves = Mapping[str, list[Any]]
    """Name of a field -> its values at the steps of `step`, None where a row lacks it."""

POINTS = 400
"""Most points of a curve; more are not visible."""
SUMMARY_FIELDS = (
    *("train_seconds", "steps", "samples_seen", "parameters", "trainable_parameters", "metrics", "split"),
    *("world_size", "precision", "peak_memory_bytes", "sample", "remark"),
)
GPU_USE, MEMORY, DATA_WAIT = 90.0, 80.0, 10.0
"""Targets in percent: GPU use above, memory and waiting for data below."""
MEANS = {
    "power_watts": ("power", "{:.0f} W"),
    "gpu_temperature": ("GPU temperature", "{:.0f} °C"),
    "mfu": ("model FLOP utilisation", "{:.1%}"),
    "padding": ("padding", "{:.1%}"),
    "samples_per_second": ("samples a second", "{:,.1f}"),
    "tokens_per_second": ("tokens a second", "{:,.0f}"),
    "step_seconds": ("seconds a step", "{:.4g}"),
}
"""Figures without a target: their field, what they are called, and how they are written."""
CURVES = (*MEANS, "data_seconds", "memory_bytes", "gpu_utilisation")
"""Fields of metrics.jsonl that say how the machine was used."""


def task_of(run: RunFolder) -> Task | None:
    """The run's task; None where that is damaged, or would execute code not agreed to."""
    try:
        consent.require(run.recipe, run.folder)
        return workload_of(run.recipe).make(run.recipe)[0]
    except UserError as error:
        print(f"{run.folder} without its task's own part: {error}", file=sys.stderr)
        return None


def report_of(task: Task | None) -> TaskReport | None:
    """What the task adds to a report; None where it adds nothing."""
    return task.report() if isinstance(task, Reports) else None


def read_records(run: RunFolder, task: Task | None) -> dict[str, Any]:
    """Run, task, the fields of its summary, `training` and `evaluations` (columns), `reported` (rows).

    `evaluations` are on the validation split while it trained, `final_evaluations` of the exported weights,
    which may be those of an earlier step: a line through all of them would run back. And how it used its
    machine: `machine` (columns), `use` (a table). `notes` are on files that
    cannot be read: the run is shown with what there is.
    """
    notes: list[str] = []
    summary = _readable(run.summary, notes) or {}
    plan = _readable(lambda: run.plan.to_dict(), notes) or {}
    report, monitor = report_of(task), summary.get("monitor")
    judged_by = [task.best_metric[0]] if task else []
    curves = report.curves if report else tuple([monitor] if isinstance(monitor, str) else judged_by)
    reported = report.reported if report else ()
    if damaged := damaged_rows(run.metrics):
        notes.append(f"damaged rows of metrics.jsonl that are left out: {damaged}")
    rows = _placed_rows(run, ("seal", "split", *reported))  # phases end with a seal
    steps, shown, newest = [row for row in rows if "lr" in row], ("loss", *curves), -1
    line: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for row in (row for row in rows if row.get("split") == "valid"):
        (line if row["at"] > newest else others).append(row)
        newest = max(newest, row["at"])
    machine = _curve(steps, CURVES)
    status = "training" if run.is_training() else str(summary.get("status") or "unfinished")
    reason = summary.get("reason") if status != "training" else None
    return {
        "run": printable(run.folder.name),
        "task": printable(_readable(lambda: run.recipe.task, notes) or ""),
        "state": printable(f"{status}: {reason}" if reason else status),
        **{name: summary.get(name) for name in SUMMARY_FIELDS},
        "training": _curve(steps, shown),
        "evaluations": _curve(line, shown),
        "final_evaluations": _curve(others, shown),
        "curves": curves,
        "reported": [
            {"step": row["at"], **{name: row[name] for name in reported if name in row}}
            for row in _thinned([row for row in steps if any(name in row for name in reported)])
        ],
        "machine": machine,
        "use": list(use_table(machine, summary, plan)),
        "notes": notes,
    }


def _readable(read: Callable[[], Any], notes: list[str]) -> Any:
    """What `read` returns; None, and a note, where a file is missing or damaged."""
    try:
        return read()
    except UserError as error:
        notes.append(printable(error))
        return None


def _placed_rows(run: RunFolder, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl, `at` in each its step counted through all phases; a received run's may say
    anything.
    """
    rows = [
        row
        for row in thinned_rows(run.metrics, 4 * POINTS, fields)
        if isinstance(row.get("phase"), str) and isinstance(row.get("step"), int)
    ]
    last: dict[str, int] = {}
    for row in rows:
        last[row["phase"]] = max(last.get(row["phase"], 0), row["step"])
    starts = dict(zip(last, accumulate(last.values(), initial=0), strict=False))
    return [{**row, "at": starts[row["phase"]] + row["step"]} for row in rows]


def _thinned(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most about 2 * POINTS of them."""
    return rows[:: max(1, len(rows) // POINTS)]


def _curve(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Columns of the fields that are numbers in any row, and of `step`."""
    thinned = _thinned(rows)
    found = {"step": [row["at"] for row in thinned]}
    for name in names:
        found[name] = [v if isinstance(v := row.get(name), float | int) else None for row in thinned]
    return {k: v for k, v in found.items() if any(x is not None for x in v)}


def use_table(curves: Curves, summary: Mapping[str, Any], plan: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows (figure, value, target, whether it is met); a figure that nobody measured has no row."""
    known = {name: [v for v in column if v is not None] for name, column in curves.items()}
    means = {name: sum(values) / len(values) for name, values in known.items()}
    peak = _positive(summary.get("peak_memory_bytes")) or max(known.get("memory_bytes", []), default=None)
    if (use := means.get("gpu_utilisation")) is not None:
        yield ["GPU use", f"{use:.0f} %", f"above {GPU_USE:.0f} %", _verdict(use > GPU_USE)]
    if peak and (device := _positive(plan.get("device_memory_bytes"))):
        share = 100 * peak / device
        of_it = f"{share:.0f} % of {format_bytes(device)}"
        yield ["memory", of_it, f"under {MEMORY:.0f} %", _verdict(share < MEMORY)]
    if peak and (foreseen := _positive(plan.get("predicted_peak_memory_bytes"))):
        predicted = f"predicted {format_bytes(foreseen)}"
        yield ["memory per process", format_bytes(peak), predicted, f"{100 * (foreseen / peak - 1):+.0f} %"]
    if "data_seconds" in means and means.get("step_seconds"):
        wait = 100 * means["data_seconds"] / means["step_seconds"]
        yield ["data wait", f"{wait:.1f} %", f"under {DATA_WAIT:.0f} %", _verdict(wait < DATA_WAIT)]
    yield from (
        [label, form.format(means[name]), "", ""] for name, (label, form) in MEANS.items() if name in means
    )


def _positive(value: Any) -> float | None:
    return value if isinstance(value, float | int) and not isinstance(value, bool) and value > 0 else None


def _verdict(met: bool) -> str:
    return "met" if met else "missed"
