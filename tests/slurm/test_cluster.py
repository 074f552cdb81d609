"""What a job goes through on a cluster, on one: limits, requeues, ranks and nodes that die."""

from __future__ import annotations

import os
import shlex
import signal
from typing import TYPE_CHECKING

import pytest

from isobatch.tests.integration.helpers import furthest, launch, losses, rows, summary
from isobatch.tests.slurm.nodes import TASKS, Cluster, Job, ranks, refuse_wrong_end

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slurm


def test_two_nodes_learn_what_one_process_learns(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("Line", "--nodes", "2", cwd=tmp_path)
    job.finish(60)
    assert summary(job.run)["world_size"] == 2
    assert all((job.run / "slurm" / f"node-{name}.log").exists() for name in ("n1", "n2"))
    one = launch("auto", "--task", f"{TASKS}:Line", "--name", "one", cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    assert furthest(losses(job.run), losses(tmp_path / "runs" / "one")) < 1e-5
    refuse_wrong_end(job, 40)


def test_a_job_stopped_by_its_time_limit_requeues_itself_until_done(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["--nodes", "2", "--steps", "300", "--eval-every", "1000"]
    job = cluster.submit("SlowUntilRequeued", *flags, cwd=tmp_path, limit="00:01:00")
    job.finish(300)
    assert int(job.shown("Restarts")) >= 1
    refuse_wrong_end(job, 300)


def test_a_job_that_is_requeued_saves_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("Slow", "--nodes", "2", "--steps", "100", "--eval-every", "1000", cwd=tmp_path)
    job.reach(30)
    cluster.ask("scontrol", "requeue", job.number)
    job.finish(90)
    assert int(job.shown("Restarts")) == 1
    assert summary(job.run)["resumed_from"], job.said()
    refuse_wrong_end(job, 100)


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("Slow", "--nodes", "2", "--steps", "900", "--eval-every", "1000", cwd=tmp_path)
    job.reach(30)
    cluster.ask("scancel", job.number)
    with pytest.raises(AssertionError):
        job.finish(40)
    assert job.shown("JobState") == "CANCELLED"
    assert summary(job.run)["status"] == "stopped", job.said()


def test_a_rank_that_is_killed_costs_steps_and_no_samples(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["--nodes", "2", "--steps", "100", "--eval-every", "1000", "--save-every", "20"]
    job = cluster.submit("Slow", *flags, cwd=tmp_path)
    job.reach(30)
    os.kill(ranks(job.run)[0].pid, signal.SIGKILL)
    job.finish(120)
    assert [r for r in rows(job.run, "decisions.jsonl") if r["decision"] == "restart"], job.said()
    refuse_wrong_end(job, 100)


def test_the_nodes_that_are_left_go_on(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["--nodes", "2", "--steps", "100", "--eval-every", "1000", "--save-every", "20"]
    job = cluster.submit("Slow", *flags, cwd=tmp_path)
    job.reach(30)
    cluster.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    job.finish(120)
    assert summary(job.run)["world_size"] == 1, job.said()
    refuse_wrong_end(job, 100)


def test_an_array_trains_a_run_for_each_seed(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["--cpu", "--time", "5", "--array", "3,5", "--name", "r", "--cpus-per-task", "1", "--submit"]
    done = cluster.slurm("--task", f"{TASKS}:Line", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for number, seed in enumerate((3, 5)):
        Job(cluster, f"{done.stdout.strip()}_{number}", tmp_path / "runs" / f"r-seed{seed}").finish(60)
        assert summary(tmp_path / "runs" / f"r-seed{seed}")["status"] == "done"


HOSTILE = "it's $(touch pwned) `touch pwned` \"; touch pwned #\\ %j"


def test_no_name_or_path_breaks_out_of_the_script(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / 'a b\'s "$(touch pwned)" %j #'
    folder.mkdir()
    setup = folder / "it's; touch pwned.sh"
    setup.write_text("touch set-up\n")
    flags = ["--nodes", "1", "--steps", "5", "--setup", str(setup)]
    flags += ["--sbatch", f"--comment={shlex.quote(HOSTILE)}"]
    job = cluster.submit("Line", *flags, "--after", _held(cluster, tmp_path), cwd=folder)
    assert HOSTILE in cluster.ask("scontrol", "show", "job", job.number)
    shown = launch("runs", "--json", cwd=folder, **cluster.environment)
    assert "PENDING" in shown.stdout
    cluster.ask("scontrol", "update", f"JobId={job.number}", "Dependency=")
    job.finish(60)
    assert (folder / "set-up").exists()
    assert not list(tmp_path.rglob("pwned"))
    assert (job.run / "slurm" / f"{job.number}.out").exists()


def _held(cluster: Cluster, folder: Path) -> str:
    script = folder / "held.sh"
    script.write_text("#!/bin/bash\n#SBATCH --hold\n")
    return cluster.ask("sbatch", "--parsable", str(script)).strip()
