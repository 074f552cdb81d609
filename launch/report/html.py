"""The report as one HTML page without scripts, and without fonts or images from elsewhere."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import printable
from isobatch.core.package import ROOT
from isobatch.launch.report.figures import draw_figure, training_drawings
from isobatch.launch.report.machine_use import use_drawings
from isobatch.launch.report.tables import baselines_tables, differences_table, runs_table

if TYPE_CHECKING:
    from isobatch.launch.report.contents import Contents
    from isobatch.models.protocols import Drawing

TEMPLATE = ROOT / "launch" / "report" / "page.html.jinja"


def render_page(contents: Contents, refresh: int | None = None) -> str:
    """The text of report.html. `refresh`: seconds after which a browser should ask for it again."""
    from jinja2 import Environment, StrictUndefined

    groups = [
        {
            "caption": group.caption(contents.machine),
            "verdicts": group.verdicts(),
            "columns": group.report.columns,
            "rows": group.table(),
            "tables": group.model_tables(),
            "figures": [_figure(drawing) for drawing in group.report.drawings(group.rows)],
        }
        for group in contents.groups
    ]
    sections: dict[str, list[dict[str, str]]] = {}
    for drawing in contents.run_drawings():
        sections.setdefault(drawing.title, []).append(_figure(drawing))
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE.read_text())
    page = template.render(
        machine=contents.machine,
        groups=groups,
        runs_table=runs_table(contents.unmeasured()),
        remarks=[f"{run['run']}: {run['remark']}" for run in contents.runs if run.get("remark")],
        baselines=baselines_tables(contents.unmeasured()),
        sections=sections,
        refresh=refresh,
        runs=contents.runs,
        machine_curves=[_machine_curves(run) for run in contents.runs],
        differences=differences_table(contents.runs),
        curves=_curves(contents),
        written=[run for run in contents.runs if run["sample"]],
    )
    return printable(page)


def _figure(drawing: Drawing) -> dict[str, str]:
    return {
        "title": drawing.title,
        "svg": _svg(drawing.draw, drawing.width, drawing.height, drawing.columns),
    }


def _svg(draw: Any, width: float, height: float, columns: int = 1) -> str:
    """An inline SVG of what `draw(*axes)` draws; width and height in inches."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        text = io.StringIO()
        draw_figure(draw, width, height, columns).savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _machine_curves(run: dict[str, Any]) -> list[str]:
    """How the run used its machine over the steps; nothing before the first logged one."""
    drawings = use_drawings(run["machine"], run["predicted_peak_memory_bytes"])
    return [_svg(drawing.draw, drawing.width, drawing.height) for drawing in drawings]


def _curves(contents: Contents) -> list[str]:
    """A figure per question and task: runs of one task lie over each other."""
    tasks: dict[str, tuple[list[dict[str, Any]], tuple[str, ...]]] = {}
    for run, names in zip(contents.runs, contents.curves(), strict=True):
        tasks.setdefault(run["task"], ([], names))[0].append(run)
    drawings = [drawing for runs, names in tasks.values() for drawing in training_drawings(runs, names)]
    return [_svg(drawing.draw, drawing.width, drawing.height) for drawing in drawings]
