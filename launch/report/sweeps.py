"""What a sweep found, by its sweep.json: a table of its settings, for a paper too, and its picture."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core import atomic_files
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.launch.report.records import placed_rows
from isobatch.launch.report.tables import rendered
from isobatch.models.protocols import Drawing

FILE_NAME = "sweep.json"
TEST, VALID = HELD_OUT_SPLITS
LOOKS = (("0.7", "x", "stopped or failed"), ("C0", "o", "whole run"), ("C3", "o", "best"))
"""Colour, marker and name of settings in a picture."""


def searched(found: Mapping[str, Any]) -> list[str]:
    """The fields in which the settings differ."""
    settings = [row["values"] for row in found["rows"]]
    return [name for name in settings[0] if any(one[name] != settings[0][name] for one in settings)]


def places_of(row: Mapping[str, Any] | None, folder: Path) -> list[Path]:
    """The runs of a setting, if there is one: they lie beside the sweep's folder, wherever that is now."""
    return [folder.parent / Path(place).name for place in (row or {"runs": ()})["runs"]]


def curve(run: RunFolder | None, name: str = "step") -> list[tuple[int, float]]:
    """Steps with a field of the validation split's rows; NaN where a row has none."""
    rows = placed_rows(run, ("seal", "split")) if run else []  # phases end with a seal
    known = [row for row in rows if row.get("split") == VALID]
    return [(row["at"], math.nan if row.get(name) is None else row[name]) for row in known]


def rows_of(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a setting: what was searched, then mean and deviation over n seeds; of one that --halving stopped
    where it was compared last.
    """
    metric, best, alone = found["metric"], (found["best"] or {}).get("values"), len(found["rows"]) == 1
    return [
        {
            "best": "*" if row["values"] == best and not alone else "",
            **{name: row["values"][name] for name in searched(found)},
            f"{VALID} {metric}": row["metrics"].get(metric),
            "deviation": row["deviations"].get(metric),
            "n": len(row["runs"]) - row["failed"],
            "failed": row["failed"],
            "stopped at step": row.get("stopped"),
            "run": Path(row["runs"][0]).name,
        }
        for row in found["rows"]
    ]


def cells_of(found: Mapping[str, Any]) -> list[list[str]]:
    """The rows for a person, a figure in one cell, below their head."""
    cells = [["best", *searched(found), f"{VALID} {found['metric']}", "n", "run"]]
    for row in rows_of(found):
        best, *values, mean, deviation, n, failed, stopped, run = row.values()
        said = [_figure(mean, deviation), stopped and f"at step {stopped}", failed and f"({failed} failed)"]
        cells.append([best, *map(str, values), " ".join(filter(None, said)), str(n), run])
    return cells


def _figure(mean: float | None, deviation: float | None) -> str:
    text = "" if mean is None else f"{mean:.4g}"
    return text if deviation is None else f"{text} +- {deviation:.2g}"


def legend(found: Mapping[str, Any]) -> Iterator[str]:
    """What the table's figures are, that of the best on the test split, and where to search on."""
    best, metric, rows = found["best"], found["metric"], found["rows"]
    if best is None:
        yield f"best: none, as no run has a {metric} of the {VALID} split to choose by"
    elif rows[1:]:
        yield f"best: by {VALID} {metric} ({'lower' if found['direction'] == 'min' else 'higher'} is better)"
    if best and metric in (test := best.get(TEST, {"metrics": ()}))["metrics"]:
        figure = _figure(test["metrics"][metric], test["deviations"].get(metric))
        yield f"{TEST}{', of the best alone' if rows[1:] else ''}: {figure}"
    if any("stopped" in row for row in rows):
        saved = f"{found['steps_saved']:,} of {found['steps']:,} steps were saved"
        yield f"at step N: stopped there, with this {metric}; {saved}"
    elif "rungs" in found:
        yield "no run was stopped: they evaluate at their end alone; --eval-every 5% lets --halving stop them"
    if any(row["deviation"] is not None for row in rows_of(found)):
        yield "+-: standard deviation of n seeds around their mean"
    yield from found.get("edges", ())


def write_tables(found: Mapping[str, Any], folder: Path) -> None:
    """Write sweep.csv, all digits for a program; and sweep.md and sweep.tex, for a text."""
    rows, cells = rows_of(found), [line[:-1] for line in cells_of(found)]
    with (folder / "sweep.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for ending in ("md", "tex"):
        text = rendered(f"sweep.{ending}.jinja", cells=cells, notes=list(legend(found)))
        atomic_files.write_text(folder / f"sweep.{ending}", f"{text}\n")


def drawing(found: Mapping[str, Any], folder: Path) -> Drawing:
    """The metric over the steps of each setting, its seeds a band around their mean, and over each field that
    was searched among numbers.
    """
    rows, metric, best = found["rows"], found["metric"], (found["best"] or {}).get("values")
    flags = [n for n in searched(found) if all(type(row["values"][n]) in (int, float) for row in rows)]

    def draw(over_steps: Any, *over_flags: Any) -> None:
        from matplotlib.ticker import LogLocator

        for row, figures in zip(rows, rows_of(found), strict=True):
            mean, deviation = figures[f"{VALID} {metric}"], figures["deviation"]
            kind = 0 if figures["stopped at step"] or mean is None else 1 + (row["values"] == best)
            look = dict(zip(("color", "marker", "label"), LOOKS[kind], strict=True), lw=1, zorder=2 + kind)
            curves = [dict(curve(RunFolder(place), metric)) for place in places_of(row, folder)]
            if curves := [one for one in curves if one]:
                steps = sorted(set(curves[0]).intersection(*curves))
                values = np.array([[one[step] for step in steps] for one in curves])
                middle, spread = values.mean(0), values.std(0, ddof=min(1, len(curves) - 1))
                over_steps.plot(steps, middle, markevery=[-1], **look)
                over_steps.fill_between(
                    steps, middle - spread, middle + spread, fc=look["color"], alpha=0.2, lw=0
                )
            for name, ax in zip(flags, over_flags, strict=True) if mean is not None else ():
                ax.errorbar(row["values"][name], mean, deviation, capsize=3, **look)
        for name, ax in zip(["step", *flags], [over_steps, *over_flags], strict=True):
            ax.set(xlabel=name, ylabel=f"{VALID} {metric}")
            for axis in (ax.yaxis, ax.xaxis)[: 1 + (name != "step")]:
                low, high = axis.get_data_interval()
                if 0 < low <= high / 10:
                    ax.set(**{f"{axis.axis_name}scale": "log"})
                    axis.set_major_locator(LogLocator(subs=(1, 3)))
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_formatter("")
        lines = dict(zip(*over_steps.get_legend_handles_labels()[::-1], strict=True))
        over_steps.legend(lines.values(), lines.keys(), frameon=False)

    return Drawing("", draw, 5.0 * (1 + len(flags)), 4.0, 1 + len(flags))
