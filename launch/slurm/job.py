"""`job RUN`: what the sbatch script runs, on the first node: attempts, one step of all nodes each.

Before the time limit Slurm sends SIGUSR1 (`--signal`), up to a minute early, and what `--signal` says cannot
be changed once submitted. So the job watches the clock itself, with a lead from this run's own steps and
checkpoints. At that time, or at a SIGUSR1 that the limit does not explain, the workers save and stop, and the
job puts itself back into the queue.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, FAILED, STOPPED, UserError, WorkerLostError
from isobatch.core.package import own_command
from isobatch.core.plan import Plan
from isobatch.engine.distributed.stop_signals import STOP_SIGNALS
from isobatch.engine.planning.detect import detect
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.launch.local import restarts
from isobatch.launch.local.run_setup import locate_data, store_plan
from isobatch.launch.slurm import client, time_limit
from isobatch.launch.slurm.command import refuse_if_in_a_job, stored_plan
from isobatch.launch.slurm.rendezvous import rendezvous_folder, wait_for

if TYPE_CHECKING:
    pass

REPEAT_SIGNAL_SECONDS = 10.0
EARLY_SIGNAL_SECONDS = 65.0
"""How much earlier than asked Slurm sends its signal."""
VERDICT_WAIT_SECONDS = 25.0
"""srun may end before its tasks where Slurm ends the job: how long a verdict is waited for."""
LOG_CHARACTERS = 2500
STEP_SHELL = """trap '' USR1 TERM INT; exec "$@" >>"$0/node-$SLURMD_NODENAME.log" 2>&1"""
"""A signal that comes while Python starts must not be its end (the next one is heard); a log per node."""
REQUEUEABLE_STATES = ("RUNNING", "PREEMPTED", "TIMEOUT")
"""States of a job that a stop may be followed by another leg. One that the user cancelled has ended."""


def job(words: Sequence[str]) -> int:
    """Usage: job RUN, inside a Slurm job; `slurm` writes the script that runs it."""
    if len(words) != 1:
        raise UserError("job: give the folder of one run, inside a Slurm job")
    run = RunFolder.open(words[0])
    allocation = client.Allocation.of(os.environ)
    with JobStop() as stop:
        if run.status() == "done":
            return DONE
        refuse_if_in_a_job(run, allocation.job)
        with run.lock("launch"):
            run.refuse_if_training()
            _note(run, job=allocation.job)
            steps = StepRunner(run, allocation, stop)
            code = restarts.train_with_restarts(run, steps).code
        return _go_on(run, allocation, stop) if code == STOPPED else code


class JobStop:
    """What asked this job to stop: `limit`, `term` or `interrupt`; empty so far."""

    def __init__(self) -> None:
        self.reason = ""
        self.warned = False
        """SIGUSR1 came: the time limit is near, or the job is to make room."""
        self._before: dict[int, Any] = {}

    def request(self, why: str) -> None:
        self.reason = self.reason or why

    def __enter__(self) -> JobStop:
        def hear(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGUSR1:
                self.warned = True
            else:
                self.request("term" if number == signal.SIGTERM else "interrupt")

        self._before = {number: signal.signal(number, hear) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class StepRunner:
    """Starts the run's attempts, each as a step on the nodes that are left."""

    def __init__(self, run: RunFolder, allocation: client.Allocation, stop: JobStop) -> None:
        self.allocation, self.stop = allocation, stop
        self.request = atomic_files.read_json(run.folder / "slurm" / "request.json")
        locate_data(run, run.recipe, None)
        self.nodes = self._left()
        self._plan(run)
        left = client.seconds_left(allocation.job)
        self.end = None if left is None else time.monotonic() + left

    def _left(self) -> tuple[str, ...]:
        return client.nodes_left(self.allocation.job, self.allocation.nodes)

    def _plan(self, run: RunFolder) -> None:
        """The run's plan for the nodes there are. The global batch stays."""
        if not self.nodes:
            raise UserError("none of this job's nodes is left")
        store_plan(run, plan_for_nodes(run, len(self.nodes), self.request))

    def __call__(self, run: RunFolder) -> Verdict | None:
        """One attempt, to its end."""
        if self.stop.reason:
            return Verdict(STOPPED, "asked to stop before it began")
        left = self._left()
        if left != self.nodes:
            print(f"going on with {len(left)} of {len(self.allocation.nodes)} nodes: {', '.join(left)}")
            self.nodes = left
            self._plan(run)
        nonce = secrets.token_hex(8)
        meeting = rendezvous_folder(run.folder, nonce)
        meeting.mkdir(parents=True)
        try:
            self._watch(run, subprocess.Popen(srun(run, self.nodes, self.allocation, nonce)))
            return self._verdict(run, nonce)
        finally:
            shutil.rmtree(meeting, ignore_errors=True)

    def _watch(self, run: RunFolder, step: subprocess.Popen[bytes]) -> None:
        """Until the step ends. A stop is told again: srun may not have been listening yet."""
        told = -REPEAT_SIGNAL_SECONDS
        while step.poll() is None:
            now = time.monotonic()
            left = None if self.end is None else self.end - now
            if should_save_now(
                left, self.stop.warned, self.request["lead"], time_limit.seconds_to_stop(run) or 0
            ):
                self.stop.request("limit")
            if self.stop.reason and now - told >= REPEAT_SIGNAL_SECONDS:
                # srun hands this one to every process of the step; at SIGTERM and SIGINT it ends itself.
                step.send_signal(signal.SIGUSR1)
                told = now
            time.sleep(0.5)

    def _verdict(self, run: RunFolder, nonce: str) -> Verdict | None:
        if self.stop.reason:
            wait_for(lambda: run.read_exit(nonce) is not None, VERDICT_WAIT_SECONDS)
        verdict = run.read_exit(nonce)
        if verdict and verdict.code == DONE:
            return verdict
        if self.stop.reason:
            return verdict or Verdict(STOPPED, "ended by Slurm before it could save")
        left = self._left()
        if lost := [node for node in self.nodes if node not in left]:
            return Verdict(FAILED, f"Slurm lost {', '.join(lost)}", WorkerLostError.cause)
        atomic_files.write_text(run.folder / "launcher.log", node_logs(run, self.nodes))
        return verdict


def plan_for_nodes(run: RunFolder, nodes: int, request: dict[str, Any]) -> Plan:
    """For `nodes` nodes like this one, as many processes on each as were asked for."""
    recipe, facts = run.recipe, run.facts
    task, _ = workload(recipe.task).make(recipe)
    asked, world = stored_plan(request["plan"]), request["local"] * nodes
    return make_plan(recipe, facts, task.model_size(facts), detect(nodes=nodes), asked, world=world)


def srun(run: RunFolder, nodes: Sequence[str], allocation: client.Allocation, nonce: str) -> list[str]:
    """The step: one launcher on each node, none of which outlives another that failed."""
    return [
        "srun",
        f"--nodes={len(nodes)}",
        f"--ntasks={len(nodes)}",
        f"--nodelist={','.join(nodes)}",
        "--ntasks-per-node=1",
        # What sbatch was told does not reach a step by itself.
        f"--cpus-per-task={allocation.cpus}",
        *([f"--gpus-per-node={allocation.gpus}"] if allocation.gpus else []),
        "--kill-on-bad-exit=1",
        "--mpi=none",
        "--unbuffered",
        *("bash", "-c", STEP_SHELL, str(run.folder.resolve() / "slurm")),
        *own_command("node", str(run.folder.resolve()), nonce),
    ]


def should_save_now(left: float | None, warned: bool, lead: float, measured: float) -> bool:
    """Whether to save now, to be gone before the time limit; `left` is the time until then, if there is one.

    A warning that comes long before the limit is about something else, and is heeded at once.
    """
    if left is not None and left <= max(lead, measured):
        return True
    return warned and (left is None or left > lead + EARLY_SIGNAL_SECONDS)


def node_logs(run: RunFolder, nodes: Sequence[str]) -> str:
    paths = [run.folder / "slurm" / f"node-{name}.log" for name in nodes]
    ends = [(p.name, p.read_text(errors="replace")[-LOG_CHARACTERS:]) for p in paths if p.is_file()]
    return "".join(f"--- {name}\n{text}\n" for name, text in ends)


def _go_on(run: RunFolder, allocation: client.Allocation, stop: JobStop) -> int:
    """After a stop: back into the queue where there was progress, else the end."""
    before = _noted(run).get("requeued_at")
    now = furthest_checkpoint(run)
    why_not = why_not_requeue(stop.reason, client.job_state(allocation.job), before, now)
    if why_not:
        print(f"stopped and not requeued: {why_not}", flush=True)
        return STOPPED
    _note(run, requeued_at=now)
    print(f"requeueing at step {now[1] if now else 0} (leg {allocation.restarts + 1})", flush=True)
    if problem := client.requeue(allocation.job):
        print(f"Slurm does not requeue the job: {problem}", flush=True)
    return STOPPED


def why_not_requeue(why: str, state: str, before: list[int] | None, now: list[int] | None) -> str:
    """Why a stopped job does not requeue itself; empty where it does."""
    if why not in ("limit", "term"):
        return "a signal asked for a stop, not the time limit"
    if state and state not in REQUEUEABLE_STATES:
        return f"the job is {state}"
    if now is None or (before is not None and now <= before):
        return "no checkpoint was added since the last start: a longer --time gives it the time to reach one"
    return ""


def furthest_checkpoint(run: RunFolder) -> list[int] | None:
    """[phase, step] of the furthest checkpoint."""
    task, _ = workload(run.recipe.task).make(run.recipe)
    phases = [phase.name for phase in task.phases()]
    names = [path.name.rpartition("-") for path in run.checkpoints.glob("[!.]*-*")]
    return max(([phases.index(p), int(s)] for p, _, s in names if p in phases and s.isdigit()), default=None)


def _noted(run: RunFolder) -> dict[str, Any]:
    path = run.folder / "slurm" / "job.json"
    return atomic_files.read_json(path) if path.exists() else {}


def _note(run: RunFolder, **facts: Any) -> None:
    """job.json; what was noted of another job says nothing of this one."""
    before = _noted(run)
    if "job" in facts and before.get("job") != facts["job"]:
        before = {}
    (run.folder / "slurm").mkdir(exist_ok=True)
    atomic_files.write_json(run.folder / "slurm" / "job.json", {**before, **facts})
