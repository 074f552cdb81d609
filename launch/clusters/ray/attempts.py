"""The attempts of a run on Ray: each is one fit of a TorchTrainer."""

from __future__ import annotations

import secrets
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from isobatch.core import atomic_files
from isobatch.core.errors import BUG, FAILED, STOPPED, WorkerLostError
from isobatch.core.measures import printable
from isobatch.engine.runs.run_folder import Verdict
from isobatch.launch.clusters.common import ends_of_logs
from isobatch.launch.local import launch_run
from isobatch.launch.local.run_setup import environment_elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from isobatch.engine.distributed.stop_signals import StopFlag
    from isobatch.engine.runs.run_folder import RunFolder

WATCH_SECONDS = 1.0


class Trainer(Protocol):
    """What an attempt needs of a TorchTrainer."""

    def fit(self) -> Any: ...


class Attempts:
    """An `Attempt` of launch_run.py: each call is one fit."""

    def __init__(
        self,
        trainer: Callable[[dict[str, Any]], Trainer],
        order: dict[str, Any],
        plan: str,
        stop: StopFlag,
        log: RunLog,
    ) -> None:
        self._trainer, self._order, self._plan = trainer, order, plan
        self._stop, self._log = stop, log

    def __call__(self, run: RunFolder) -> Verdict | None:
        """Run one attempt to its end; None where no process left a verdict."""
        launch_run.wait_for_orphans(run)
        if self._stop.requested:
            return Verdict(STOPPED, "asked to stop before it began")
        order = self._order_for(run)
        error = self._fit(run, order)
        run.forget_plan()
        verdict = judge(run.read_exit(order["nonce"]), error, self._stop.requested)
        if verdict is None or verdict.code == BUG:
            logs = sorted((run.folder / "ray").glob("worker-*.log"))
            atomic_files.write_text(run.folder / "launcher.log", ends_of_logs(logs))
        return verdict

    def _order_for(self, run: RunFolder) -> dict[str, Any]:
        """What the workers are told. They plan where this launch begins."""
        plan, self._plan = self._plan, ""
        storage = run.folder / "ray"
        storage.mkdir(exist_ok=True)
        own = {"run": str(run.folder), "nonce": secrets.token_hex(8), "plan": plan, "storage": str(storage)}
        return {**self._order, **own, "environment": environment_elsewhere()}

    def _fit(self, run: RunFolder, order: dict[str, Any]) -> str:
        """Run one fit; what went wrong with it.

        In a thread: in the main one, Ray would end the workers at the first Ctrl-C.
        """
        from isobatch.launch.clusters.ray.workers import stop_file

        error: list[str] = []

        def fit() -> None:
            try:
                self._trainer(order).fit()
            except Exception as caught:
                error.append(_first_failure(caught))

        attempt, stop = threading.Thread(target=fit, daemon=True), stop_file(run, order["nonce"])
        attempt.start()
        while attempt.is_alive():
            if self._stop.requested:
                stop.touch()
            attempt.join(WATCH_SECONDS)
            self._log.print_new()
        stop.unlink(missing_ok=True)
        return "".join(error)


def judge(verdict: Verdict | None, error: str, is_asked_to_stop: bool) -> Verdict | None:
    """What an attempt's end means. `error`: of its fit."""
    if verdict is not None and verdict.code != STOPPED:
        return verdict
    if is_asked_to_stop:
        return verdict or Verdict(STOPPED, "ended before it could save")
    if verdict is not None:
        error = error or "a signal stopped the workers, and not the run"
    return Verdict(FAILED, f"a Ray worker was lost: {error}", WorkerLostError.cause) if error else None


def _first_failure(error: Exception) -> str:
    """A line on what ended a fit: of the first worker that failed, where Ray says which."""
    failures = getattr(error, "worker_failures", None) or {}
    said = [f"worker {rank}: {failure}" for rank, failure in sorted(failures.items())]
    line = " ".join((said[0] if said else str(error)).split())
    return line.partition(" Worker info:")[0][:300]


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
