"""The tables of a report as text: what its Markdown and its page both show."""

from __future__ import annotations

from typing import Any

from isobatch.core.measures import format_bytes


def runs_table(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The runs whose models were not measured here: a head of names, then a row for each."""
    names = list(dict.fromkeys(n for r in runs for n, v in (r["metrics"] or {}).items() if _is_plain(v)))
    head = ["run", "split", "parameters", "trained", *names, "memory", "training"]
    return [head, *(_figures(run, names) for run in runs)] if runs else []


def _is_plain(value: Any) -> bool:
    return isinstance(value, float | int | str) and not isinstance(value, bool)


def _figures(run: dict[str, Any], names: list[str]) -> list[str]:
    metrics = run["metrics"] or {}
    return [
        run["run"],
        run["split"] or "",
        f"{run['parameters']:,}",
        f"{run['trainable_parameters']:,}",
        *(plain(metrics[name]) if _is_plain(metrics.get(name)) else "" for name in names),
        format_bytes(run["peak_memory_bytes"]),
        f"{run['train_seconds']:,.0f} s",
    ]


def plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
