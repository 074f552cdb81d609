"""Figures by matplotlib, the same for the report and for plots/."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from isobatch.models.protocols import Drawing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure


def draw_figure(draw: Any, width: float, height: float, columns: int = 1) -> Figure:
    """The figure that `draw(*axes)` draws; width and height in inches. A `$` in a name is no formula."""
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


def training_drawings(runs: Sequence[dict[str, Any]], names: tuple[str, ...]) -> list[Drawing]:
    """A figure of the loss, and one for each metric of `names` that has a curve: all runs in each."""
    shown = [n for n in dict.fromkeys(("loss", *names)) if any(has_curve(run, n) for run in runs)]
    return [Drawing(f"Training {name}", _drawer(runs, name), 4.6, 3.0) for name in shown]


def training_curves(run: dict[str, Any], names: tuple[str, ...]) -> Drawing:
    """The figures of one run side by side."""
    drawings = training_drawings([run], names)

    def draw(*axes: Any) -> None:
        for ax, drawing in zip(axes, drawings, strict=True):
            drawing.draw(ax)

    count = max(1, len(drawings))
    return Drawing("Training", draw if drawings else lambda *_: None, 4.2 * count, 3.0, columns=count)


def has_curve(run: dict[str, Any], name: str) -> bool:
    """Whether there is more than a single number to draw."""
    columns = (run["training"].get(name, ()), run["evaluations"].get(name, ()))
    return any(sum(value is not None for value in column) > 1 for column in columns)


def _drawer(runs: Sequence[dict[str, Any]], name: str) -> Callable[[Any], None]:
    def draw(ax: Any) -> None:
        for place, run in enumerate(runs):
            _draw_run(ax, run, name, f"C{place}", f"{run['run']}: " if len(runs) > 1 else "")
        words = name.replace("_", " ")
        note = ", smoothed" if any(name in run["training"] for run in runs) else ""
        ax.set(xlabel="step")
        ax.set_title(words + note, loc="left", fontsize=10)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8, frameon=False)

    return draw


def _draw_run(ax: Any, run: dict[str, Any], name: str, colour: str, prefix: str) -> None:
    """Training faint and smoothed, evaluations as a line, and those of the kept checkpoint as points."""
    training, held_out, final = run["training"], run["evaluations"], run["final_evaluations"]
    if name in training:
        steps, values = training["step"], training[name]
        ax.plot(steps, [float("nan") if v is None else v for v in values], lw=0.6, alpha=0.25, color=colour)
        ax.plot(steps, smoothed(values), lw=1.4, color=colour, label=f"{prefix}training")
    if name in held_out:
        look = {"marker": "o", "ms": 3, "lw": 1.2, "ls": "--" if name in training else "-"}
        ax.plot(held_out["step"], held_out[name], **look, color=colour, label=f"{prefix}valid")
    if name in final:
        look = {"marker": "*", "ms": 10, "ls": "none", "mfc": "none"}
        ax.plot(final["step"], final[name], **look, color=colour, label=f"{prefix}valid, kept checkpoint")
