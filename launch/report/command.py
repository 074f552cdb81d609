"""`report`: compares runs: accuracy with its confidence interval, size, and speed measured here."""

from __future__ import annotations

import contextlib
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.measures import printable
from isobatch.core.number_ranges import PortNumber
from isobatch.core.terminal.status import doing
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions, open_run
from isobatch.launch.report.contents import Contents, collect
from isobatch.launch.report.html import render_page
from isobatch.launch.report.plots import FOLDER, write_plots
from isobatch.launch.report.tables import (
    baselines_tables,
    differences_table,
    metric_line,
    metrics_of,
    runs_table,
    table_beside,
    text_table,
)
from isobatch.launch.report.watch import DRAW_SECONDS, LOCAL, make_server

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_COLUMNS = 1000
"""Characters of a line where no terminal limits them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions(TrustOptions):
    """Flags of `report`."""

    to: str | None = None
    """Folder for report.md, report.json and report.html; by default report/ in the last run's folder."""
    png: bool = False
    """Only draw the figures of each run into its plots/, or into --to FOLDER; also while it trains."""
    json: bool = False
    """report.json on standard output."""
    watch: bool = False
    """Serve the page on this machine and draw it anew while the run trains; Ctrl-C ends."""
    port: PortNumber | None = None
    """Of --watch; by default any that is free."""


def report(words: Sequence[str]) -> int:
    """Usage: report RUN... [--to FOLDER] [--json] [--png], or report RUN --watch [--port N]

    Markdown, JSON and one HTML page that opens offline. The first run is the baseline that the others are
    compared with. Of a run that is not done the page shows what there is; --watch follows it while it trains.
    """
    positional, flags = split_words(words)
    options = command_options(flags, ReportOptions, "report")
    if not positional:
        raise UserError("report: give the folders of one or more runs, the baseline first")
    runs = [RunFolder.open(place) for place in positional]
    if options.trust:
        runs = [open_run(run.folder, trust=True) for run in runs]
    if options.png:
        return _draw(runs, options.to)
    if options.watch:
        return watch(runs, options)
    if options.port is not None:
        raise UserError(f"--port {options.port}: means nothing without --watch")
    folder = Path(options.to).expanduser() if options.to else runs[-1].folder / "report"
    contents = write_report(runs, folder)
    print(atomic_files.json_text(contents.to_dict()) if options.json else text_of(contents, folder))
    return 0


def _draw(runs: Sequence[RunFolder], to: str | None) -> int:
    """Draw the figures of runs; of several, each into a folder of its own in `to`."""
    for run in runs:
        folder = Path(to).expanduser() if to else run.folder / FOLDER
        for file in write_plots(run, folder / run.folder.name if to and runs[1:] else folder):
            print(printable(file))
    return 0


def watch(runs: Sequence[RunFolder], options: ReportOptions) -> int:
    """Serve the page of the runs until Ctrl-C. Raises UserError where the port is taken."""
    if options.to or options.json:
        raise UserError("--watch serves a page: it writes no files, so leave --to and --json out")
    with (
        make_server(lambda: live_page(runs), options.port or 0) as server,
        contextlib.suppress(KeyboardInterrupt),
    ):
        doing()
        print(f"http://{LOCAL}:{server.server_address[1]}/ (Ctrl-C ends)", flush=True)
        server.serve_forever()
    return 0


def live_page(runs: Sequence[RunFolder]) -> str:
    """The page of the runs as they stand now; a browser asks for it again while one of them trains."""
    contents = collect([RunFolder.open(run.folder) for run in runs], measure=False)
    trains = any(run["state"] == "training" for run in contents.runs)
    return render_page(contents, refresh=int(DRAW_SECONDS) if trains else None)


def write_report(runs: Sequence[RunFolder], folder: Path) -> Contents:
    """Measure and compare runs that are done; write report.json, report.md and report.html. Of other runs
    only the records are shown. Raises UserError.
    """
    contents = collect(runs)
    with atomic_files.explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    doing("drawing the report")
    atomic_files.write_json(folder / "report.json", contents.to_dict())
    atomic_files.write_text(folder / "report.md", markdown(contents) + "\n")
    atomic_files.write_text(folder / "report.html", render_page(contents))
    return contents


def text_of(contents: Contents, folder: Path) -> str:
    """What a command prints of a report: verdicts, the columns that the terminal has room for, and the
    metrics of runs that were not measured.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else MOST_COLUMNS
    parts = []
    for group in contents.groups:
        parts += group.verdicts()
        parts.append(text_table([list(group.report.columns), *group.table()], width))
    for run in contents.unmeasured():
        remark = [run["remark"]] if run.get("remark") else []
        beside, rest = table_beside(metrics_of(run), run["task"])
        tables = ["", text_table(beside, width), ""] if beside else []
        head = f"{run['run']} ({run['task']}): {run['state']}" + (f", {run['split']}" if run["split"] else "")
        lines = [head, *remark, *tables, *_metric_lines(rest)]
        parts.append("\n".join(lines))
    return printable("\n\n".join([*parts, f"all figures: {folder}/report.html, as text {folder}/report.md"]))


def markdown(contents: Contents) -> str:
    """The text of report.md."""
    lines = ["# Report"]
    lines += [line for run in contents.runs if run.get("remark") for line in ("", _escaped(run["remark"]))]
    for title, table in baselines_tables(contents.unmeasured()):
        lines += ["", f"## {_escaped(title)}", "", *_markdown_table(table)]
    for group in contents.groups:
        lines += [line for verdict in group.verdicts() for line in ("", _escaped(verdict))]
        table = [list(group.report.columns), *group.table()]
        lines += ["", *_markdown_table(table), "", group.caption(contents.machine)]
    if differing := differences_table(contents.runs):
        lines += ["", "What the recipes differ in:", "", *_markdown_table(differing)]
    for group in contents.groups:
        for one in group.model_tables():
            lines += ["", f"## {_escaped(one.title)}", "", _escaped(one.note), ""]
            lines += _markdown_table([one.head, *one.rows])
    if not contents.groups:
        lines += ["", f"The training ran on {contents.machine}."]
    if rest := runs_table(contents.unmeasured()):
        lines += ["", *_markdown_table(rest)]
    for run in contents.runs:
        lines += ["", f"## {_escaped(run['run'])} ({_escaped(run['task'])})", ""]
        lines += [f"- split: {_escaped(str(run['split']))}"] if run["split"] else []
        lines += [_escaped(f"- {line}") for line in _metric_lines(metrics_of(run))]
        if run["use"]:
            lines += ["", *_markdown_table([["machine", "measured", "target", "is"], *run["use"]])]
        if run["sample"]:
            lines += ["", "A sample:", "", *(f"    {line}" for line in str(run["sample"]).splitlines())]
    return printable("\n".join(lines))


def _metric_lines(metrics: dict[str, Any]) -> list[str]:
    return [metric_line(name, value) for name, value in metrics.items() if _fits_a_line(value)]


def _fits_a_line(value: Any) -> bool:
    """Whether it is a number, or a list of such."""
    return isinstance(value, float | int) or (
        isinstance(value, list) and all(isinstance(one, float | int) for one in value)
    )


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: no table, link, code, emphasis or HTML begins in it."""
    return re.sub(r"([\\|`<\[*])", r"\\\1", " ".join(text.split()))


def _markdown_table(rows: list[list[str]]) -> list[str]:
    head, *body = ("| " + " | ".join(map(_escaped, cells)) + " |" for cells in rows)
    return [head, "|" + "---|" * len(rows[0]), *body]
