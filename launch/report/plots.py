"""`report --png`: the figures of a run as PNG files in its folder, also while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.launch.report.figures import draw_figure, training_curves
from isobatch.launch.report.records import read_records, report_of

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.engine.runs.run_folder import RunFolder

FOLDER = "plots"
DOTS_PER_INCH = 110


def write_plots(run: RunFolder, folder: Path) -> list[Path]:
    """Draw a run's figures into a folder; returns the files. Raises UserError without any step."""
    report = report_of(run)
    records = read_records(run, report)
    if not records["training"].get("loss"):
        raise UserError(f"report --png: {run.folder} has trained no step yet")
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
