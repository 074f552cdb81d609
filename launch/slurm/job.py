"""`job RUN`: what the sbatch script runs on the first node. It trains in attempts, each one srun step.

Slurm sends SIGUSR1 (`--signal`) before the time limit, up to a minute early, and that time cannot be changed
after submission. So the job watches the clock itself, with a lead computed from this run's measured steps and
checkpoints. At that time, or at a SIGUSR1 long before the limit (a preemption), workers save and stop, and
the job requeues itself.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, FAILED, STOPPED, UserError, WorkerLostError
from isobatch.engine import consent
from isobatch.engine.distributed.stop_signals import STOP_SIGNALS
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.engine.runs.slurm_queue import refuse_if_in_a_job
from isobatch.launch.local import restarts
from isobatch.launch.local.run_setup import locate_data, store_plan
from isobatch.launch.slurm import client, job_record, time_limit
from isobatch.launch.slurm.job_request import JobRequest, plan_for_nodes
from isobatch.launch.slurm.rendezvous import rendezvous_folder, wait_for
from isobatch.launch.slurm.requeue import requeue_or_stop
from isobatch.launch.slurm.step import node_logs, srun_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

REPEAT_SIGNAL_SECONDS = 10.0
EARLY_SIGNAL_SECONDS = 65.0
"""Slurm may send its signal this much earlier than --signal asks."""
VERDICT_WAIT_SECONDS = 25.0
"""How long to wait for exit.json after srun, which may end before its tasks where Slurm ends the job."""


def job(words: Sequence[str]) -> int:
    """Usage: job RUN, inside a Slurm job; `slurm` writes the script that runs it."""
    if len(words) != 1:
        raise UserError("job: give the folder of one run, inside a Slurm job")
    run = RunFolder.open(words[0])
    allocation = client.Allocation.from_environment(os.environ)
    with JobStop() as stop:
        if run.status() == "done":
            return DONE
        consent.require(run.recipe, run.folder)
        refuse_if_in_a_job(run, allocation.job)
        with run.lock("launch"):
            run.refuse_if_training()
            job_record.update(run, job=allocation.job)
            steps = StepRunner(run, allocation, stop)
            code = restarts.train_with_restarts(run, steps).code
        return requeue_or_stop(run, allocation, stop.reason) if code == STOPPED else code


class JobStop:
    """Context that handles stop signals; `reason` is `limit`, `term` or `interrupt`, empty before a stop."""

    def __init__(self) -> None:
        self.reason = ""
        self.warned = False
        """SIGUSR1 came: the time limit is near, or the job is about to be preempted."""
        self._before: dict[int, Any] = {}

    def request(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        self.reason = self.reason or reason

    def __enter__(self) -> JobStop:
        def handle_signal(number: int, _: FrameType | None) -> None:
            if number == signal.SIGUSR1:
                self.warned = True
            else:
                self.request("term" if number == signal.SIGTERM else "interrupt")

        self._before = {number: signal.signal(number, handle_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class StepRunner:
    """An `Attempt` of restarts.py: each call is one srun step on the nodes that are still available."""

    def __init__(self, run: RunFolder, allocation: client.Allocation, stop: JobStop) -> None:
        self.allocation, self.stop = allocation, stop
        self.request = JobRequest.read(run)
        locate_data(run, run.recipe, None, mend=True)
        self.nodes = self._available_nodes()
        self._make_plan(run)
        left = client.seconds_left(allocation.job)
        self.deadline = None if left is None else time.monotonic() + left

    def _available_nodes(self) -> tuple[str, ...]:
        return client.available_nodes(self.allocation.job, self.allocation.nodes)

    def _make_plan(self, run: RunFolder) -> None:
        """Plan anew for the available nodes; the global batch stays."""
        if not self.nodes:
            raise UserError("none of this job's nodes is left")
        store_plan(run, plan_for_nodes(run, len(self.nodes), self.request))

    def __call__(self, run: RunFolder) -> Verdict | None:
        """Run one attempt to its end; None where no process left a verdict."""
        if self.stop.reason:
            return Verdict(STOPPED, "asked to stop before it began")
        left = self._available_nodes()
        if left != self.nodes:
            print(f"going on with {len(left)} of {len(self.allocation.nodes)} nodes: {', '.join(left)}")
            self.nodes = left
            self._make_plan(run)
        nonce = secrets.token_hex(8)
        folder = rendezvous_folder(run.folder, nonce)
        folder.mkdir(parents=True)
        try:
            self._watch(
                run, subprocess.Popen(srun_command(run, self.nodes, self.allocation, self.request, nonce))
            )
            return self._verdict(run, nonce)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _watch(self, run: RunFolder, step: subprocess.Popen[bytes]) -> None:
        """Wait for the end of the step; repeat a stop until it ends: srun may not be ready for the first."""
        last_sent = -REPEAT_SIGNAL_SECONDS
        while step.poll() is None:
            now = time.monotonic()
            left = None if self.deadline is None else self.deadline - now
            if should_save_now(
                left, self.stop.warned, self.request.lead, time_limit.seconds_to_stop(run) or 0
            ):
                self.stop.request("limit")
            if self.stop.reason and now - last_sent >= REPEAT_SIGNAL_SECONDS:
                # srun forwards SIGUSR1 to every process of the step; at SIGTERM and SIGINT it ends itself.
                step.send_signal(signal.SIGUSR1)
                last_sent = now
            time.sleep(0.5)

    def _verdict(self, run: RunFolder, nonce: str) -> Verdict | None:
        if self.stop.reason:
            wait_for(lambda: run.read_exit(nonce) is not None, VERDICT_WAIT_SECONDS)
        verdict = run.read_exit(nonce)
        if verdict and verdict.code == DONE:
            return verdict
        if self.stop.reason:
            return verdict or Verdict(STOPPED, "ended by Slurm before it could save")
        left = self._available_nodes()
        if lost := [node for node in self.nodes if node not in left]:
            return Verdict(FAILED, f"Slurm lost {', '.join(lost)}", WorkerLostError.cause)
        atomic_files.write_text(run.folder / "launcher.log", node_logs(run, self.nodes))
        return verdict


def should_save_now(left: float | None, warned: bool, lead: float, measured: float) -> bool:
    """Whether to save and stop now. `left`: seconds to the time limit, None without one; `lead`, `measured`:
    seconds that a stop takes, as asked for and as measured.

    A SIGUSR1 long before the limit (`warned`) means preemption, so the job stops at once.
    """
    if left is not None and left <= max(lead, measured):
        return True
    return warned and (left is None or left > lead + EARLY_SIGNAL_SECONDS)
