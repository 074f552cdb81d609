"""The plot of a sweep: the task's metric over the first number that was swept, one line per other value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.launch.report.figures import draw_figure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILE_NAME = "sweep.png"
LOGARITHMIC = 10
"""Largest over smallest value from which on an axis is logarithmic."""


def write_plot(found: Mapping[str, Any], folder: Path) -> None:
    """Draw the rows of `sweep.summary` that have the metric; nothing where fewer than two do."""
    rows = [row for row in found["rows"] if found["metric"] in row["metrics"]]
    if len(rows) < 2:
        return
    numbers = [n for n, v in rows[0]["values"].items() if _is_number(v)]
    axis = numbers[0] if numbers else next(iter(rows[0]["values"]))

    def draw(ax: Any) -> None:
        for name, line in _lines(rows, axis).items():
            x = [row["values"][axis] for row in line]
            y = [row["metrics"][found["metric"]] for row in line]
            spread = [row["deviations"].get(found["metric"], 0.0) for row in line]
            ax.errorbar(x if numbers else list(map(str, x)), y, yerr=spread, marker="o", ms=4, label=name)
        ax.set(xlabel=axis.replace("_", " "), ylabel=f"{found['split']} {found['metric']}".replace("_", " "))
        if numbers and _spans(row["values"][axis] for row in rows):
            ax.set_xscale("log")
        if len(ax.containers) > 1:
            ax.legend(fontsize=8, frameon=False)

    file = folder / FILE_NAME
    with atomic_files.explain_write_errors(file):
        draw_figure(draw, 5.2, 3.2).savefig(file, format="png", dpi=110)


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _spans(values: Any) -> bool:
    found = list(values)
    return min(found) > 0 and max(found) / min(found) >= LOGARITHMIC


def _lines(rows: list[dict[str, Any]], axis: str) -> dict[str, list[dict[str, Any]]]:
    """Values beside the axis, in words -> their rows in the order of the axis."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["values"][axis]):
        name = ", ".join(f"{n.replace('_', ' ')} {v}" for n, v in row["values"].items() if n != axis)
        found.setdefault(name, []).append(row)
    return found
