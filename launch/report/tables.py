"""The tables of a report as text, for its Markdown and its HTML page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable


def runs_table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The table of runs whose models were not measured: a head, then a row for each run."""
    names = list(dict.fromkeys(n for r in runs for n, v in metrics_of(r).items() if _is_scalar(v)))
    head = ["run", "split", "parameters", "trained", *names, "memory", "training"]
    return [head, *(_row(run, names) for run in runs)] if runs else []


def differences_table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each field in which the runs' recipes differ, a column for each run; none where none does."""
    names = dict.fromkeys(name for run in runs for name in run["recipe"])
    columns = {name: [_recipe_text(run["recipe"].get(name)) for run in runs] for name in names}
    rows = [[name.replace("_", " "), *cells] for name, cells in columns.items() if len(set(cells)) > 1]
    return [["recipe", *(run["run"] for run in runs)], *rows] if rows else []


def _recipe_text(value: Any) -> str:
    return "" if value is None else format_value(value)


def metrics_of(run: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a run's summary; none where a received run has something else there."""
    return run["metrics"] if isinstance(run["metrics"], dict) else {}


def _figure(value: Any, form: Callable[[Any], str]) -> str:
    """A number as text; nothing where a received run has something else there."""
    return form(value) if isinstance(value, float | int) else ""


def _is_scalar(value: Any) -> bool:
    return isinstance(value, float | int | str) and not isinstance(value, bool)


def _row(run: dict[str, Any], names: list[str]) -> list[str]:
    metrics = metrics_of(run)
    return [
        run["run"],
        str(run["split"] or ""),
        _figure(run["parameters"], "{:,}".format),
        _figure(run["trainable_parameters"], "{:,}".format),
        *(format_value(metrics[name]) if _is_scalar(metrics.get(name)) else "" for name in names),
        _figure(run["peak_memory_bytes"], format_bytes),
        _figure(run["train_seconds"], "{:,.0f} s".format),
    ]


def format_value(value: Any) -> str:
    """A metric as text: six digits of a float, lists with commas."""
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
