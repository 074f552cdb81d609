"""What a user sees of a job on a cluster: refusals before it, its state, its logs, its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.package import own_command
from isobatch.tests.integration.helpers import launch
from isobatch.tests.slurm.nodes import TASKS, Cluster, Job, wait_for

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slurm


def listed(job: Job) -> dict[str, Any]:
    """The job's run, as `runs --json` has it."""
    shown = launch("runs", str(job.run.parent), "--json", cwd=job.run.parent, **job.cluster.environment)
    (row,) = json.loads(shown.stdout)["runs"]
    return dict(row)


def test_what_the_cluster_does_not_start_is_said(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["--task", f"{TASKS}:Line", "--cpu", "--submit"]
    cluster.ask("scontrol", "update", "partitionname=debug", "MaxTime=60")
    try:
        late = cluster.slurm(*flags, "--name", "late", "--time", "2:00:00", cwd=tmp_path)
        assert late.returncode == 0, late.stderr
        waits = re.compile(r"Partition(TimeLimit|Config)")  # as Slurm names it
        asked = ("runs", "--json")
        wait_for(lambda: waits.search(launch(*asked, cwd=tmp_path, **cluster.environment).stdout), 10)
        refused = cluster.slurm(*flags, "--name", "r", "--time", "5", "--partition", "gpu", cwd=tmp_path)
        assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
        assert "invalid partition specified: gpu" in refused.stderr.splitlines()[-1]
    finally:
        cluster.ask("scontrol", "update", "partitionname=debug", "MaxTime=INFINITE")


def test_a_job_from_the_queue_to_its_cancellation(cluster: Cluster, tmp_path: Path) -> None:
    flags = ["--steps", "900", "--eval-every", "1000", "--sbatch", "--hold"]
    job = cluster.submit("Slow", *flags, cwd=tmp_path)
    row = listed(job)
    waits = ("queued", "PENDING", "JobHeldUser", None, 900)
    assert (row["state"], row["job_state"], row["reason"], row["step"], row["steps_total"]) == waits
    ask = cluster.environment
    assert "PENDING (JobHeldUser)" in launch("logs", str(job.run), cwd=tmp_path, **ask).stderr
    again = [*flags[:-2], "--name", "r", "--ledger"]
    for words in (["auto", "--task", f"{TASKS}:Slow", *again], ["resume", str(job.run)]):
        refused = launch(*words, cwd=tmp_path, **ask)
        assert refused.returncode == 2
        assert f"is in job {job.number} already (PENDING (JobHeldUser)): isobatch cancel" in refused.stderr
    cluster.ask("scontrol", "release", job.number)
    followed = subprocess.Popen(
        own_command("logs", str(job.run), "-f"),
        env={**os.environ, **ask},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    job.reach(30)
    row = listed(job)
    assert (row["state"], row["job_state"]) == ("running", "RUNNING")
    assert row["step"] >= 30
    assert row["seconds_left"] > 10
    done = launch("cancel", str(job.run), cwd=tmp_path, **ask)
    assert done.returncode == 0, done.stderr
    assert "stopped; `resume" in done.stdout
    assert "train 1/900" in followed.communicate(timeout=30)[0]
    assert followed.returncode == 75
    row = listed(job)
    assert (row["state"], row["job_state"], row["leg"]) == ("stopped", "CANCELLED", 1)
    assert launch("cancel", str(job.run), cwd=tmp_path, **ask).stdout.endswith("nothing to cancel\n")
