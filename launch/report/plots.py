"""`plots`: the figures of a run as PNG files in its folder, also while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.measures import printable
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.report.figures import draw_figure, training_curves
from isobatch.launch.report.records import read_records, report_of

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = "plots"
DOTS_PER_INCH = 110


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotsOptions:
    """Flags of `plots`."""

    to: str | None = None
    """Folder for the figures; by default plots/ in the run's folder."""


def plots(words: Sequence[str]) -> int:
    """Usage: plots RUN... [--to FOLDER]: draws the training curves and the task's own figures into plots/ of
    each run, or into FOLDER, where several runs have a folder each.
    """
    positional, flags = split_words(words)
    options = command_options(flags, PlotsOptions, "plots")
    if not positional:
        raise UserError("plots: give the folders of one or more runs")
    for run in map(RunFolder.open, positional):
        folder = Path(options.to).expanduser() if options.to else run.folder / FOLDER
        for file in write_plots(run, folder / run.folder.name if options.to and positional[1:] else folder):
            print(printable(file))
    return 0


def write_plots(run: RunFolder, folder: Path) -> list[Path]:
    """Draw a run's figures into a folder; returns the files. Raises UserError without any step."""
    report = report_of(run)
    records = read_records(run, report)
    if not records["training"].get("loss"):
        raise UserError(f"plots: {run.folder} has trained no step yet")
    drawings = [training_curves(records, records["curves"])]
    drawings += report.run_drawings(records) if report else []
    files = []
    for drawing in drawings:
        file = folder / f"{drawing.title.lower().replace(' ', '-')}.png"
        figure = draw_figure(drawing.draw, drawing.width, drawing.height, drawing.columns)
        with atomic_files.explain_write_errors(file):
            folder.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f".{file.name}")
            figure.savefig(temporary, format="png", dpi=DOTS_PER_INCH)
            temporary.replace(file)
        files.append(file)
    return files
