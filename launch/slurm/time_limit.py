"""How long a run takes to stop: what its own steps and checkpoints were measured to take."""

from __future__ import annotations

import json

from isobatch.engine.runs.run_folder import RunFolder

TAIL_BYTES = 200_000
SLOW_STORE = 100e6
"""Bytes/s that a busy shared file system is sure to write."""
LEAVING_SECONDS = 15.0
"""From the last rank's end to the job's: processes end, the job is put back into the queue."""


def seconds_to_stop(run: RunFolder) -> float | None:
    """From the signal to the job's end; None before the first step.

    A step may have begun when the signal comes, and ends; the vote travels with the next one's losses.
    A save that was under way ends before the last one begins.
    """
    steps = _step_seconds(run)
    if not steps:
        return None
    return LEAVING_SECONDS + 3 * max(steps) + 2 * _checkpoint_bytes(run) / SLOW_STORE


def _step_seconds(run: RunFolder) -> list[float]:
    if not run.metrics.exists():
        return []
    with run.metrics.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
        lines = stream.read().splitlines()
    return [seconds for line in lines if (seconds := _seconds_in(line))]


def _seconds_in(line: bytes) -> float:
    try:
        return float(json.loads(line).get("step_seconds", 0))
    except (ValueError, AttributeError):  # cut short at the edge, or being written
        return 0.0


def _checkpoint_bytes(run: RunFolder) -> int:
    """Of the largest there is."""
    folders = [p for p in run.checkpoints.glob("[!.]*-*") if p.is_dir()]
    return max((sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in folders), default=0)
