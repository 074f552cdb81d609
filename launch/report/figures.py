"""Figures by matplotlib, the same for the page and as PNG files: training, machine, and a task's own."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.launch.report.records import GPU_USE, read_records, report_of, task_of
from isobatch.models.protocols import Drawing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

    from isobatch.engine.runs.run_folder import RunFolder

DOTS_PER_INCH = 110
PANELS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("samples a second", 1.0, ("samples_per_second",)),
    ("milliseconds", 1e3, ("step_seconds", "data_seconds")),
    ("GB of memory", 1e-9, ("memory_bytes",)),
    ("GPU use, %", 1.0, ("gpu_utilisation",)),
    ("watts", 1.0, ("power_watts",)),
)
"""Figures of the machine over the steps: title, factor, and the fields that are lines."""
LABELS = {"step_seconds": "step", "data_seconds": "data wait"}


def draw_figure(draw: Any, width: float, height: float, columns: int = 1) -> Figure:
    """The figure that `draw(*axes)` draws; width and height in inches. A `$` in a name is no formula."""
    need("matplotlib", "a report")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)[0]
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
            ax.set_axisbelow(True)
        draw(*axes)
    return figure


def write_plots(run: RunFolder, folder: Path) -> list[Path]:
    """Draw a run's figures as PNG files into a folder; returns them. Raises UserError without any step."""
    task = task_of(run)
    report, record = report_of(task), read_records(run, task)
    if not record["training"].get("loss"):
        raise UserError(f"report --png: {run.folder} has trained no step yet")
    files = []
    for drawing in [training_curves(record), *(report.run_drawings(record) if report else [])]:
        file = folder / f"{drawing.title.lower().replace(' ', '-')}.png"
        figure = draw_figure(drawing.draw, drawing.width, drawing.height, drawing.columns)
        with atomic_files.explain_write_errors(file):
            folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".{file.name}")
            figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH)
            temporary.replace(file)
        files.append(file)
    return files


def training_curves(record: dict[str, Any]) -> Drawing:
    """The figures of one run's training side by side."""
    drawings = training_drawings([record], record["curves"])

    def draw(*axes: Any) -> None:
        for ax, drawing in zip(axes, drawings, strict=False):
            drawing.draw(ax)

    count = max(1, len(drawings))
    return Drawing("Training", draw, 4.2 * count, 3.0, columns=count)


def training_drawings(records: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Drawing]:
    """A figure of the loss, and one for each metric of `names` that has a curve: all runs in each."""
    shown = [n for n in dict.fromkeys(("loss", *names)) if any(_has_curve(one, n) for one in records)]
    return [Drawing(f"Training {name}", _drawer(records, name), 4.6, 3.0) for name in shown]


def _has_curve(record: dict[str, Any], name: str) -> bool:
    """Whether there is more than a single number to draw."""
    columns = (record["training"].get(name, ()), record["evaluations"].get(name, ()))
    return any(sum(value is not None for value in column) > 1 for column in columns)


def _drawer(records: Sequence[dict[str, Any]], name: str) -> Callable[[Any], None]:
    def draw(ax: Any) -> None:
        for place, record in enumerate(records):
            _draw_run(ax, record, name, f"C{place}", f"{record['run']}: " if len(records) > 1 else "")
        note = ", smoothed" if any(name in record["training"] for record in records) else ""
        _finish(ax, name.replace("_", " ") + note)

    return draw


def _finish(ax: Any, title: str) -> None:
    ax.set(xlabel="step")
    ax.set_title(title, loc="left", fontsize=10)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8, frameon=False)


def _draw_run(ax: Any, record: dict[str, Any], name: str, colour: str, prefix: str) -> None:
    """Training faint and smoothed, evaluations as a line, and those of the kept checkpoint as points."""
    training, held_out, final = record["training"], record["evaluations"], record["final_evaluations"]
    if name in training:
        steps, values = training["step"], training[name]
        ax.plot(steps, [math.nan if v is None else v for v in values], lw=0.6, alpha=0.25, color=colour)
        ax.plot(steps, smoothed(values), lw=1.4, color=colour, label=f"{prefix}training")
    if name in held_out:
        look = {"marker": "o", "ms": 3, "lw": 1.2, "ls": "--" if name in training else "-"}
        ax.plot(held_out["step"], held_out[name], **look, color=colour, label=f"{prefix}valid")
    if name in final:
        look = {"marker": "*", "ms": 10, "ls": "none", "mfc": "none"}
        ax.plot(final["step"], final[name], **look, color=colour, label=f"{prefix}valid, kept checkpoint")


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


def use_drawings(record: Mapping[str, Any]) -> list[Drawing]:
    """How a run used its machine over the steps; nothing before the first logged one."""
    return [
        Drawing(title, partial(_draw_machine, record, title, factor, fields), 3.8, 2.4)
        for title, factor, fields in PANELS
        if not record["machine"].keys().isdisjoint(fields)
    ]


def _draw_machine(
    record: Mapping[str, Any], title: str, factor: float, fields: Sequence[str], ax: Any
) -> None:
    curves, foreseen = record["machine"], record["predicted_peak_memory_bytes"]
    levels = {"GB of memory": ("predicted", foreseen and foreseen / 1e9), "GPU use, %": ("target", GPU_USE)}
    named, level = levels.get(title, ("", None))
    for name in fields:
        if name in curves:
            shown = [None if v is None else v * factor for v in curves[name]]
            ax.plot(curves["step"], shown, lw=1, label=LABELS.get(name, "measured" if level else ""))
    if level:
        ax.axhline(level, ls="--", lw=0.9, color="#57606a", label=named)
    _finish(ax, title)
    ax.set_ylim(bottom=0)
