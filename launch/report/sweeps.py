"""What a sweep found, by its sweep.json: a table of its settings, for a paper too, and its picture."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import nearest_hint
from isobatch.core.terminal import rendered
from isobatch.engine.runs.run_folder import SWEEP, RunFolder
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.launch.report.records import placed_rows, save
from isobatch.launch.report.tables import format_value, in_markdown, with_error
from isobatch.models.protocols import Drawing

TEST, VALID = HELD_OUT_SPLITS
LOOKS = (("0.7", "x", "stopped or failed"), ("C0", "o", "whole run"), ("C3", "o", "best"))
"""Colour, marker and name of settings in a picture; up to MOST_NAMED have a colour and a name each."""
MOST_NAMED = 10
NO_TEST = "has no test split: --data FOLDER with a test.csv in it has one, `evaluate RUN --test FILE` another"


def read(folder: Path, metric: str | None = None) -> dict[str, Any]:
    """What a sweep came to, shown by another metric than chose the best if one is named, such as `test_loss`,
    which is of the test split. Raises UserError.
    """
    found: dict[str, Any] = atomic_files.read_json(folder / SWEEP)
    found["by"], name = found["metric"], metric or found["metric"]
    if name.startswith(f"{TEST}_"):
        name, found["split"] = name.removeprefix(f"{TEST}_"), TEST
        # The summaries of its runs alone hold them.
        groups = ([RunFolder(place).summary() or {} for place in places_of(r, folder)] for r in found["rows"])
        figures = (means([one.get("metrics_by_split", {}).get(TEST, {}) for one in some]) for some in groups)
        found["rows"] = [{**row, **of_it} for row, of_it in zip(found["rows"], figures, strict=True)]
    known = dict.fromkeys(name for row in found["rows"] for name in row["metrics"])
    if metric and name not in known:
        names = [f"{metric.removesuffix(name)}{one}" for one in known]
        has = f"has {', '.join(names)}{nearest_hint(metric, names)}" if names else NO_TEST
        raise UserError(f"--metric {metric}: {folder} {has}")
    return {**found, "metric": name}


def means(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Means and standard deviations of the numbers in the metrics of several runs."""
    names = dict.fromkeys(name for row in rows for name in row if isinstance(row[name], float | int))
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    return {
        "metrics": {name: statistics.fmean(found) for name, found in columns.items()},
        "deviations": {name: statistics.stdev(found) for name, found in columns.items() if len(found) > 1},
    }


def searched(found: Mapping[str, Any]) -> list[str]:
    """The fields in which the settings differ."""
    settings = [row["values"] for row in found["rows"]]
    return [name for name in settings[0] if any(one[name] != settings[0][name] for one in settings)]


def places_of(row: Mapping[str, Any] | None, folder: Path) -> list[Path]:
    """The runs of a setting, if there is one: they lie beside the sweep's folder, wherever that is now."""
    return [folder.parent / Path(place).name for place in (row["runs"] if row else ())]


def curve(run: RunFolder | None, name: str = "step") -> list[tuple[int, float]]:
    """Steps with a field of the validation split's rows; NaN where a row has none."""
    rows = placed_rows(run, ("seal", "split")) if run else []  # phases end with a seal
    known = [row for row in rows if row.get("split") == VALID]
    return [(row["at"], math.nan if row.get(name) is None else row[name]) for row in known]


def cells_of(found: Mapping[str, Any]) -> list[list[str]]:
    """A row a setting below their head: what was searched, then mean and deviation over n seeds, of one that
    --halving stopped where it was compared last; without columns that say nothing.
    """
    metric, rows, names = found["metric"], found["rows"], searched(found)
    figures = (f"{found['split']} {metric}", "deviation", "n", "failed", "stopped at step")
    lines = [["best", *names, *figures, "run"]]
    for row in rows:
        is_best = rows[1:] and found["best"] and row["values"] == found["best"]["values"]
        counts = (len(row["runs"]) - row["failed"], row["failed"] or "", row.get("stopped", ""))
        values = [format_value(row["values"][name]) for name in names]
        values += [*figures_of(row, metric), *map(str, counts), Path(row["runs"][0]).name]
        lines.append(["*" if is_best else "", *values])
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return list(map(list, zip(*columns, strict=True)))


def figures_of(row: Mapping[str, Any], metric: str) -> list[str]:
    """Mean and deviation of a row, or of the best's test split, as text; empty where it has none."""
    return with_error(*(row[part].get(metric, "") for part in ("metrics", "deviations")))


def legend(found: Mapping[str, Any]) -> list[str]:
    """What the table's figures are, that of the best on the test split, and where to search on."""
    test = (found["best"] or {}).get(TEST) if found["split"] == VALID else None
    figures = [one for one in figures_of(test, found["metric"]) if one] if test else []
    return rendered(__file__, "sweep.txt", found=found, figures=figures, test=TEST, valid=VALID).splitlines()


def write_tables(found: Mapping[str, Any], file: Path) -> None:
    """Write the table as FILE.csv, and without the names of runs as FILE.md and FILE.tex."""
    cells, notes = cells_of(found), legend(found)
    with file.with_name(f"{file.name}.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, lineterminator="\n").writerows(cells)
    for ending in ("md", "tex"):
        shown = {"cells": [line[:-1] for line in cells], "notes": notes, "md": in_markdown}
        text = rendered(__file__, f"sweep.{ending}", **shown)
        atomic_files.write_text(file.with_name(f"{file.name}.{ending}"), f"{text}\n")


def draw(found: Mapping[str, Any], folder: Path, file: Path) -> list[Path]:
    """Draw the sweep that lies in `folder` as FILE.png and FILE.svg; returns both."""
    return [save(drawing(found, folder), Path(f"{file}.{ending}")) for ending in ("png", "svg")]


def drawing(found: Mapping[str, Any], folder: Path) -> Drawing:
    """The metric over the steps of each setting, its seeds a band around their mean, and over each field that
    was searched among numbers.
    """
    rows, metric, best = found["rows"], found["metric"], (found["best"] or {}).get("values")
    flags = [n for n in searched(found) if all(type(row["values"][n]) in (int, float) for row in rows)]

    def draw(over_steps: Any, *over_flags: Any) -> None:
        from matplotlib.ticker import LogLocator, MaxNLocator

        for number, row in enumerate(rows):
            mean, deviation = row["metrics"].get(metric), row["deviations"].get(metric)
            kind = 0 if "stopped" in row or mean is None else 1 + (row["values"] == best)
            look = dict(zip(("color", "marker", "label"), LOOKS[kind], strict=True), lw=1, zorder=2 + kind)
            if len(rows) <= MOST_NAMED:
                name = ", ".join(f"{n} {format_value(row['values'][n])}" for n in searched(found))
                look |= {"color": f"C{number}", "label": f"{name} ({look['label']})" if kind != 1 else name}
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
            ax.set(xlabel=name, ylabel=f"{VALID if name == 'step' else found['split']} {metric}")
            for axis in (ax.yaxis, ax.xaxis)[: 1 + (name != "step")]:
                axis.set_major_locator(MaxNLocator(5))
                low, high = axis.get_data_interval()
                if 0 < low * (10 if axis is ax.yaxis else 2.99) <= high:
                    ax.set(**{f"{axis.axis_name}scale": "log"})
                    axis.set_major_locator(LogLocator(subs=(1, 3) if 10 * low <= high else (1, 2, 3, 5)))
                    axis.set_major_formatter("{x:g}")
                    axis.set_minor_formatter("")
        lines = dict(zip(*over_steps.get_legend_handles_labels()[::-1], strict=True))
        over_steps.legend(lines.values(), lines.keys(), frameon=False)

    return Drawing("", draw, 5.0 * (1 + len(flags)), 4.0, 1 + len(flags))
