"""Training on this machine: in this process, or in children of it that accelerate starts."""

from __future__ import annotations

import contextlib
import gc
import secrets
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from isobatch.core.errors import STOPPED, UserError, WorkerLostError
from isobatch.core.package import TRAIN_SCRIPT
from isobatch.core.strategies import traits_of
from isobatch.core.terminal import print_lines
from isobatch.engine.runs.run_folder import NONCE, RunFolder, Verdict
from isobatch.launch.clusters.cluster import Cluster, JobState
from isobatch.launch.local.accelerate_launcher import launch_workers
from isobatch.launch.local.launch_run import wait_for_orphans

SECOND_SIGNAL_SECONDS = 1.0
"""Between the two SIGINT of --now: a launcher takes the second for an end at once."""


@dataclass
class Local(Cluster):
    """This machine, as a cluster of one: a run's lock says whether it trains."""

    owns_process: bool = True
    """False in another program's process, such as a notebook: it is never ended, its handlers stay."""

    def attempt(self, run: RunFolder) -> Verdict | None:
        # DeepSpeed forms a process group even for one process, which would stay in a process not ours.
        if run.plan.processes > 1 or (not self.owns_process and traits_of(run.plan.strategy).shards):
            return self._in_children(run)
        from isobatch.launch.local.worker import train_run

        train_run(run, run.options(), self.owns_process)
        gc.collect()
        return run.read_exit("")

    def _in_children(self, run: RunFolder) -> Verdict | None:
        nonce = secrets.token_hex(8)
        words = (str(TRAIN_SCRIPT), "--run", str(run.folder.resolve()))
        # accelerate's exit code is only 0 or 1, and 1 for a clean stop, too: exit.json has the verdict.
        _, stopped = launch_workers(run.plan, words, run.folder, {NONCE: nonce}, self.owns_process)
        if run.read_exit(nonce) is None:
            wait_for_orphans(run)
        run.forget_plan()  # the workers may have reduced the budget
        verdict = run.read_exit(nonce)
        if stopped and (verdict is None or verdict.cause == WorkerLostError.cause):
            print_lines("isobatch: stopped at once; what was saved before stands")
            return Verdict(STOPPED, "stopped at once")
        return verdict

    def state(self, runs: Sequence[RunFolder]) -> dict[Path, JobState]:
        return {run.folder: JobState(stage="running", cluster="local") for run in runs if run.is_training()}

    def cancel(self, run: RunFolder, job: JobState, now: bool) -> None:  # noqa: ARG002
        """SIGINT to the process that trains the run here: once to save, twice to end at once."""
        launcher = _launcher(run)
        if launcher is None:
            raise UserError(f"{run.folder}: no process of yours trains it on this machine: cancel it there")
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            launcher.send_signal(signal.SIGINT)
            if now:
                with contextlib.suppress(psutil.TimeoutExpired):
                    launcher.wait(SECOND_SIGNAL_SECONDS)
                launcher.send_signal(signal.SIGINT)


def _launcher(run: RunFolder) -> psutil.Process | None:
    """The process on this machine that holds the run's lock: its launcher, else the worker of rank 0."""
    # Nothing is said of another user's process.
    opened = [(process, process.info["open_files"] or ()) for process in psutil.process_iter(["open_files"])]
    for role in ("launch", "train"):
        path = str((run.folder / f".{role}.lock").resolve())
        holders = {p.pid: p for p, files in opened if any(file.path == path for file in files)}
        # Loader processes are forked with the lock open.
        if first := [p for p in holders.values() if p.ppid() not in holders]:
            return first[0]
    return None
