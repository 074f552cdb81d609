"""Two nodes that are two network namespaces, with a real link between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from isobatch.core.package import own_command
from isobatch.launch.clusters.slurm.job import plan_for_nodes
from isobatch.launch.clusters.slurm.legs import JobRequest
from isobatch.launch.local.run_setup import open_run, store_plan
from isobatch.tests.integration.helpers import furthest, launch, losses, summary
from isobatch.tests.slurm.nodes import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slurm
SLOWLY = ["qdisc", "add", "dev", "iso1", "root", "tbf", "rate", "1mbit", "burst", "8k", "latency", "1s"]
NAMES = tuple(f"isobatch{os.getpid()}-{number}" for number in (1, 2))
"""Of this process: tests of another may run beside it."""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespaces here: {done.stderr.strip()}")


@pytest.fixture
def linked() -> Iterator[None]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            ip("netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        ip(*f"link add iso1 netns {NAMES[0]} type veth peer name iso2 netns {NAMES[1]}".split())
        for number, name in enumerate(NAMES, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", f"iso{number}")
            ip("-n", name, "link", "set", f"iso{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield


WORDS = ("1", "n1,n2", "1", "10.77.0.1")
"""Of the job to a node: name of the attempt, nodes, the job's port, the first node's address."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Planned for two nodes, with the job's words to them."""
    for name in (
        "sbatch",
        "squeue",
        "sinfo",
        "scontrol",
    ):  # a Slurm that takes the job, and knows of no other
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n" + "echo 7\n" * (name == "sbatch"))
        (tmp_path / "bin" / name).chmod(0o755)
    words = ["slurm", "--task", f"{TASKS}:Line", "--cpu", "--nodes", "2", "--time", "5", "--name", "r"]
    done = launch(*words, "--submit", cwd=tmp_path, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    (tmp_path / "runs" / "r" / "slurm" / "meeting-1").mkdir(parents=True)
    found = open_run(str(tmp_path / "runs" / "r"))
    store_plan(found, plan_for_nodes(found, 2, JobRequest.read(found.folder)))
    return found.folder


def start(run: Path, rank: int) -> subprocess.Popen[str]:
    """A node of the step, as srun would start it there."""
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1", "SLURMD_NODENAME": f"n{rank + 1}"}
    return subprocess.Popen(
        ["ip", "netns", "exec", NAMES[rank], *own_command("node", str(run), *WORDS)],
        env={**os.environ, **step},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.usefixtures("linked")
def test_a_slow_link_costs_time_only(run: Path, tmp_path: Path) -> None:
    ip("netns", "exec", NAMES[0], "tc", *SLOWLY)
    nodes = [start(run, rank) for rank in (0, 1)]
    said = [node.communicate(timeout=120)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    one = launch("auto", "--task", f"{TASKS}:Line", "--name", "one", cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    assert summary(run)["world_size"] == 2
    assert furthest(losses(run), losses(tmp_path / "runs" / "one")) < 1e-5


@pytest.mark.usefixtures("linked")
def test_a_node_that_cannot_reach_the_first_says_so(run: Path) -> None:
    ip("-n", NAMES[0], "link", "set", "iso1", "down")
    first, second = (start(run, rank) for rank in (0, 1))
    try:
        _, said = second.communicate(timeout=90)
        assert second.returncode == 2
        assert "n2 cannot reach n1 at " in said.splitlines()[-1]
        assert "10.77.0.1" in said.splitlines()[-1]
    finally:  # as --kill-on-bad-exit does
        first.kill()
        first.communicate()
