"""`auto --lr 1e-3,3e-3 --seed 0-2`: a run for each combination, then a table and sweep.json.

Called again, it goes on where it was stopped. Seeds of one setting are one row: mean and deviation. The best
is chosen by the validation split; of the test split its figures alone are shown, by which nothing was chosen.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, STOPPED
from isobatch.core.flags import to_json_value
from isobatch.core.terminal import print_answer, print_lines, table
from isobatch.engine.runs.run_folder import RunFolder, run_name
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.launch.local.arguments import Point, labelled
from isobatch.launch.local.launch_run import AutoOptions, find_or_train
from isobatch.models.capabilities import monitor_of

FILE_NAME = "sweep.json"
SEED = "seed"
TEST, VALID = HELD_OUT_SPLITS


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A run of a sweep that came to its end, whatever that was."""

    values: dict[str, Any]
    """Swept flag -> its value."""
    folder: Path
    code: int
    metrics: dict[str, dict[str, Any]]
    """Split -> its metrics."""


def train_sweep(points: Sequence[Point], options: AutoOptions) -> int:
    """Train a run for each point; returns the exit code.

    A run that fails is shown as failed, and the others go on; a stop ends the sweep.
    """
    first, trained = points[0][0], []
    for number, point in enumerate(points, 1):
        request = labelled(point)
        fields = {**request.recipe.options, **request.recipe.to_dict()}
        values = {name: to_json_value(fields[name]) for name in point[1]}
        shown = " ".join(f"{name} {value}" for name, value in values.items())
        print_lines(f"run {number} of {len(points)}: {shown}", quiet=request.run.quiet)
        run, verdict = find_or_train(request, trust=options.trust)
        if verdict.code == STOPPED:
            return STOPPED
        metrics = (run.summary() or {}).get("metrics_by_split", {}) if verdict.code == DONE else {}
        trained.append(Trained(values=values, folder=run.folder, code=verdict.code, metrics=metrics))
    task, _ = first.workload.make(first.recipe)
    done = next((RunFolder.open(one.folder) for one in trained if one.code == DONE), None)
    found = summary(trained, *(monitor_of(task, done.facts) if done else task.monitor))
    path = _folder(points) / FILE_NAME
    atomic_files.write_json(path, found)
    print_answer(found, f"{format_sweep(found)}\nall figures: {path}", options.json)
    return max(one.code for one in trained)


def _folder(points: Sequence[Point]) -> Path:
    """The folder of the sweep, beside its runs; made if it is not there."""
    hashes = " ".join(request.recipe.hash() for request, _ in points)
    run = points[0][0].run
    task = run_name(points[0][0].recipe).rpartition("-")[0]
    name = run.name or f"{task}-{hashlib.sha256(hashes.encode()).hexdigest()[:12]}"
    folder = Path(run.out).expanduser() / f"sweep-{name}"
    with atomic_files.explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def summary(trained: Sequence[Trained], metric: str, direction: str) -> dict[str, Any]:
    """The answer of --json: a row for each setting with its figures on the validation split, and the best of
    them by the task's own metric, with those on the test split.
    """
    groups: dict[str, list[Trained]] = {}
    for one in trained:
        setting = {name: value for name, value in one.values.items() if name != SEED}
        groups.setdefault(atomic_files.json_text(setting), []).append(one)
    rows = [_row(group) for group in groups.values()]
    known = [row for row in rows if math.isfinite(row["metrics"].get(metric, math.nan))]
    best = (max if direction == "max" else min)(known, key=lambda row: row["metrics"][metric], default=None)
    if best and (test := _figures(groups[atomic_files.json_text(best["values"])], TEST))["metrics"]:
        best = {**best, TEST: test}
    return {"metric": metric, "direction": direction, "split": VALID, "rows": rows, "best": best}


def _row(group: Sequence[Trained]) -> dict[str, Any]:
    return {
        "values": {name: value for name, value in group[0].values.items() if name != SEED},
        "runs": [str(one.folder) for one in group],
        "failed": sum(one.code != DONE for one in group),
        **_figures(group, VALID),
    }


def _figures(group: Sequence[Trained], split: str) -> dict[str, dict[str, float]]:
    """Means and standard deviations of the runs' numbers on a split."""
    columns: dict[str, list[float]] = {}
    for one in group:
        for name, value in one.metrics.get(split, {}).items():
            if isinstance(value, float | int):
                columns.setdefault(name, []).append(value)
    return {
        "metrics": {name: statistics.fmean(found) for name, found in columns.items()},
        "deviations": {name: statistics.stdev(found) for name, found in columns.items() if len(found) > 1},
    }


def format_sweep(found: Mapping[str, Any]) -> str:
    """The table: what was swept, and the task's own metric; sweep.json has the others."""
    rows, metric, best = found["rows"], found["metric"], found["best"] or {}
    cells = [["", *rows[0]["values"], f"{VALID} {metric}", "run"]]
    for row in rows:
        mark = "best" if row["values"] == best.get("values") and len(rows) > 1 else ""
        others = f" and {len(row['runs']) - 1} more" if len(row["runs"]) > 1 else ""
        failed = f" ({row['failed']} failed)" if row["failed"] else ""
        name = Path(row["runs"][0]).name + others + failed
        cells.append([mark, *map(str, row["values"].values()), _figure(row, metric), name])
    return "\n".join([table(cells), "", *_legend(found)])


def _legend(found: Mapping[str, Any]) -> Iterator[str]:
    """What the table's figures are, and that of the best on the test split."""
    best, metric, alone = found["best"], found["metric"], len(found["rows"]) == 1
    if best is None:
        yield f"best: none, as no run has a {metric} of the {VALID} split to choose by"
    elif not alone:
        yield f"best: by {VALID} {metric} ({'lower' if found['direction'] == 'min' else 'higher'} is better)"
    if best and TEST in best and metric in best[TEST]["metrics"]:
        yield f"{TEST}{'' if alone else ', of the best alone'}: {_figure(best[TEST], metric)}"
    if any(row["deviations"] for row in found["rows"]):
        seeds = max(len(row["runs"]) - row["failed"] for row in found["rows"])
        yield f"+-: standard deviation of {seeds} seeds around their mean"


def _figure(row: Mapping[str, Any], name: str) -> str:
    if name not in row["metrics"]:
        return ""
    text = f"{row['metrics'][name]:.4g}"
    return f"{text} +- {row['deviations'][name]:.2g}" if name in row["deviations"] else text
