"""Every command of docs/slurm.md works as it stands there, but for the machine.

These two nodes have no GPUs: `--gpus-per-node N` is run as `--cpu --cpus-per-task 1`, `--nodes 4` as
`--nodes 2` and `--partition gpu` as `--partition debug`. The first job trains to its end. Later ones wait
behind a job that holds both nodes, as they would for GPUs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from typing import TYPE_CHECKING

import pytest

from isobatch.core.package import own_command
from isobatch.tests.integration.helpers import ROOT, summary

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.tests.slurm.nodes import Cluster

pytestmark = pytest.mark.slurm
PAGE = (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8")
FIRST, *LATER = re.findall(r"```\n(.*?)```", PAGE, re.S)
HERE = {
    r"--gpus-per-node \d+": "--cpu --cpus-per-task 1",
    "--nodes 4": "--nodes 2",
    "--partition gpu": "--partition debug",
    "--cpus-per-task=16": "--cpus-per-task=1 --output=/dev/null",
}
"""What the page shows -> what this cluster has."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the reader has: isobatch on PATH, texts, an image."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "isobatch"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(own_command())} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.txt").write_text("It rained, and then it did not. " * 200)
    (tmp_path / "torch.sif").touch()
    return tmp_path


def bash(block: str, cluster: Cluster, folder: Path) -> subprocess.CompletedProcess[str]:
    for shown, here in HERE.items():
        block = re.sub(shown, here, block)
    environment = {**os.environ, **cluster.environment, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    words = ["/bin/bash", "-euc", block]
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_every_command_of_the_page(cluster: Cluster, folder: Path) -> None:
    done = bash(FIRST, cluster, folder)
    assert done.returncode == 0, done.stderr
    assert summary(folder / "runs" / "first")["status"] == "done"
    assert re.search(r"first  .*  done ", done.stdout), done.stdout
    cluster.ask("sbatch", "-N2", "--exclusive", "--output=/dev/null", "--wrap=sleep 900")
    for block in LATER:
        done = bash(block, cluster, folder)
        assert done.returncode == 0, block + done.stderr
    assert not list((folder / "runs" / "week" / "checkpoints").glob("*"))
    jobs = {
        p.parent.parent.name: json.loads(p.read_text())["job"] for p in folder.glob("runs/*/slurm/job.json")
    }
    waiting = cluster.ask("squeue", "-h", "-r", "-o", "%i").split()
    assert {name for name, job in jobs.items() if job not in waiting} == {"first", "week"}
    assert len([name for name in jobs if name.startswith("sweep-lr")]) == 9
    assert sorted(p.name for p in folder.glob("runs/slurm-*")) == ["slurm-seeds", "slurm-sweep"]
    held = cluster.ask("scontrol", "show", "job", jobs["after"])
    assert f"afterok:{jobs['base']}" in held
    assert "torch.sif" in (folder / "runs" / "inside" / "slurm" / "request.json").read_text()
