"""Figures by matplotlib, the same for the report and for plots/."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from isobatch.models.protocols import Drawing

if TYPE_CHECKING:
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


def smoothed(values: list[float | None]) -> list[float | None]:
    """The mean of each value and its neighbours, a fortieth of the points on either side; None stays None.

    A mean of what came before, such as an exponential one, lags behind a loss that falls.
    """
    reach = len(values) // 40
    found: list[float | None] = []
    for place, value in enumerate(values):
        width = min(reach, place, len(values) - 1 - place)
        near = values[place - width : place + width + 1]
        known = [v for v in near if v is not None and math.isfinite(v)]
        found.append(sum(known) / len(known) if value is not None and known else None)
    return found


def training_curves(run: dict[str, Any], names: tuple[str, ...]) -> Drawing:
    """The loss over the steps, and each metric of `names` that the run has."""
    training, evaluations, final = run["training"], run["evaluations"], run.get("final", {})
    curves = {name: training if name in training else evaluations for name in names}
    more = [(curve, name) for name, curve in curves.items() if name in curve]

    def draw(loss: Any, *others: Any) -> None:
        if "loss" in training:
            steps, values = training["step"], training["loss"]
            loss.plot(steps, values, lw=0.6, alpha=0.3, color="C0")
            loss.plot(steps, smoothed(values), lw=1.2, color="C0", label="training, smoothed")
        if "loss" in evaluations:
            loss.plot(
                evaluations["step"],
                evaluations["loss"],
                marker="o",
                ms=3,
                lw=1.2,
                color="C1",
                label="held out",
            )
        if "loss" in final:
            loss.plot(
                final["step"],
                final["loss"],
                ls="",
                marker="*",
                ms=8,
                color="C1",
                label="held out, exported weights",
            )
        loss.set(xlabel="step", ylabel="loss")
        loss.set_title(f"{run['run']} ({run['task']})", loc="left")
        if loss.lines:
            loss.legend(fontsize=8, frameon=False)
        for ax, (curve, name) in zip(others, more, strict=True):
            ax.plot(curve["step"], curve[name], lw=1.2)
            ax.set(xlabel="step", ylabel=name)

    return Drawing("Training", draw, 3.8 * (1 + len(more)), 2.6, columns=1 + len(more))
