"""A run's own records for its report and plots: metrics, and the curves of its training."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.measures import printable
from isobatch.engine import consent
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.log_reader import thinned_rows
from isobatch.models.protocols import Reports, TaskReport

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

POINTS = 400
"""Most points of a curve; more are not visible."""
SUMMARY_FIELDS = (
    "train_seconds", "steps", "samples_seen", "parameters", "trainable_parameters", "metrics", "split",
    "world_size", "precision", "peak_memory_bytes", "sample",
)  # fmt: skip


def report_of(run: RunFolder) -> TaskReport | None:
    """The report of the run's task; None where it makes none, or would execute code not agreed to."""
    try:
        consent.require(run.recipe, run.folder)
    except UserError as error:
        print(f"{run.folder} without its task's own part: {error}", file=sys.stderr)
        return None
    task, _ = workload_of(run.recipe).make(run.recipe)
    return task.report() if isinstance(task, Reports) else None


def read_records(run: RunFolder, report: TaskReport | None) -> dict[str, Any]:
    """Run, task, the fields of its summary, `training` and `evaluations` (columns), `reported` (rows)."""
    summary, curves = run.summary() or {}, report.curves if report else ()
    wanted = ("seal", "split", *(report.reported if report else ()))  # phases end with a seal
    rows = [row for row in thinned_rows(run.metrics, 4 * POINTS, wanted) if _is_placed(row)]
    steps, starts = [r for r in rows if "lr" in r], _phase_starts(rows)
    return {
        "run": printable(run.folder.name),
        "task": printable(run.recipe.task),
        **{name: summary.get(name) for name in SUMMARY_FIELDS},
        "training": _curve(steps, ("loss", *curves), starts),
        "evaluations": _curve([r for r in rows if "split" in r], ("loss", *curves), starts),
        "reported": _reported(steps, report.reported if report else (), starts),
    }


def _is_placed(row: dict[str, Any]) -> bool:
    """Whether a row says its phase and step; a received run's may say anything."""
    return isinstance(row.get("phase"), str) and isinstance(row.get("step"), int)


def _phase_starts(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Phase -> steps of the phases before it."""
    last: dict[str, int] = {}
    for row in rows:
        last[row["phase"]] = max(last.get(row["phase"], 0), row["step"])
    return {phase: sum(list(last.values())[:place]) for place, phase in enumerate(last)}


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
