"""How long a run takes to stop, from its measured steps and the size of its checkpoints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

TAIL_BYTES = 200_000
SLOW_STORE_BYTES_PER_SECOND = 100e6
"""Write speed that a busy shared file system still reaches."""
SHUTDOWN_SECONDS = 15.0
"""From the end of training to the end of the job: processes exit, the job is requeued."""


def seconds_to_stop(run: RunFolder) -> float | None:
    """Seconds from the signal to the job's end; None before the first step.

    Three steps: the one under way, the one whose reduction carries the stop flag, and the one in which the
    flag takes effect.
    Two checkpoints: a save under way ends before the last one begins.
    """
    steps = _step_seconds(run)
    if not steps:
        return None
    return SHUTDOWN_SECONDS + 3 * max(steps) + 2 * _checkpoint_bytes(run) / SLOW_STORE_BYTES_PER_SECOND


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
    """Bytes of the largest checkpoint."""
    folders = [p for p in run.checkpoints.glob("[!.]*-*") if p.is_dir()]
    return max((sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in folders), default=0)
