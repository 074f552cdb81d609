"""Every launcher gives the losses of one process; a world that is not the plan's is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from isobatch.tests.integration.helpers import (
    RAGGED,
    ROOT,
    command,
    furthest,
    ledger,
    losses,
    succeed,
    summary,
    warm_python,
)

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ["--task", RAGGED, "--steps", "12", "--quiet", "--name", "run", "--ledger"]
TRAIN = str(ROOT / "launch" / "train.py")
LAUNCHERS = {
    "accelerate": [
        *("-m", "accelerate.commands.launch"),
        *("--config_file", str(ROOT / "configs/accelerate/cpu.yaml"), "--main_process_port", "0", TRAIN),
    ],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", TRAIN],
    "auto": ["-m", "isobatch", "auto", "--processes", "2"],
    "plain": [TRAIN],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    succeed("auto", *SETTINGS, "--processes", "1", cwd=folder)
    return folder / "runs" / "run"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_same_losses_under_every_launcher(launcher: str, alone: Path, tmp_path: Path) -> None:
    done = command([warm_python(), *LAUNCHERS[launcher], *SETTINGS], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "runs" / "run"
    assert summary(run)["world_size"] == (1 if launcher == "plain" else 2)
    assert furthest(losses(run), losses(alone)) < 1e-5
    assert ledger(run) == ledger(alone)
    # One run, not one per process.
    assert [p.name for p in run.parent.iterdir()] == ["run"]


def test_processes_that_nobody_joined_are_refused(tmp_path: Path) -> None:
    done = command([warm_python(), TRAIN, *SETTINGS], cwd=tmp_path, SLURM_STEP_NUM_TASKS="2")
    assert done.returncode == 2
    assert "2 processes were started" in done.stderr
    assert not (tmp_path / "runs").exists()
