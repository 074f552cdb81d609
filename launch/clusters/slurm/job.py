"""Slurm as a cluster, and `job RUN`, which the sbatch script runs on the first node: it trains in attempts,
each one srun step.

Slurm sends SIGUSR1 (`--signal`) before the time limit, up to a minute early, and that time cannot be changed
after submission. So the job watches the clock itself, with a lead computed from this run's measured steps and
checkpoints. At that time, or at a SIGUSR1 long before the limit (a preemption), workers save and stop, and
the job requeues itself.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, FAILED, STOPPED, JobMemoryError, UserError, WorkerLostError
from isobatch.core.measures import wait_for
from isobatch.core.plan import Plan
from isobatch.core.terminal import print_lines
from isobatch.engine import consent
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.machine.detect import detect
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder, Verdict
from isobatch.launch.clusters.cluster import Cluster, JobState, refuse_if_in_a_job
from isobatch.launch.clusters.slurm import client, legs
from isobatch.launch.clusters.slurm.node import MEETING
from isobatch.launch.clusters.slurm.step import Step, explain_end, srun_command, unreachable_nodes
from isobatch.launch.local import launch_run
from isobatch.launch.local.placement import ends_of_logs
from isobatch.launch.local.run_setup import locate_data, one_run, plan_options_from_request, store_plan

REPEAT_SIGNAL_SECONDS = 10.0
VERDICT_WAIT_SECONDS = 25.0
"""How long to wait for exit.json after srun, which may end before its tasks where Slurm ends the job."""
MEASURE_SECONDS = 10.0
"""Between two looks at how long a stop of this run takes."""
LINGER_SECONDS = 60.0
"""How long srun may go on after a verdict: it waits for a node that died until Slurm has noticed."""
NO_ANSWER_PAUSE_SECONDS = 10.0
"""Before another step, where slurmctld did not answer."""


def job(words: Sequence[str]) -> int:
    """Usage: job RUN, inside a Slurm job; `slurm` writes the script that runs it."""
    run = RunFolder.open(one_run(words, "job"))
    allocation = client.Allocation.from_environment(os.environ)
    request = legs.JobRequest.read(run.folder)
    slurm, stop = Slurm(), JobStop()
    with stop:
        if run.status() == "done":
            return DONE
        refuse_if_in_a_job(run, allocation.job)
        with run.lock("launch"):
            try:
                consent.require(run.recipe, run.folder)
                launch_run.wait_for_orphans(run)
                client.update_job_record(run, job=allocation.job, cancel=None)
                locate_data(run, None, mend=True)
                slurm.begin(allocation, request, stop)
                verdict = launch_run.train_with_restarts(run, slurm)
            except UserError as error:
                verdict = Verdict(error.exit_code, str(error))
        if verdict.code == STOPPED:
            slurm.requeue_or_stop(run, stop.reason)
        elif verdict.code != DONE:
            run.mark_failed(verdict.reason)
            print(f"failed: {verdict.reason}", flush=True)
        return verdict.code


def plan_for_nodes(run: RunFolder, nodes: int, request: legs.JobRequest) -> Plan:
    """The plan for `nodes` nodes like this one."""
    recipe, facts = run.recipe, run.facts
    task, _ = workload_of(recipe).make(recipe)
    options, world_size = plan_options_from_request(request.plan), request.local * nodes
    return make_plan(recipe, facts, task.model_size(facts), detect(nodes=nodes), options, world=world_size)


class JobStop(StopFlag):
    """A stop flag whose `reason` is `limit`, `term` or `interrupt`."""

    warned = False
    """Slurm's warning came: the time limit is near, or the job is about to be preempted."""

    def _handle_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.warned = True
        else:
            self.request("term" if number == signal.SIGTERM else "interrupt")


class Slurm(Cluster):
    """Slurm. Each attempt is one srun step on the nodes that a job still has, asked from inside of it."""

    def state(self, runs: Sequence[RunFolder]) -> dict[Path, JobState]:
        jobs = {run.folder: job for run in runs if (job := client.last_job_of(run))}
        known = client.job_states(list(jobs.values()))
        return {folder: known[job] for folder, job in jobs.items() if job in known}

    def cancel(self, run: RunFolder, job: JobState, now: bool) -> None:
        if job.state == "SUSPENDED" and not now:
            raise UserError(f"job {job.job} is suspended: scontrol resume {job.job} first, or cancel --now")
        words = () if now or job.stage == "queued" else ("--batch", "--signal=INT")
        if words:
            client.update_job_record(run, cancel="save")  # first: the job reads it when the signal comes
        done = client.run_slurm("scancel", *words, job.job)
        if done.returncode or done.stderr.strip():
            raise UserError(f"scancel {job.job}: {client.error_of(done) or done.stderr.strip()}")

    def begin(self, allocation: client.Allocation, request: legs.JobRequest, stop: JobStop) -> None:
        """Inside a job, before its first attempt."""
        self.allocation, self.request, self.stop = allocation, request, stop
        self.nodes: tuple[str, ...] = ()
        """Of the newest attempt."""
        self.clock = legs.LegClock(lambda: client.seconds_left(allocation.job), request.seconds)
        self._seconds_to_stop = self._measure_again = 0.0
        self.unreachable: set[str] = set()
        """Nodes on which srun could start nothing; Slurm may not have noticed yet."""
        self._listener = socket.create_server(("", 0))
        """Open as long as this process is there, for nodes that ask whether it is."""

    def requeue_or_stop(self, run: RunFolder, reason: str) -> None:
        """After a stop: requeue the job if it made progress, and say so. `reason`: as JobStop says it."""
        job, leg = self.allocation.job, self.allocation.restarts + 1
        now, record = legs.furthest_checkpoint(run), client.job_record(run)
        step, before = now[1] if now else 0, record.get("requeued_at")
        if record.get("cancel"):
            saved = f"saved at step {step} and cancelled: `resume` goes on"
            print(saved if now else "cancelled before anything was saved", flush=True)
            client.run_slurm("scancel", job)
            return
        shown = client.show("job", job)
        if why_not := legs.why_not_requeue(reason, leg, self.request.max_legs, before, now, shown):
            print(f"stopped at step {step} and not requeued: {why_not}", flush=True)
            if run.status() == "stopped":  # for `runs` and `doctor`
                run.write_summary({**(run.summary() or {}), "reason": f"not requeued: {why_not}"})
            return
        client.update_job_record(run, requeued_at=now)
        print(f"{'preempted: ' * legs.was_preempted(shown)}requeueing at step {step} (leg {leg})", flush=True)
        if problem := legs.requeue(job, self.clock.left):
            print(f"Slurm does not requeue the job: {problem}", flush=True)

    def _available_nodes(self) -> tuple[str, ...]:
        found = client.available_nodes(self.allocation.job, self.allocation.nodes)
        return tuple(node for node in found if node not in self.unreachable)

    def attempt(self, run: RunFolder) -> Verdict | None:
        while not self.stop.requested:
            self._plan_for_available_nodes(run)
            verdict, said = self._run_step(run)
            if verdict is not None or client.NO_ANSWER not in said:
                return verdict
            time.sleep(NO_ANSWER_PAUSE_SECONDS)
            self._stop_where_it_is_time(run)
        return Verdict(STOPPED, "asked to stop before it began")

    def _plan_for_available_nodes(self, run: RunFolder) -> None:
        """Plan anew where they are others than before; the global batch stays."""
        launch_run.wait_for_orphans(run)
        left, before = self._available_nodes(), self.nodes
        if not left:
            raise UserError("none of this job's nodes is left")
        if left != before:
            self.nodes = left
            store_plan(run, plan_for_nodes(run, len(left), self.request))
        if left != before and before:
            all_nodes = len(self.allocation.nodes)
            print(f"going on with {len(left)} of {all_nodes} nodes: {', '.join(left)}", flush=True)

    def _run_step(self, run: RunFolder) -> tuple[Verdict | None, str]:
        """A step's verdict, and what its srun said."""
        place = run.folder / "slurm"
        with tempfile.TemporaryDirectory(prefix=MEETING, dir=place, ignore_cleanup_errors=True) as meeting:
            # A name of its own: no file of an earlier step is taken for one of this.
            nonce = Path(meeting).name.removeprefix(MEETING)
            port = str(self._listener.getsockname()[1])
            address = client.show("node", self.nodes[0]).get("NodeAddr", "") if len(self.nodes) > 1 else ""
            words = (nonce, ",".join(self.nodes), port, *([address] if address else ()))
            saved = legs.furthest_checkpoint(run)
            where = f"from step {saved[1]}" if saved else "from the beginning"
            leg = f"job {self.allocation.job}, leg {self.allocation.restarts + 1}"
            print_lines(f"{leg}: {', '.join(self.nodes)}, {where}")
            step = Step(srun_command(run, self.nodes, self.allocation, self.request, words))
            self._watch(run, step, nonce)
            return self._verdict(run, nonce, step), step.said()

    def _watch(self, run: RunFolder, step: Step, nonce: str) -> None:
        """Wait for the end of the step; repeat a stop until it ends: srun may not be ready for the first."""
        last_sent = last_read = time.monotonic() - REPEAT_SIGNAL_SECONDS
        ended: float | None = None
        while step.poll() is None:
            now = time.monotonic()
            self._stop_where_it_is_time(run)
            if self.stop.requested and now - last_sent >= REPEAT_SIGNAL_SECONDS:
                step.send_signal(signal.SIGUSR1)
                last_sent = now
            if ended is None and now - last_read >= REPEAT_SIGNAL_SECONDS:
                last_read, ended = now, now if run.read_exit(nonce) else None
            if ended is not None and now - ended > LINGER_SECONDS:
                step.end()
            time.sleep(0.5)

    def _stop_where_it_is_time(self, run: RunFolder) -> None:
        self.clock.watch()
        now = time.monotonic()
        if now >= self._measure_again:
            self._measure_again = now + MEASURE_SECONDS
            self._seconds_to_stop = min(legs.seconds_to_stop(run), self.clock.limit / 2)
        left, lead = self.clock.left(), self.request.lead
        if legs.should_save_now(left, self.stop.warned, lead, self._seconds_to_stop):
            self.stop.request("limit")

    def _verdict(self, run: RunFolder, nonce: str, step: Step) -> Verdict | None:
        if self.stop.requested:
            wait_for(lambda: run.read_exit(nonce) is not None, VERDICT_WAIT_SECONDS)
        verdict = run.read_exit(nonce)
        if verdict and verdict.code == DONE:
            return verdict
        # Slurm, or somebody through it, stops the job: it is preempted, requeued or cancelled.
        shown = {} if self.stop.requested else client.show("job", self.allocation.job)
        is_ended = legs.was_preempted(shown) or shown.get("JobState", "RUNNING") != "RUNNING"
        if self.stop.requested or is_ended:
            return verdict or Verdict(STOPPED, "ended by Slurm before it could save")
        is_stopped = verdict is not None and verdict.code == STOPPED
        is_lost = verdict is None or is_stopped or verdict.cause == WorkerLostError.cause
        if is_lost and (why := self._loss(step.said())):
            return why
        if verdict is None and (step.poll() or 0) < 0:
            return Verdict(FAILED, "srun was ended by a signal", WorkerLostError.cause)
        if is_stopped:
            # srun where it loses a launcher; Slurm, which repeats the signals that a lost node has missed.
            return Verdict(FAILED, "a signal stopped the step, and not the job", WorkerLostError.cause)
        logs = (run.folder / "slurm" / f"node-{node}.log" for node in self.nodes)
        atomic_files.write_text(run.folder / "launcher.log", ends_of_logs(logs))
        return verdict

    def _loss(self, said: str) -> Verdict | None:
        """What Slurm knows about the end of a step in which a process was lost."""
        self.unreachable |= set(unreachable_nodes(said))
        found = explain_end(said)
        if found and found.cause == JobMemoryError.cause:
            return found
        if lost := sorted({*self.nodes} - {*self._available_nodes()}):
            return Verdict(FAILED, f"Slurm lost {', '.join(lost)}", WorkerLostError.cause)
        return found
