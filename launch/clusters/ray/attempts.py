"""The attempts of a run on Ray: each is one fit of a TorchTrainer, in the workers that there is room for."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.core import atomic_files
from isobatch.core.errors import BUG, FAILED, RESIZED, STOPPED, WorkerLostError
from isobatch.core.measures import printable
from isobatch.engine.runs.run_folder import Verdict
from isobatch.launch.clusters.common import ends_of_logs
from isobatch.launch.local import launch_run
from isobatch.launch.local.run_setup import environment_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from isobatch.engine.distributed.stop_signals import StopFlag
    from isobatch.engine.runs.run_folder import RunFolder

WATCH_SECONDS = 1.0
SETTLE_SECONDS = 10.0
"""How long more places may take to come, where there are enough to begin."""
LOSS_SECONDS = 20.0
"""How long Ray may take to notice that a node is gone: until then it offers the places there."""
POLL_SECONDS = 0.5


class Trainer(Protocol):
    """What an attempt needs of a TorchTrainer."""

    def fit(self) -> Any: ...


class Attempts:
    """An `Attempt` of launch_run.py: each call is one fit, in the workers that there is room for."""

    def __init__(
        self,
        trainer: Callable[[int, dict[str, Any]], Trainer],
        places: Places,
        order: dict[str, Any],
        plan: str,
        stop: StopFlag,
        log: RunLog,
    ) -> None:
        self._trainer, self._places, self._order, self._plan = trainer, places, order, plan
        self._stop, self._log = stop, log
        self._workers = 0
        """Of the attempt before; 0 before the first."""

    def __call__(self, run: RunFolder) -> Verdict | None:
        """Run one attempt to its end; None where no process left a verdict."""
        launch_run.wait_for_orphans(run)
        workers = self._places.count(lambda: self._stop.requested)
        if self._stop.requested:
            return Verdict(STOPPED, "asked to stop before it began")
        order = self._order_for(run, workers)
        error, more = self._fit(run, workers, order)
        run.forget_plan()
        verdict = judge(run.read_exit(order["nonce"]), error, more, self._stop.requested)
        if verdict is not None and verdict.cause == WorkerLostError.cause:
            self._places.distrust()
        if verdict is None or verdict.code == BUG:
            logs = sorted((run.folder / "ray").glob("worker-*.log"))
            atomic_files.write_text(run.folder / "launcher.log", ends_of_logs(logs))
        return verdict

    def _order_for(self, run: RunFolder, workers: int) -> dict[str, Any]:
        """What the workers are told. They plan where this launch begins, and where the world is another."""
        if self._workers and workers != self._workers:
            print(f"isobatch: going on with {workers} of {self._places.most} workers", file=sys.stderr)
        plan = "" if workers == self._workers else self._plan
        self._workers = workers
        storage = run.folder / "ray"
        storage.mkdir(exist_ok=True)
        own = {"run": str(run.folder), "nonce": secrets.token_hex(8), "plan": plan, "storage": str(storage)}
        return {**self._order, **own, "environment": environment_elsewhere()}

    def _fit(self, run: RunFolder, workers: int, order: dict[str, Any]) -> tuple[str, int]:
        """Run one fit; what went wrong with it, and for how many more workers there was room, if any.

        In a thread: in the main one, Ray would end the workers at the first Ctrl-C.
        """
        from isobatch.launch.clusters.ray.workers import started_file, stop_file

        error: list[str] = []

        def fit() -> None:
            try:
                self._trainer(workers, order).fit()
            except Exception as caught:
                error.append(_first_failure(caught))

        attempt, more = threading.Thread(target=fit, daemon=True), 0
        started, stop = started_file(run, order["nonce"]), stop_file(run, order["nonce"])
        attempt.start()
        looks_for_more = False
        while attempt.is_alive():
            if not looks_for_more and started.exists():  # before, it would take the workers' own places
                self._places.want(self._places.most - workers)
                looks_for_more = True
            if not more and (found := self._places.found()) and self._places.has_settled():
                more = found
            if self._stop.requested or more:
                stop.touch()
            attempt.join(WATCH_SECONDS)
            self._log.print_new()
        self._places.release()
        for mark in (started, stop):
            mark.unlink(missing_ok=True)
        return "".join(error), more


def judge(verdict: Verdict | None, error: str, more: int, is_asked_to_stop: bool) -> Verdict | None:
    """What an attempt's end means. `error`: of its fit; `more`: workers for which it was to make room."""
    if verdict is not None and verdict.code != STOPPED:
        return verdict
    if is_asked_to_stop:
        return verdict or Verdict(STOPPED, "ended before it could save")
    if more:
        return Verdict(STOPPED, f"there is room for {more} more workers", RESIZED)
    if verdict is not None:
        error = error or "a signal stopped the workers, and not the run"
    return Verdict(FAILED, f"a Ray worker was lost: {error}", WorkerLostError.cause) if error else None


def _first_failure(error: Exception) -> str:
    """A line on what ended a fit: of the first worker that failed, where Ray says which."""
    failures = getattr(error, "worker_failures", None) or {}
    said = [f"worker {rank}: {failure}" for rank, failure in sorted(failures.items())]
    line = " ".join((said[0] if said else str(error)).split())
    return line.partition(" Worker info:")[0][:300]


class Places:
    """Each place is held by a placement group with the resources of one worker. One that waits is also what
    tells an autoscaler that another node is wanted.
    """

    def __init__(self, resources: Mapping[str, float], least: int, most: int) -> None:
        self._resources, self.least, self.most = dict(resources), least, most
        self._wanted: list[Any] = []
        self._settled = 0.0
        self._found = 0
        self._trusted = 0.0
        """When Ray knows again which nodes there are."""

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most

    def count(self, is_over: Callable[[], bool]) -> int:
        """The workers to start: all, or those that there is room for after some seconds, at least the least.

        Waits until there is room for these, or `is_over()`.
        """
        if not self.is_elastic:
            return self.most  # Ray itself waits until it has room
        self.want(self.most)
        while not is_over() and (
            time.monotonic() < self._trusted or self.found() < self.least or not self.has_settled()
        ):
            time.sleep(POLL_SECONDS)
        found = self.found()
        self.release()
        return found

    def distrust(self) -> None:
        """A worker was lost, and perhaps its node: the next count waits until Ray knows."""
        self._trusted = time.monotonic() + LOSS_SECONDS

    def want(self, count: int) -> None:
        """Begin to look for room for so many workers."""
        import ray

        self.release()
        wanted = range(count) if self.is_elastic else ()
        self._hold([ray.util.placement_group([self._resources]) for _ in wanted])

    def _hold(self, wanted: list[Any]) -> None:
        self._wanted, self._found = wanted, 0
        self._settled = time.monotonic() + SETTLE_SECONDS

    def found(self) -> int:
        """How many of the wanted places are held now."""
        found = self._count_held()
        if found > self._found:
            self._settled = time.monotonic() + SETTLE_SECONDS
        self._found = found
        return found

    def _count_held(self) -> int:
        import ray

        states = [ray.util.placement_group_table(place).get("state") for place in self._wanted]
        return states.count("CREATED")

    def has_settled(self) -> bool:
        """Whether no more places are to be expected soon."""
        return self._found == len(self._wanted) or time.monotonic() > self._settled

    def release(self) -> None:
        """Give all places back."""
        import ray

        for place in self._wanted:
            ray.util.remove_placement_group(place)
        self._hold([])


class RunLog:
    """Follows log.txt, which rank 0 writes where all nodes see it."""

    def __init__(self, path: Path, quiet: bool) -> None:
        self._path, self._quiet, self._last = path, quiet, ""
        self._read = path.stat().st_size if path.exists() else 0

    def print_new(self) -> None:
        """Print what has been written since the last call, in whole lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._read)
            whole = stream.read().rpartition(b"\n")[0]
        lines = whole.decode(errors="replace").splitlines()
        for line in lines if not self._quiet else ():
            print(printable(line), file=sys.stderr)
        self._read += len(whole) + bool(lines)
        self._last = lines[-1] if lines else self._last

    def print_unless_said(self, line: str) -> None:
        """Print a line that is not the last one of the log."""
        self.print_new()
        if line not in self._last:
            print(printable(f"isobatch: {line}"), file=sys.stderr)
