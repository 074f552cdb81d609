"""Keeps what a run took, so that this machine's next prediction is corrected by it."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from isobatch.core import atomic_files
from isobatch.core.package import cache_folder
from isobatch.engine.machine.detect import detect
from isobatch.engine.planning import calibration

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

WARM_UP_STEPS = 2
"""First steps of a process, which compile, allocate and read files for the first time."""
LEAST_STEPS = 3
DISTURBED_RUN = 0.1
"""Share of waiting for a core from which on a run's steps are not what this machine takes for them: its own
loader and checkpoint threads wait a little, too."""
MOST_STEPS = 1000


def remember_run(run: RunFolder) -> None:
    """Add a finished run's peak memory and median step to the history of this machine."""
    summary = run.summary() or {}
    seconds = _step_seconds(run)
    if len(seconds) < LEAST_STEPS or not summary.get("peak_memory_bytes"):
        return
    disturbed = summary.get("core_wait", 0.0) > DISTURBED_RUN
    step = None if disturbed else median(seconds)
    row = calibration.measured_run(run.plan, summary["peak_memory_bytes"], step)
    if row is not None:
        calibration.append(calibration.history_file(cache_folder(), detect()), row)


def _step_seconds(run: RunFolder) -> list[float]:
    """Seconds of the run's first steps after the warm-up, without those that they waited for data."""
    found: list[float] = []
    for row in atomic_files.rows_in(run.metrics):
        if "step_seconds" in row:
            found.append(float(row["step_seconds"]) - float(row.get("data_seconds", 0.0)))
        if len(found) >= MOST_STEPS:
            break
    return found[WARM_UP_STEPS:]
