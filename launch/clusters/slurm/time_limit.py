"""How much of a leg's time is left, and how long its run takes to stop, as measured."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.engine.runs.run_folder import RunFolder

ASK_AGAIN_SECONDS = 120.0
SUSPENDED_SECONDS = 5.0
"""A process that looks at the clock twice a second and finds so much more was suspended."""
SLOW_SHARE = 0.9
"""This share of the steps takes no longer than the step that is counted with."""

TAIL_BYTES = 200_000
SLOW_STORE_BYTES_PER_SECOND = 100e6
"""Write speed that a busy shared file system still reaches."""
SHUTDOWN_SECONDS = 15.0
"""From the end of training to the end of the job: processes exit, the job is requeued."""


def seconds_to_stop(run: RunFolder) -> float | None:
    """Seconds from the signal to the job's end; None before the first step.

    Three steps: the one under way, the one whose reduction carries the stop flag, and the one in which the
    flag takes effect. One in ten may be slower: a job may have been suspended in it.
    Two checkpoints: a save under way ends before the last one begins.
    """
    steps = sorted(_step_seconds(run))
    if not steps:
        return None
    step = steps[int(SLOW_SHARE * (len(steps) - 1))]
    return SHUTDOWN_SECONDS + 3 * step + 2 * _checkpoint_bytes(run) / SLOW_STORE_BYTES_PER_SECOND


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


class LegClock:
    """What is left of a leg's time limit. Slurm does not count the time in which a job is suspended, and an
    administrator may change the limit: so Slurm is asked now and then, and after each suspension.
    """

    def __init__(
        self,
        ask: Callable[[], float | None],
        limit: float | None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._now = ask, now
        """Seconds that are left, by Slurm; None where there is no limit or Slurm does not answer."""
        self.limit = limit
        """Seconds of the whole leg, as far as is known."""
        self._end = None if limit is None else self._now() + limit
        self._looked = self._asked = self._now()
        self._ask_slurm()

    def left(self) -> float | None:
        """Seconds that are left; None without a limit."""
        return None if self._end is None else self._end - self._now()

    def begin_watch(self) -> None:
        """Begin to call `watch`, twice a second: other work of this process was no suspension."""
        self._looked = self._now()

    def watch(self) -> None:
        """Notice suspensions, and ask Slurm where it is time to."""
        now = self._now()
        suspended, self._looked = now - self._looked, now
        if suspended > SUSPENDED_SECONDS and self._end is not None:
            self._end += suspended
        if suspended > SUSPENDED_SECONDS or now - self._asked > ASK_AGAIN_SECONDS:
            self._ask_slurm()

    def _ask_slurm(self) -> None:
        left = self._ask()
        self._asked = self._looked = self._now()
        if left is not None:
            self._end = self._asked + left
            self.limit = max(left, self.limit or 0.0)
