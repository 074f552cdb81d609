"""What runs on this machine took, beside what was predicted: it sharpens the next prediction.

A file of JSON lines per machine. Figures are ratios of measured to predicted, so that they hold for other
runs of the same kind too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from isobatch.engine.machine.ceilings import Ceilings, ceilings_of, machine_key

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.engine.machine.hardware import Hardware

KEPT = 500
"""Newest rows that are read."""
NEIGHBOURS = 5
"""Runs of a kind whose ratios count: those of the nearest size."""
LARGEST_RATIO = 4.0
"""A ratio beyond it tells of a disturbed run, not of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A run's measured figures over the uncorrected predictions."""

    key: str
    """Names the recipe's shape and the plan: equal keys take equal memory and time."""
    kind: str
    """Names the kind of run: task, device, precision, strategy."""
    size: float
    """Predicted bytes of the run beside the process itself."""
    memory: float
    """Measured over predicted bytes, both beside the process itself."""
    seconds: float
    """Measured over predicted seconds of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Factors for a prediction, and the runs that they come from."""

    memory: float = 1.0
    seconds: float = 1.0
    basis: str = ""
    """Why; empty where nothing like it has run here."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The measured runs of one machine, oldest first."""

    rows: tuple[Measured, ...] = ()

    @classmethod
    def read(cls, file: Path) -> RunHistory:
        """The rows of a file; none where there is no file, and without those that cannot be read."""
        try:
            lines = file.read_text(errors="replace").splitlines()[-KEPT:]
        except OSError:
            return cls()
        return cls(tuple(row for line in lines if (row := _parse(line)) is not None))

    def correction(self, key: str, kind: str, size: float) -> Correction:
        """The newest run of this key; else the median of the runs of this kind that are nearest in size."""
        if same := [row for row in self.rows if row.key == key]:
            newest = same[-1]
            return Correction(
                memory=newest.memory, seconds=newest.seconds, basis="corrected by the same run here before"
            )
        alike = {row.key: row for row in self.rows if row.kind == kind}.values()
        near = sorted(alike, key=lambda row: abs(math.log(max(row.size, 1.0) / max(size, 1.0))))[:NEIGHBOURS]
        if not near:
            return Correction()
        runs = "a run" if len(near) == 1 else f"{len(near)} runs"
        return Correction(
            memory=median(row.memory for row in near),
            seconds=median(row.seconds for row in near),
            basis=f"corrected by {runs} of this kind here",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRecord:
    """What was measured on a machine."""

    ceilings: Ceilings | None = None
    history: RunHistory = field(default_factory=RunHistory)


def machine_record(hardware: Hardware, folder: Path) -> MachineRecord:
    """What `folder` holds of this machine; its ceilings are measured if they are not there.

    Of a machine that is only named nothing was measured.
    """
    if hardware.source != "detected":
        return MachineRecord()
    history = RunHistory.read(history_file(folder, hardware))
    return MachineRecord(ceilings=ceilings_of(hardware, folder), history=history)


def history_file(folder: Path, hardware: Hardware) -> Path:
    """Where the runs of this machine are kept."""
    return folder / f"history-{machine_key(hardware)}.jsonl"


def append(file: Path, row: Measured) -> None:
    """Add a run, unless its figures are no plausible ones. A folder that cannot be written is left alone."""
    ratios = (row.memory, row.seconds)
    if all(1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO for ratio in ratios):
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                lines.write(json.dumps(dataclasses.asdict(row)) + "\n")


def _parse(line: str) -> Measured | None:
    try:
        values: dict[str, Any] = json.loads(line)
        row = Measured(**values)
        numbers = (row.size, row.memory, row.seconds)
        return row if all(math.isfinite(n) and n > 0 for n in numbers) else None
    except (ValueError, TypeError):
        return None
