"""The contents of a report: each run's records and curves, and the models that their tasks measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.engine.planning.detect import detect
from isobatch.engine.registry import workload
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.engine.training.evaluate import host_batches
from isobatch.launch.local.run_setup import locate_data
from isobatch.launch.report.child_process import call_in_child
from isobatch.models.protocols import Drawing, ReportRow, Reports, TaskReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder

POINTS = 400
"""Most points of a curve; more are not visible."""
SUMMARY_FIELDS = (
    "train_seconds", "steps", "samples_seen", "parameters", "trainable_parameters", "metrics", "split",
    "world_size", "precision", "peak_memory_bytes", "sample",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ComparedModels:
    """Models of one kind of task, which are compared with each other."""

    report: TaskReport
    rows: list[ReportRow]

    def table(self) -> list[list[str]]:
        """A row of text per model, under the report's columns."""
        return [self.report.cells(row) for row in self.rows]

    def caption(self, machine: str) -> str:
        """What the table's figures were measured on."""
        return self.report.caption(self.rows[0], machine)


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a report shows of its runs."""

    machine: str
    runs: list[dict[str, Any]]
    groups: list[ComparedModels]
    reports: list[TaskReport | None]
    """What the task of each run reports, in the order of `runs`; None where it reports nothing."""

    def to_dict(self) -> dict[str, Any]:
        """The object of report.json."""
        models = [row for group in self.groups for row in group.rows]
        return {"machine": self.machine, "runs": self.runs, "models": models}

    def unmeasured(self) -> list[dict[str, Any]]:
        """Runs whose models were not measured."""
        measured = {row["run"] for group in self.groups for row in group.rows}
        return [run for run in self.runs if run["run"] not in measured]

    def run_drawings(self) -> list[Drawing]:
        """Figures of single runs."""
        pairs = zip(self.runs, self.reports, strict=True)
        return [drawing for run, report in pairs if report for drawing in report.run_drawings(run)]

    def curves(self) -> list[tuple[str, ...]]:
        """Per run, the names of the metrics that are drawn beside the loss."""
        return [report.curves if report else () for report in self.reports]


def collect(runs: Sequence[RunFolder]) -> Contents:
    """Read the runs' records; measure and compare their models on this machine."""
    reports = [_report_of(run) for run in runs]
    measured: dict[type[TaskReport], tuple[TaskReport, list[ReportRow]]] = {}
    for run, report in zip(runs, reports, strict=True):
        if report is not None:
            measured.setdefault(type(report), (report, []))[1].extend(_measure(run, report))
    groups = [ComparedModels(report, report.compare(rows)) for report, rows in measured.values() if rows]
    records = [_records(run, report) for run, report in zip(runs, reports, strict=True)]
    return Contents(detect().describe(), records, groups, reports)


def _report_of(run: RunFolder) -> TaskReport | None:
    task, _ = workload(run.recipe.task).make(run.recipe)
    return task.report() if isinstance(task, Reports) else None


def _measure(run: RunFolder, report: TaskReport) -> list[ReportRow]:
    """A row for each form of the run's model; none where no split is held out."""
    locate_data(run, run.recipe, None)
    split = next((s for s in HELD_OUT_SPLITS if s in run.facts.samples), None)
    if split is None:
        return []
    _, data = workload(run.recipe.task).make(run.recipe)
    samples = data.open(Path(run.facts.folder), split)
    rows = report.measure(
        run.final, run.folder / "exports", run.facts, lambda: host_batches(samples), call_in_child
    )
    seconds = (run.summary() or {}).get("train_seconds")
    where = {"run": run.folder.name, "task": run.recipe.task}
    return [{**where, **row, "split": split, "train_seconds": seconds} for row in rows]


def _records(run: RunFolder, report: TaskReport | None) -> dict[str, Any]:
    """A run's own records: its metrics, and the curves of its training."""
    summary, rows = run.summary() or {}, atomic_files.read_jsonl(run.metrics)
    steps, curves = [r for r in rows if "lr" in r], report.curves if report else ()
    starts = _phase_starts(steps)
    return {
        "run": run.folder.name,
        "task": run.recipe.task,
        **{name: summary.get(name) for name in SUMMARY_FIELDS},
        "training": _curve(steps, ("loss", *curves), starts),
        "evaluations": _curve([r for r in rows if "split" in r], ("loss", *curves), starts),
    }


def _phase_starts(steps: list[dict[str, Any]]) -> dict[str, int]:
    """Phase -> steps of the phases before it."""
    last = {row["phase"]: row["step"] for row in steps}
    return {phase: sum(list(last.values())[:place]) for place, phase in enumerate(last)}


def _curve(
    rows: list[dict[str, Any]], names: tuple[str, ...], starts: dict[str, int]
) -> dict[str, list[Any]]:
    """Columns of at most about 2 * POINTS rows; steps are counted through all phases."""
    thinned = rows[:: max(1, len(rows) // POINTS)]
    found = {"step": [starts.get(row["phase"], 0) + row["step"] for row in thinned]}
    found |= {name: [row.get(name) for row in thinned] for name in names}
    return {k: v for k, v in found.items() if any(x is not None for x in v)}
