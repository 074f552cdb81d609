"""What goes wrong on a cluster, on one: nodes that die for real, suspension, preemption, memory."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isobatch.tests.integration.helpers import launch, rows, summary
from isobatch.tests.slurm.nodes import TASKS, Cluster, Job, launchers, refuse_wrong_end, wait_for

pytestmark = pytest.mark.slurm
STEPS = 120
FLAGS = ["--nodes", "2", "--steps", str(STEPS), "--eval-every", "1000", "--save-every", "20"]


def decisions(job: Job) -> list[str]:
    path = job.run / "decisions.jsonl"
    return [row["decision"] for row in rows(job.run, "decisions.jsonl")] if path.exists() else []


def test_both_nodes_die_one_after_the_other(cluster: Cluster, tmp_path: Path) -> None:
    """The second one first: the job goes on without it. Then the first, all that the job still has."""
    job = cluster.submit("Slow", *FLAGS, cwd=tmp_path)
    job.reach(25)
    cluster.kill_node("n2")
    wait_for(lambda: "going on with 1 of 2 nodes: n1" in job.output(), 60)
    job.reach(job.steps() + 10)
    cluster.start_node("n2")
    cluster.kill_node("n1")
    wait_for(lambda: job.shown("Restarts") == "1", 60)
    cluster.start_node("n1")
    job.finish(120)
    assert "restart" in decisions(job)
    refuse_wrong_end(job, STEPS)


def test_a_job_whose_first_node_dies_is_put_back_by_the_others(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm itself leaves it without its script, and idle until the time limit."""
    job = cluster.submit("Slow", *FLAGS, cwd=tmp_path)
    job.reach(25)
    cluster.kill_node("n1")
    wait_for(lambda: job.shown("Restarts") == "1", 60)
    cluster.start_node("n1")
    job.finish(120)
    refuse_wrong_end(job, STEPS)


def test_a_lost_launcher_is_a_lost_worker(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("Slow", *FLAGS, cwd=tmp_path)
    job.reach(25)
    os.kill(launchers(job.run)["n2"].pid, signal.SIGKILL)
    job.finish(120)
    assert "restart" in decisions(job)
    refuse_wrong_end(job, STEPS)


def test_a_suspension_is_no_slow_step(cluster: Cluster, tmp_path: Path) -> None:
    """Counted as one, it would make the time that a stop takes 51 s of the 60 s that a leg has."""
    # No save, whose pause would hide the suspension; steps enough that it comes before the last.
    flags = ["--nodes", "2", "--steps", "200", "--eval-every", "1000", "--save-every", "1000"]
    job = cluster.submit("Slow", *flags, cwd=tmp_path, limit="00:01:00")
    job.reach(25)
    cluster.ask("scontrol", "suspend", job.number)
    wait_for(lambda: job.shown("JobState") == "SUSPENDED", 10)
    time.sleep(12)
    cluster.ask("scontrol", "resume", job.number)
    job.finish(90)
    assert max(row["step_seconds"] for row in rows(job.run) if "step_seconds" in row) > 10
    assert job.shown("Restarts") == "0"
    refuse_wrong_end(job, 200)


@pytest.mark.parametrize("partition", ["debug", "grace"])
def test_a_preempted_job_saves_and_goes_on(cluster: Cluster, tmp_path: Path, partition: str) -> None:
    """With a minute of grace, in which it puts itself back, and with none: then Slurm does so."""
    job = cluster.submit("Slow", *FLAGS, "--partition", partition, cwd=tmp_path)
    job.reach(25)
    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 1\n")
    asked = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    assert cluster.ask("sbatch", *asked, str(script))
    job.finish(120)
    assert job.shown("Restarts") == "1"
    assert summary(job.run)["resumed_from"], job.said()
    assert ("preempted: requeueing" if partition == "grace" else "Slurm does so itself") in job.output()
    refuse_wrong_end(job, STEPS)


def test_a_job_over_its_memory_limit_goes_on_with_less(cluster: Cluster, tmp_path: Path) -> None:
    flags = [*FLAGS, "--mem", "1900"]
    job = cluster.submit("Greedy", *flags, cwd=tmp_path)
    job.finish(180)
    assert "smaller micro-batches" in decisions(job)
    assert "the job's memory limit was exceeded" in str(rows(job.run, "decisions.jsonl"))
    refuse_wrong_end(job, STEPS)


def test_a_job_that_needs_more_memory_in_any_case_says_so(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("Insatiable", *FLAGS, "--mem", "1900", cwd=tmp_path)
    wait_for(lambda: job.shown("JobState") in ("FAILED", "OUT_OF_MEMORY"), 120)
    assert job.shown("ExitCode") == "3:0"
    assert "smaller micro-batches, too: ask for more with --mem" in summary(job.run)["reason"]
    assert summary(job.run)["status"] == "failed"


def test_slurmctld_is_away(cluster: Cluster, tmp_path: Path) -> None:
    """While a job trains, when it is to be requeued, and when another is to be submitted."""
    job = cluster.submit("Slow", *FLAGS, cwd=tmp_path)
    job.reach(25)
    cluster.stop_controller()
    try:
        job.reach(job.steps() + 10)
        os.kill(job.script().pid, signal.SIGUSR1)
        wait_for(lambda: "stopped at step" in job.output(), 60)
        other = ["slurm", "--task", f"{TASKS}:Line", "--cpu", "--time", "5", "--name", "other", "--submit"]
        with ThreadPoolExecutor() as pool:
            tries = [
                pool.submit(launch, *words, cwd=tmp_path, **cluster.environment)
                for words in (["resume", str(job.run)], other)
            ]
        for refused in (one.result() for one in tries):
            assert refused.returncode == 2
            assert "Slurm does not answer" in refused.stderr.splitlines()[-1]
        assert not (tmp_path / "runs" / "other").exists()
        wait_for(lambda: "Slurm does not answer" in job.output(), 90)
    finally:
        cluster.start_controller()
    job.finish(150)
    assert job.shown("Restarts") == "1"
    refuse_wrong_end(job, STEPS)


@pytest.mark.parametrize("missing", ["the run's folder", "the Python environment"])
def test_what_a_node_does_not_see_is_named(cluster: Cluster, tmp_path: Path, missing: str) -> None:
    job_folder = tmp_path / "runs" if missing == "the run's folder" else Path(sys.executable).parent
    job_folder.mkdir(exist_ok=True)
    with cluster.hidden("n2", job_folder):
        job = cluster.submit("Slow", *FLAGS, cwd=tmp_path)
        wait_for(lambda: job.shown("JobState") == "FAILED", 60)
    assert f"\nisobatch: n2 does not see {missing}" in job.output(), job.said()
    assert job.shown("ExitCode") == "2:0"
    assert f"n2 does not see {missing}" in summary(job.run)["reason"]
    again = cluster.submit("Slow", *FLAGS, cwd=tmp_path)
    again.finish(60)


def test_clocks_a_minute_apart(cluster: Cluster, tmp_path: Path) -> None:
    with cluster.clock_ahead("n2", 60):
        job = cluster.submit("Slow", *FLAGS, cwd=tmp_path)
        job.reach(25)
        cluster.ask("scontrol", "requeue", job.number)
        job.finish(90)
    refuse_wrong_end(job, STEPS)


def test_shards_of_two_nodes_go_on_in_one_process(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("Slow", *FLAGS, "--strategy", "zero2", cwd=tmp_path)
    job.reach(25)
    cancelled = launch("cancel", str(job.run), cwd=tmp_path, **cluster.environment)
    assert cancelled.returncode == 0, cancelled.stderr
    resumed = launch("resume", str(job.run), "--processes", "1", cwd=tmp_path, **cluster.environment)
    assert resumed.returncode == 0, resumed.stderr
    assert summary(job.run)["world_size"] == 1
    refuse_wrong_end(job, STEPS)
