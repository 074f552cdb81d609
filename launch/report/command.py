"""`report`: compares runs: accuracy with its confidence interval, size, and speed measured here."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.measures import printable
from isobatch.core.terminal.status import doing
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.run_setup import TrustOptions, open_run
from isobatch.launch.report.page import Contents, collect, render_markdown, render_page, summary_parts
from isobatch.launch.report.records import write_plots
from isobatch.launch.report.tables import text_table

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


def report(words: Sequence[str]) -> int:
    """Usage: report RUN... [--to FOLDER] [--json] [--png]

    Markdown, JSON and one HTML page that opens offline. The first run is the baseline that the others are
    compared with. Of a run that is not done the page shows what there is.
    """
    positional, flags = split_words(words)
    options = command_options(flags, ReportOptions, "report")
    if not positional:
        raise UserError("report: give the folders of one or more runs, the baseline first")
    runs = [open_run(place, True) if options.trust else RunFolder.open(place) for place in positional]
    if options.png:
        for run in runs:
            to = Path(options.to).expanduser() if options.to else run.folder / "plots"
            for file in write_plots(run, to / run.folder.name if options.to and runs[1:] else to):
                print(printable(file))
        return 0
    need("matplotlib", "report")  # said before minutes of measuring
    folder = Path(options.to).expanduser() if options.to else runs[-1].folder / "report"
    contents = write_report(runs, folder)
    print(atomic_files.json_text(contents.to_dict()) if options.json else text_of(contents, folder))
    return 0


def write_report(runs: Sequence[RunFolder], folder: Path) -> Contents:
    """Measure and compare runs that are done; write report.json, report.md and report.html. Of other runs
    only the records are shown. Raises UserError.
    """
    contents = collect(runs)
    with atomic_files.explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    doing("drawing the report")
    atomic_files.write_json(folder / "report.json", contents.to_dict())
    atomic_files.write_text(folder / "report.md", render_markdown(contents))
    atomic_files.write_text(folder / "report.html", render_page(contents))
    return contents


def text_of(contents: Contents, folder: Path) -> str:
    """What a command prints of a report: its summary, of tables the columns that there is room for."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else MOST_COLUMNS
    parts = [
        text_table(part.rows, width) if part.rows else part.text
        for part in summary_parts(contents)
        if part.kind != "note"
    ]
    parts.append(f"all figures: {folder}/report.html, as text {folder}/report.md")
    return printable("\n\n".join(filter(None, parts)))
