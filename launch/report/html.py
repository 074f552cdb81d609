"""The report as one HTML page without scripts, and without fonts or images from elsewhere."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from isobatch.core.package import ROOT
from isobatch.launch.report.tables import runs_table

if TYPE_CHECKING:
    from isobatch.launch.report.contents import Contents
    from isobatch.models.protocols import Drawing

TEMPLATE = ROOT / "launch" / "report" / "page.html.jinja"


def render_page(contents: Contents) -> str:
    """The text of report.html."""
    from jinja2 import Environment, StrictUndefined

    groups = [
        {
            "caption": group.caption(contents.machine),
            "columns": group.report.columns,
            "rows": group.table(),
            "figures": [_figure(drawing) for drawing in group.report.drawings(group.rows)],
        }
        for group in contents.groups
    ]
    sections: dict[str, list[dict[str, str]]] = {}
    for drawing in contents.run_drawings():
        sections.setdefault(drawing.title, []).append(_figure(drawing))
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE.read_text())
    return template.render(
        machine=contents.machine,
        groups=groups,
        runs_table=runs_table(contents.unmeasured()),
        sections=sections,
        curves=[_curves(run, names) for run, names in zip(contents.runs, contents.curves(), strict=True)],
        written=[run for run in contents.runs if run["sample"]],
    )


def _figure(drawing: Drawing) -> dict[str, str]:
    return {
        "title": drawing.title,
        "svg": _svg(drawing.draw, drawing.width, drawing.height, drawing.columns),
    }


def _svg(draw: Any, width: float, height: float, columns: int = 1) -> str:
    """An inline SVG of what `draw(*axes)` draws; width and height in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False)[0]
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
            ax.set_axisbelow(True)
        draw(*axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _curves(run: dict[str, Any], names: tuple[str, ...]) -> str:
    """An SVG of the loss and of each metric of `names` that the run has."""
    training, evaluations = run["training"], run["evaluations"]
    curves = {name: training if name in training else evaluations for name in names}
    more = [(curve, name) for name, curve in curves.items() if name in curve]

    def draw(loss: Any, *others: Any) -> None:
        loss.plot(training["step"], training["loss"], lw=0.8, alpha=0.7, label="training")
        if "loss" in evaluations:
            loss.plot(evaluations["step"], evaluations["loss"], marker="o", ms=2.5, lw=1.2, label="held out")
        loss.set(xlabel="step", ylabel="loss")
        loss.set_title(f"{run['run']} ({run['task']})", loc="left")
        loss.legend(fontsize=8, frameon=False)
        for ax, (curve, name) in zip(others, more, strict=True):
            ax.plot(curve["step"], curve[name], lw=1.2)
            ax.set(xlabel="step", ylabel=name)

    return _svg(draw, 3.8 * (1 + len(more)), 2.6, columns=1 + len(more))
