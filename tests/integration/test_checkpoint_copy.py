"""A run that goes on from its copies in a store, on a machine that has nothing of it, or only its result."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from isobatch.tests.integration.helpers import RAGGED, losses, succeed, summary

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ["--task", RAGGED, "--epochs", "3", "--save-every", "4", "--processes", "1", "--quiet"]


def test_a_run_goes_on_from_its_copy_and_a_result_that_is_here_stays(tmp_path: Path) -> None:
    store, run = f"file://{tmp_path / 'store'}", tmp_path / "runs" / "copied"
    succeed("auto", *SETTINGS, "--name", "copied", "--checkpoint-copy", store, cwd=tmp_path)
    shutil.rmtree(run / "checkpoints")
    again = succeed("resume", f"{store}/copied", cwd=tmp_path)
    assert "copied: done, 12 steps" in again.stdout
    assert (run / "final").is_dir()

    whole = losses(run)
    shutil.rmtree(run)
    succeed("resume", f"{store}/copied", cwd=tmp_path)
    assert summary(run)["status"] == "done"
    assert losses(run) == whole
