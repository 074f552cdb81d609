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
from isobatch.core.package import own_command
from isobatch.engine import consent
from isobatch.engine.distributed.stop_signals import STOP_SIGNALS
from isobatch.engine.planning.detect import detect
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.launch.local import restarts
from isobatch.launch.local.run_setup import locate_data, store_plan
from isobatch.launch.slurm import client, time_limit
from isobatch.launch.slurm.command import plan_options_from_request, refuse_if_in_a_job
from isobatch.launch.slurm.rendezvous import rendezvous_folder, wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from isobatch.core.plan import Plan

    pass

REPEAT_SIGNAL_SECONDS = 10.0
EARLY_SIGNAL_SECONDS = 65.0
"""Slurm may send its signal this much earlier than --signal asks."""
VERDICT_WAIT_SECONDS = 25.0
"""How long to wait for exit.json after srun, which may end before its tasks where Slurm ends the job."""
LOG_TAIL_CHARACTERS = 2500
STEP_SHELL = """trap '' USR1 TERM INT; exec "$@" >>"$0/node-$SLURMD_NODENAME.log" 2>&1"""
"""A log per node. Signals are ignored while Python starts; job repeats them until the workers handle them."""
REQUEUEABLE_STATES = ("RUNNING", "PREEMPTED", "TIMEOUT")
"""States of a job that may requeue itself after a stop; a cancelled one may not."""


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
            _update_job_record(run, job=allocation.job)
            steps = StepRunner(run, allocation, stop)
            code = restarts.train_with_restarts(run, steps).code
        return _requeue_or_stop(run, allocation, stop) if code == STOPPED else code


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
        self.request = atomic_files.read_json(run.folder / "slurm" / "request.json")
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
            self._watch(run, subprocess.Popen(srun_command(run, self.nodes, self.allocation, nonce)))
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
                left, self.stop.warned, self.request["lead"], time_limit.seconds_to_stop(run) or 0
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


def plan_for_nodes(run: RunFolder, nodes: int, request: dict[str, Any]) -> Plan:
    """The plan for `nodes` nodes like this one; `request` is request.json, with the processes per node."""
    recipe, facts = run.recipe, run.facts
    task, _ = workload_of(recipe).make(recipe)
    options, world_size = plan_options_from_request(request["plan"]), request["local"] * nodes
    return make_plan(recipe, facts, task.model_size(facts), detect(nodes=nodes), options, world=world_size)


def srun_command(
    run: RunFolder, nodes: Sequence[str], allocation: client.Allocation, nonce: str
) -> list[str]:
    """The command of a step: one launcher per node; one that fails ends the others."""
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        "--ntasks-per-node=1",
        # A step does not inherit --cpus-per-task from sbatch.
        f"--cpus-per-task={allocation.cpus}",
        *([f"--gpus-per-node={allocation.gpus}"] if allocation.gpus else []),
        "--kill-on-bad-exit=1",
        "--mpi=none",
        "--unbuffered",
        *("bash", "-c", STEP_SHELL, str(run.folder.resolve() / "slurm")),
        *own_command("node", str(run.folder.resolve()), nonce),
    ]


def should_save_now(left: float | None, warned: bool, lead: float, measured: float) -> bool:
    """Whether to save and stop now. `left`: seconds to the time limit, None without one; `lead`, `measured`:
    seconds that a stop takes, as asked for and as measured.

    A SIGUSR1 long before the limit (`warned`) means preemption, so the job stops at once.
    """
    if left is not None and left <= max(lead, measured):
        return True
    return warned and (left is None or left > lead + EARLY_SIGNAL_SECONDS)


def node_logs(run: RunFolder, nodes: Sequence[str]) -> str:
    """The ends of the nodes' logs, one below the other."""
    paths = [run.folder / "slurm" / f"node-{name}.log" for name in nodes]
    ends = [(p.name, p.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:]) for p in paths if p.is_file()]
    return "".join(f"--- {name}\n{text}\n" for name, text in ends)


def _requeue_or_stop(run: RunFolder, allocation: client.Allocation, stop: JobStop) -> int:
    """After a stop: requeue the job if it made progress. Returns the exit code STOPPED."""
    before = _read_job_record(run).get("requeued_at")
    now = furthest_checkpoint(run)
    why_not = why_not_requeue(stop.reason, client.job_state(allocation.job), before, now)
    if why_not:
        print(f"stopped and not requeued: {why_not}", flush=True)
        return STOPPED
    _update_job_record(run, requeued_at=now)
    print(f"requeueing at step {now[1] if now else 0} (leg {allocation.restarts + 1})", flush=True)
    if problem := client.requeue(allocation.job):
        print(f"Slurm does not requeue the job: {problem}", flush=True)
    return STOPPED


def why_not_requeue(reason: str, state: str, before: list[int] | None, now: list[int] | None) -> str:
    """Why a stopped job does not requeue itself; empty where it does."""
    if reason not in ("limit", "term"):
        return "a signal asked for a stop, not the time limit"
    if state and state not in REQUEUEABLE_STATES:
        return f"the job is {state}"
    if now is None or (before is not None and now <= before):
        return "no checkpoint was added since the last start: a longer --time gives it the time to reach one"
    return ""


def furthest_checkpoint(run: RunFolder) -> list[int] | None:
    """[phase, step] of the furthest checkpoint."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    phases = [phase.name for phase in task.phases()]
    names = [path.name.rpartition("-") for path in run.checkpoints.glob("[!.]*-*")]
    return max(([phases.index(p), int(s)] for p, _, s in names if p in phases and s.isdigit()), default=None)


def _read_job_record(run: RunFolder) -> dict[str, Any]:
    path = run.folder / "slurm" / "job.json"
    return atomic_files.read_json(path) if path.exists() else {}


def _update_job_record(run: RunFolder, **facts: Any) -> None:
    """Update job.json; entries of another job are dropped."""
    before = _read_job_record(run)
    if "job" in facts and before.get("job") != facts["job"]:
        before = {}
    (run.folder / "slurm").mkdir(exist_ok=True)
    atomic_files.write_json(run.folder / "slurm" / "job.json", {**before, **facts})
