"""Figures by matplotlib, the same for the page and as PNG files: training, machine, and a task's own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.launch.report.records import read_records, report_of, task_of
from isobatch.models.protocols import Drawing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.models.protocols import TaskReport

    Line = tuple[Sequence[float], Sequence[float | None] | np.ndarray, dict[str, Any]]
    """Steps, values, and how matplotlib draws them."""
    Panels = dict[str, list[Line]]
    """Title -> lines over the steps."""

DOTS_PER_INCH = 110
MACHINE = {
    "samples a second": ("samples_per_second", 1.0),
    "milliseconds a step": ("step_seconds", 1e3),
    "milliseconds for data": ("data_seconds", 1e3),
    "GB of memory": ("memory_bytes", 1e-9),
    "GPU use, %": ("gpu_utilisation", 1.0),
    "watts": ("power_watts", 1.0),
}
"""Figures of the machine over the steps -> their field, and a factor."""


def draw_figure(drawing: Drawing) -> Figure:
    """The figure of a drawing. A `$` in a name is no formula."""
    need("matplotlib", "a report")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(drawing.width, drawing.height), layout="constrained")
        axes = figure.subplots(1, drawing.columns, squeeze=False)[0]
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
            ax.set_axisbelow(True)
        drawing.draw(*axes)
    return figure


def write_plots(run: RunFolder, folder: Path) -> list[Path]:
    """Draw a run's figures as PNG files into a folder; returns them. Raises UserError without any step."""
    task = task_of(run)
    record = read_records(run, task)
    if not record["training"].get("loss"):
        raise UserError(f"report --png: {run.folder} has trained no step yet")
    files = []
    for drawing in drawings_of([record], [report_of(task)]):
        file = folder / f"{drawing.title.lower().replace(' ', '-')}.png"
        with atomic_files.explain_write_errors(file):
            folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".{file.name}")
            draw_figure(drawing).savefig(temporary, format="png", dpi=DOTS_PER_INCH)
            temporary.replace(file)
        files.append(file)
    return files


def drawings_of(records: Sequence[dict[str, Any]], reports: Sequence[TaskReport | None]) -> list[Drawing]:
    """The training of the runs of each task over each other, and what their tasks draw of each run."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        tasks.setdefault(record["task"], []).append(record)
    found = [_over_steps("Training", training_panels(alike)) for alike in tasks.values()]
    for record, report in zip(records, reports, strict=True):
        found += report.run_drawings(record) if report else []
    return [drawing for drawing in found if drawing.columns]


def machine_drawing(record: Mapping[str, Any]) -> Drawing:
    """How a run used its machine over the steps; of no columns before the first logged one."""
    curves = record["machine"]
    return _over_steps(
        "",
        {
            title: [(curves["step"], np.array(curves[field], float) * factor, {})]
            for title, (field, factor) in MACHINE.items()
            if field in curves
        },
    )


def training_panels(records: Sequence[dict[str, Any]]) -> Panels:
    """The loss, and each metric that has a curve: all runs in each."""
    found: Panels = {}
    for name in dict.fromkeys(("loss", *records[0]["curves"])):
        lines = [
            line
            for place, record in enumerate(records)
            for line in _lines(record, name, f"C{place}", f"{record['run']}: " if records[1:] else "")
        ]
        if any(sum(value is not None for value in values) > 1 for _, values, _ in lines):
            found[name.replace("_", " ")] = lines
    return found


def _lines(record: Mapping[str, Any], name: str, colour: str, run: str) -> Iterator[Line]:
    """Training faint and smoothed, evaluations as a line, and those of the kept checkpoint as points."""
    training, held_out, final = record["training"], record["evaluations"], record["final_evaluations"]
    if name in training:
        steps, values = training["step"], training[name]
        yield steps, values, {"color": colour, "lw": 0.6, "alpha": 0.25}
        yield steps, smoothed(values), {"color": colour, "label": f"{run}training, smoothed"}
    if name in held_out:
        look = {"color": colour, "marker": "o", "ms": 3, "ls": "--" if name in training else "-"}
        yield held_out["step"], held_out[name], look | {"label": f"{run}valid"}
    if name in final:
        look = {"color": colour, "marker": "*", "ms": 10, "ls": "none", "mfc": "none"}
        yield final["step"], final[name], look | {"label": f"{run}valid, kept checkpoint"}


def _over_steps(title: str, panels: Panels) -> Drawing:
    """The panels side by side."""

    def draw(*axes: Any) -> None:
        for ax, (name, lines) in zip(axes, panels.items(), strict=True):
            for steps, values, look in lines:
                ax.plot(steps, values, **look)
            ax.set(xlabel="step")
            ax.set_title(name, loc="left", fontsize=10)
            if ax.get_legend_handles_labels()[0]:
                ax.legend(fontsize=8, frameon=False)

    return Drawing(title, draw, 4.2 * len(panels), 3.0, columns=len(panels))


def smoothed(values: Sequence[float | None]) -> list[float]:
    """The mean of each value and its neighbours, a fortieth of the points on either side; None is NaN.

    A mean of what came before, such as an exponential one, lags behind a loss that falls.
    """
    reach = len(values) // 40
    found = []
    for place, value in enumerate(values):
        width = min(reach, place, len(values) - 1 - place)
        near = values[place - width : place + width + 1]
        known = [v for v in near if v is not None and math.isfinite(v)]
        found.append(sum(known) / len(known) if value is not None and known else math.nan)
    return found
