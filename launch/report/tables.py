"""The tables of a report as text, for its Markdown and its HTML page."""

from __future__ import annotations

from typing import Any

from isobatch.core.measures import format_bytes


def runs_table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The table of runs whose models were not measured: a head, then a row for each run."""
    names = list(dict.fromkeys(n for r in runs for n, v in (r["metrics"] or {}).items() if _is_scalar(v)))
    head = ["run", "split", "parameters", "trained", *names, "memory", "training"]
    return [head, *(_row(run, names) for run in runs)] if runs else []


def _is_scalar(value: Any) -> bool:
    return isinstance(value, float | int | str) and not isinstance(value, bool)


def _row(run: dict[str, Any], names: list[str]) -> list[str]:
    metrics = run["metrics"] or {}
    return [
        run["run"],
        run["split"] or "",
        f"{run['parameters']:,}",
        f"{run['trainable_parameters']:,}",
        *(format_value(metrics[name]) if _is_scalar(metrics.get(name)) else "" for name in names),
        format_bytes(run["peak_memory_bytes"]),
        f"{run['train_seconds']:,.0f} s",
    ]


def format_value(value: Any) -> str:
    """A metric as text: six digits of a float, lists with commas."""
    if isinstance(value, list):
        return ", ".join(map(format_value, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
