"""Which form of a compressed model to ship: the points that nothing beats in accuracy, size and speed."""

from __future__ import annotations

import operator
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.measures import format_bytes, printable
from isobatch.core.terminal import table
from isobatch.models.encoder import problems
from isobatch.models.encoder.export import copy_beside
from isobatch.models.encoder.latency import ALL_THREADS, BATCHES

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.models.protocols import ReportRow

THREADS = {"": "", ALL_THREADS: ", all threads"}
TIMED = {f"batch_{n}{end}": f"{n} text{'s'[: n - 1]}{of}" for end, of in THREADS.items() for n in BATCHES}
"""Field of a row with times -> of what."""


@dataclass(frozen=True, slots=True)
class Point:
    """One form of one run's model, as it was measured."""

    name: str
    score: float
    """The headline figure; more is better."""
    file_bytes: int
    milliseconds: tuple[float, ...]
    """Medians of a batch, in the order of the table; the first is one text on one thread."""
    file: Path
    """The model's file; what it needs beside it lies there."""
    samples: int
    """Held out, of which `score` is."""

    @property
    def costs(self) -> tuple[float, ...]:
        """All that is compared: less is better."""
        return (-self.score, float(self.file_bytes), *self.milliseconds)


def front(points: Sequence[Point]) -> list[Point]:
    """Those than which no other is nowhere worse and somewhere better, in order; never none of some."""
    costs = {one.costs for one in points}
    beaten = {one for one in costs for other in costs - {one} if all(map(operator.le, other, one))}
    return [one for one in points if one.costs not in beaten]


def check_choice(choice: str) -> float | None:
    """How far below the best a point may be, of `within X%` and of accurate; None for another choice. Raises
    UserError.
    """
    if choice in BY_COST:
        return None
    within = "within 0%" if choice == "accurate" else choice.strip()
    match = re.fullmatch(r"within\s*(\d+(?:\.\d+)?)\s*%", within)
    if match is None or float(match[1]) > 100:
        valid = ", ".join(BY_COST)
        raise UserError(f'--choose {choice}: give {valid}, accurate, or "within 0.5%" (of the most accurate)')
    return float(match[1]) / 100


def choose(points: Sequence[Point], choice: str) -> Point:
    """The point of the front that is chosen. `within X%`: the fastest of those whose score is at most X
    hundredths below the best, or one held-out sample, which decides nothing; accurate: X is 0. Raises
    UserError for an unknown choice.
    """
    found, slack = front(points), check_choice(choice)
    if slack is None:
        return min(found, key=BY_COST[choice])
    least = max(one.score for one in found) - max(slack, 1 / found[0].samples)
    return min((one for one in found if one.score >= least - 1e-12), key=BY_COST["fastest"])


BY_COST: Mapping[str, Any] = {
    "smallest": lambda one: (one.file_bytes, -one.score, one.milliseconds),
    "fastest": lambda one: (one.milliseconds, -one.score, one.file_bytes),
}
"""Choice -> what is least of the point that is chosen, and what decides between equals."""


def points_of(runs: Sequence[RunFolder], rows: Sequence[ReportRow]) -> list[Point]:
    """A point for each form that was measured of these runs."""
    folders = {printable(run.folder.name): run.folder for run in runs}
    return [
        Point(
            f"{row['run']}, {row['form']}",
            row[problems.PROBLEMS[row["problem"]](row["class_names"]).headline],
            row["file_bytes"],
            tuple(row[batch]["p50"] for batch in TIMED),
            folders[row["run"]] / row["file"],
            row["samples"],
        )
        for row in rows
    ]


def copy(point: Point, folder: Path) -> Path:
    """What the point needs to run, alone in a folder, in place of an earlier choice; the model's file."""
    source, new = point.file.parent, folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    own = [f.name for f in source.iterdir() if f.name.startswith(point.file.name) or f.suffix == ".py"]
    copy_beside(source, new, "parity.json", *own)
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)
    return folder / point.file.name


def text_of(points: Sequence[Point], chosen: Point, choice: str, file: Path) -> str:
    """The table, with a mark at each point that no other beats, and where the chosen one lies."""
    best = front(points)
    scores = f"score, % of {chosen.samples:,} samples"
    rows = [["", "model", scores, "file", *(f"ms, {of}" for of in TIMED.values())]]
    for one in sorted(points, key=lambda one: -one.score):
        mark = ">*" if one is chosen else "*" if one in best else ""
        times = (f"{ms:.2f}" for ms in one.milliseconds)
        rows.append([mark, one.name, f"{100 * one.score:.2f}", format_bytes(one.file_bytes), *times])
    return f"{table(rows)}\n* nothing beats it; > --choose {choice}: {file}"
