"""The contents of a report: each run's records and curves, and the models that their tasks measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from isobatch.core.measures import printable
from isobatch.core.terminal.status import doing
from isobatch.engine.machine.detect import detect
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.launch.local.run_setup import locate_data
from isobatch.launch.report.child_process import call_in_child
from isobatch.launch.report.figures import drawings_of
from isobatch.launch.report.records import read_records, report_of, task_of
from isobatch.models.protocols import Drawing, ModelComparison, ReportRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder


class Group(NamedTuple):
    """Models of one kind of task, which are compared with each other."""

    report: ModelComparison
    rows: list[ReportRow]

    def verdicts(self) -> list[str]:
        """A sentence per run: what its model is worth."""
        return self.report.verdicts(self.rows)

    def table(self) -> list[list[str]]:
        """The report's columns, and a row of text per model."""
        return [list(self.report.columns), *map(self.report.cells, self.rows)]


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a report shows of its runs."""

    machine: str
    runs: list[dict[str, Any]]
    groups: list[Group]
    drawings: list[Drawing]

    def to_dict(self) -> dict[str, Any]:
        """The object of report.json."""
        models = [row for group in self.groups for row in group.rows]
        verdicts = [verdict for group in self.groups for verdict in group.verdicts()]
        return {"machine": self.machine, "runs": self.runs, "verdicts": verdicts, "models": models}

    def unmeasured(self) -> list[dict[str, Any]]:
        """Runs whose models were not measured."""
        measured = {row["run"] for group in self.groups for row in group.rows}
        return [run for run in self.runs if run["run"] not in measured]


def collect(runs: Sequence[RunFolder]) -> Contents:
    """Read the runs' records; compare the models of those that are done on this machine."""
    tasks = [task_of(run) for run in runs]
    reports = [report_of(task) for task in tasks]
    measured: dict[type[ModelComparison], Group] = {}
    for run, report in zip(runs, reports, strict=True):
        if isinstance(report, ModelComparison) and run.status() == "done" and (rows := _measure(run, report)):
            measured.setdefault(type(report), Group(report, [])).rows.extend(rows)
    doing("measuring the models in turn")
    groups = [
        Group(report, report.compare(report.measure_in_turn(rows, call_in_child)))
        for report, rows in measured.values()
    ]
    doing("reading the runs")
    records = [read_records(run, task) for run, task in zip(runs, tasks, strict=True)]
    return Contents(detect().describe(), records, groups, drawings_of(records, reports))


def _measure(run: RunFolder, report: ModelComparison) -> list[ReportRow]:
    """A row for each form of the run's model; none where no split is held out."""
    from isobatch.engine.training.evaluate import host_batches

    doing(f"measuring {run.folder.name}")
    locate_data(run, run.recipe, None)
    split = next((s for s in HELD_OUT_SPLITS if s in run.facts.samples), None)
    if split is None:
        return []
    samples = workload_of(run.recipe).make(run.recipe)[1].open(Path(run.facts.folder), split)
    rows = report.measure(
        run.final, run.folder / "exports", run.facts, lambda: host_batches(samples), call_in_child
    )
    where = {"run": printable(run.folder.name), "task": printable(run.recipe.task)}
    seconds = (run.summary() or {}).get("train_seconds")
    chosen = split == "valid" and bool(run.recipe.patience)
    return [
        {**where, **row, "split": split, "train_seconds": seconds, "chose_checkpoint": chosen} for row in rows
    ]
