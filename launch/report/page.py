"""A report in parts, drawn as one HTML page without scripts or anything from elsewhere, and as Markdown."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, NamedTuple

from isobatch.core.measures import printable
from isobatch.core.package import ROOT
from isobatch.launch.report.figures import draw_figure, machine_drawing
from isobatch.launch.report.tables import baselines_tables, runs_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from isobatch.launch.report.contents import Contents, Group
    from isobatch.models.protocols import Drawing

TEMPLATE = ROOT / "launch" / "report" / "page.html.jinja"


class PagePart(NamedTuple):
    """A part of the report."""

    kind: str
    """`h2`, `h3`, `verdict`, `note`, `sample`, `table` or `figure`."""
    text: str = ""
    rows: Sequence[Sequence[str]] = ()
    """Of a table, its head first."""
    drawing: Drawing | None = None


def summary_parts(contents: Contents) -> Iterator[PagePart]:
    """What the models are worth: all that a terminal shows, too."""
    runs, rest = contents.runs, contents.unmeasured()
    yield from (PagePart("verdict", f"{run['run']}: {run['remark']}") for run in runs if run.get("remark"))
    for title, rows in baselines_tables(rest):
        yield from (PagePart("h2", title), PagePart("table", rows=rows))
    for group in contents.groups:
        yield from (PagePart("verdict", verdict) for verdict in group.verdicts())
        yield PagePart("table", rows=group.table())
        yield PagePart("note", caption(group, contents.machine))
    if not contents.groups:
        yield PagePart("note", f"The training ran on {contents.machine}.")
    yield PagePart("table", rows=runs_table(rest))


def parts_of(contents: Contents) -> Iterator[PagePart]:
    """The parts in order: the summary, its details, the training, and how the runs used their machines."""
    yield from summary_parts(contents)
    drawings = [drawing for group in contents.groups for drawing in group.report.drawings(group.rows)]
    drawings += contents.drawings
    for title in dict.fromkeys(drawing.title for drawing in drawings):
        yield PagePart("h2", title)
        yield from (PagePart("figure", drawing=one) for one in drawings if one.title == title)
    for group in contents.groups:
        first_forms = {row["run"]: row for row in reversed(group.rows)}
        for one in (one for row in reversed(first_forms.values()) for one in group.report.tables(row)):
            yield from (PagePart("h2", one.title), PagePart("note", one.note))
            yield PagePart("table", rows=[one.head, *one.rows])
    for run in contents.runs:
        if run["sample"]:
            yield from (PagePart("h2", f"Sample of {run['run']}"), PagePart("sample", str(run["sample"])))
    yield PagePart("h2", "How they ran")
    for run in contents.runs:
        yield PagePart("h3", f"{run['run']} ({run['task']}): {run['state']}")
        yield from (PagePart("note", note) for note in run["notes"])
        if run["use"]:
            yield PagePart("table", rows=[["", "measured", "beside", "is"], *run["use"]])
            yield PagePart("figure", drawing=machine_drawing(run))
        else:
            yield PagePart("note", "No step is logged yet.")


def caption(group: Group, machine: str) -> str:
    """What the table's figures were measured on, and which of them chose their own checkpoint by it."""
    chosen = dict.fromkeys(row["run"] for row in group.rows if row["chose_checkpoint"])
    said = (
        f" The checkpoint of {' and '.join(chosen)} was chosen by these samples, which flatters it a"
        " little: give the data a test split to be judged by."
    )
    return group.report.caption(group.rows[0], machine) + (said if chosen else "")


def render_page(contents: Contents) -> str:
    """The text of report.html."""
    from jinja2 import Environment, StrictUndefined

    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE.read_text())
    return printable(template.render(parts=parts_of(contents), svg=_svg))


def _svg(drawing: Drawing) -> str:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        text = io.StringIO()
        draw_figure(drawing).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def render_markdown(contents: Contents) -> str:
    """The text of report.md: the page without its figures."""
    lines = ["# Report"]
    for kind, text, rows, _ in parts_of(contents):
        mark = {"h2": "## ", "h3": "### "}.get(kind, "")
        if rows:
            head, *body = ("| " + " | ".join(map(_escaped, cells)) + " |" for cells in rows)
            lines += ["", head, "|" + "---|" * len(rows[0]), *body]
        elif kind == "sample":
            lines += ["", *(f"    {line}" for line in text.splitlines())]
        elif text:
            lines += ["", mark + _escaped(text)]
    return printable("\n".join(lines) + "\n")


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: no table, link, code, emphasis or HTML begins in it."""
    return re.sub(r"([\\|`<\[*])", r"\\\1", " ".join(text.split()))
