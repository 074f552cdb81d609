"""The prepared cache changed while a run trains on it: found before a checkpoint holds it, or said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from isobatch.tests.integration.helpers import ROOT, launch, losses, rows, succeed, summary
from isobatch.tests.paths import new_cache

if TYPE_CHECKING:
    from pathlib import Path

TASKS = f"{ROOT}/tests/tasks/tampering.py"


def auto(folder: Path, task: str, *words: str) -> tuple[int, str]:
    cache = {"ISOBATCH_CACHE": new_cache(folder / "cache")}
    common = [] if "--name" in words else ["--name", "one"]
    done = launch("auto", "--task", f"{TASKS}:{task}", *common, *words, cwd=folder, **cache)
    return done.returncode, done.stderr


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_changed_labels_end_the_run_and_a_resumed_one_is_honest(processes: int, tmp_path: Path) -> None:
    code, said = auto(tmp_path, "Changes", "--save-every", "8", "--processes", str(processes))
    assert code == 3, said
    run = tmp_path / "runs" / "one"
    reason = summary(run)["reason"]
    assert "y.npy was changed after it was prepared" in reason
    assert {p.name for p in (run / "checkpoints").glob("[!.]*")} <= {"train-8"}  # from before the change
    succeed("resume", str(run), cwd=tmp_path, ISOBATCH_CACHE=str(tmp_path / "cache"))
    (tmp_path / "honest").mkdir()
    assert auto(tmp_path / "honest", "Honest", "--processes", str(processes))[0] == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "honest" / "runs" / "one"), rel=1e-5)


def test_labels_that_were_put_back_are_said(tmp_path: Path) -> None:
    code, said = auto(tmp_path, "PutsBack", "--save-every", "100")
    assert code == 0, said
    run = tmp_path / "runs" / "one"
    assert "train/y.npy was written to while it trained; it is as it was prepared, but" in said
    (decision,) = [r for r in rows(run, "decisions.jsonl") if r["decision"] == "data written to"]
    assert decision["file"] == "train/y.npy"
