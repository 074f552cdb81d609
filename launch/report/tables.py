"""The tables of a report as text, for its Markdown and its HTML page."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isobatch.core.measures import format_bytes
from isobatch.engine.registry import TASKS, workload

BEFORE = ("loss", "exact_match", "valid_tool_calls", "accuracy", "reward_accuracy")
"""Metrics that are shown of the model before training, too."""


def runs_table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The table of runs whose models were not measured: a head with their names, then a row a figure."""
    columns = []
    for run in runs:
        _, metrics = table_beside(metrics_of(run), run["task"])
        cells = {"run": run["run"], "state": run["state"], "split": str(run["split"] or "")}
        scalars = {n: v for n, v in metrics.items() if type(v) in (float, int, str)}
        cells |= {in_words(name): format_value(v) for name, v in scalars.items()}
        before = found if isinstance(found := run.get("before"), dict) else {}
        cells |= {f"{in_words(n)} before training": format_value(v) for n, v in before.items() if n in BEFORE}
        if run.get("steps") != 0:  # else no step has trained them, as in a fit of the classics
            cells["parameters"] = _figure(run["parameters"], "{:,}".format)
            cells["trained"] = _figure(run["trainable_parameters"], "{:,}".format)
        cells["memory"] = _figure(run["peak_memory_bytes"], format_bytes)
        columns.append(cells | {"training": _figure(run["train_seconds"], "{:,.0f} s".format)})
    return side_by_side(columns)


def results_table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each run: what came out, by the metric that early stopping follows. Empty columns are left
    out.
    """
    rows = [["run", "task", "result", "within (95 %)", "steps", "training"]]
    for run in runs:
        metrics, name = metrics_of(run), run["monitor"]
        result = f"{run['split']}: {in_words(name)} {format_value(metrics.get(name))}"
        found = [result if name in metrics else run["state"], str(metrics.get(f"{name} within (95 %)", ""))]
        took = [_figure(run["steps"], "{:,}".format), _figure(run["train_seconds"], "{:,.0f} s".format)]
        rows.append([run["run"], run["task"], *found, *took])
    kept = (column for column in zip(*rows, strict=True) if any(column[1:]))
    return [[*row] for row in zip(*kept, strict=True)]


def side_by_side(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """A row for each name in any of them, with its cell in each."""
    names = dict.fromkeys(itertools.chain(*columns))
    return [[name, *(cells.get(name, "") for cells in columns)] for name in names]


def baselines_tables(runs: list[dict[str, Any]]) -> list[tuple[str, list[list[str]]]]:
    """(title, metrics of a run beside those of its baselines), for each run that has such."""
    found = [(run, table_beside(metrics_of(run), run["task"])[0]) for run in runs]
    return [(f"{run['run']} beside its baselines: {run['split']}", table) for run, table in found if table]


def in_words(name: str) -> str:
    """The name of a field or a metric, for people."""
    return name.replace("_", " ")


def in_markdown(text: str) -> str:
    """Text that Markdown shows as it is: no table, link, code, emphasis or HTML begins in it."""
    return re.sub(r"([\\|`<\[*])", r"\\\1", " ".join(text.split()))


def metrics_of(run: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a run's summary; none where a received run has something else there."""
    return run["metrics"] if isinstance(run.get("metrics"), dict) else {}


def _figure(value: Any, form: Callable[[Any], str]) -> str:
    """A number as text; nothing where a received run has something else there."""
    return form(value) if isinstance(value, float | int) else ""


def format_value(value: Any) -> str:
    """A metric as text: six digits of a float, lists with commas."""
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def with_error(mean: Any, deviation: Any) -> list[str]:
    """A mean and its deviation as text, to two significant digits of that; six digits where there is none."""
    if not (isinstance(deviation, float) and 0 < deviation < math.inf):
        return [format_value(mean), format_value(deviation)]
    places = max(0, 1 - int(f"{deviation:.1e}".partition("e")[2]))
    return [f"{mean:.{places}f}", f"{deviation:.{places}f}"]


def table_beside(metrics: Mapping[str, Any], task: str) -> tuple[list[list[str]], dict[str, Any]]:
    """Metrics that the task has of baselines too, `hr@10` and `popularity_hr@10`, as a table with a row for
    each; and the other metrics. No table where fewer than two have a row.
    """
    beside = workload(task).task.set_beside if task in TASKS else ()
    versions: dict[str, dict[str, str]] = {}
    for name in metrics:
        prefix, own = _version(name, metrics, beside)
        versions.setdefault(prefix, {})[own] = name
    least = max(2, len(versions) / 2)
    common = [
        name
        for name in versions.get("", {})
        if sum(name in row for row in versions.values()) >= least and type(metrics[name]) is float
    ]
    if not common:
        return [], dict(metrics)
    rows = [
        [_version_in_words(prefix), *(_figure(metrics.get(row.get(n, "")), "{:.4f}".format) for n in common)]
        for prefix, row in versions.items()
    ]
    inside = {row[name] for row in versions.values() for name in common if name in row}
    return [["", *common], *rows], {n: value for n, value in metrics.items() if n not in inside}


def own_first(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a run's summary, those of baselines behind those of the model."""
    metrics, task = metrics_of(summary), str(summary.get("task"))
    beside = workload(task).task.set_beside if task in TASKS else ()
    return dict(
        sorted(metrics.items(), key=lambda one: _version(one[0], metrics, beside)[0] not in ("", "full"))
    )


def _version(name: str, metrics: Mapping[str, Any], beside: Sequence[str]) -> tuple[str, str]:
    """(whose metric it is, the model's own that it stands below); `full_` leads the name of both, or of one
    where `hr@10` and `full_hr@10` differ.
    """
    for prefix in (p for p in beside if name.startswith(f"{p}_")):
        own = name.removeprefix(f"{prefix}_")
        if own in metrics:
            return prefix, own
        if prefix.startswith("full_") and f"full_{own}" in metrics:
            return prefix.removeprefix("full_"), f"full_{own}"
    return "", name


def _version_in_words(prefix: str) -> str:
    """`full_popularity`: among all items, where `popularity` is among those that were drawn."""
    whole = prefix == "full" or prefix.startswith("full_")
    own = prefix.removeprefix("full").lstrip("_") if whole else prefix
    return (in_words(own) or "this model") + (", all items" if whole else "")
