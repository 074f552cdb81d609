"""A run that goes on from its copies in a store, on a machine that has nothing of it, or only its result."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from isobatch.tests.integration.helpers import RAGGED, launch, losses, summary

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ["--task", RAGGED, "--epochs", "3", "--save-every", "4", "--processes", "1", "--quiet"]


def test_a_run_goes_on_from_its_copy_and_a_result_that_is_here_stays(tmp_path: Path) -> None:
    store, run = f"file://{tmp_path / 'store'}", tmp_path / "runs" / "copied"
    done = launch("auto", *SETTINGS, "--name", "copied", "--checkpoint-copy", store, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(run / "checkpoints")
    again = launch("resume", f"{store}/copied", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "copied: done, 12 steps" in again.stdout
    assert (run / "final").is_dir()

    whole = losses(run)
    shutil.rmtree(run)
    fetched = launch("resume", f"{store}/copied", cwd=tmp_path)
    assert fetched.returncode == 0, fetched.stderr
    assert summary(run)["status"] == "done"
    assert losses(run) == whole
