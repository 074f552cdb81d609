"""Figures by matplotlib, the same for the report and for plots/."""

from __future__ import annotations

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


def training_curves(run: dict[str, Any], names: tuple[str, ...]) -> Drawing:
    """The loss over the steps, and each metric of `names` that the run has."""
    training, evaluations = run["training"], run["evaluations"]
    curves = {name: training if name in training else evaluations for name in names}
    more = [(curve, name) for name, curve in curves.items() if name in curve]

    def draw(loss: Any, *others: Any) -> None:
        if "loss" in training:
            loss.plot(training["step"], training["loss"], lw=0.8, alpha=0.7, label="training")
        if "loss" in evaluations:
            loss.plot(evaluations["step"], evaluations["loss"], marker="o", ms=2.5, lw=1.2, label="held out")
        loss.set(xlabel="step", ylabel="loss")
        loss.set_title(f"{run['run']} ({run['task']})", loc="left")
        if loss.lines:
            loss.legend(fontsize=8, frameon=False)
        for ax, (curve, name) in zip(others, more, strict=True):
            ax.plot(curve["step"], curve[name], lw=1.2)
            ax.set(xlabel="step", ylabel=name)

    return Drawing("Training", draw, 3.8 * (1 + len(more)), 2.6, columns=1 + len(more))
