"""A run goes on from its newest whole checkpoint, and a finished one answers. Kills: test_walks.py."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from isobatch.tests.integration.helpers import (
    RAGGED,
    launch,
    rows,
    summary,
)

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = [
    "--task",
    RAGGED,
    "--epochs",
    "10",
    "--ledger",
    "--save-every",
    "5",
    "--eval-every",
    "9",
    "--quiet",
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = launch("auto", *SETTINGS, "--name", "ref", "--processes", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "ref"


def test_a_damaged_checkpoint_is_passed_over(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "ref"
    shutil.copytree(undisturbed, run)
    (run / "summary.json").unlink()
    newest, before = sorted((run / "checkpoints").iterdir(), key=lambda p: -int(p.name.rpartition("-")[2]))[
        :2
    ]
    damaged = newest / "node-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    done = launch("resume", str(run), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert summary(run)["resumed_from"] == before.name
    assert newest.name in (run / "log.txt").read_text()
    assert launch("verify", str(run), cwd=tmp_path).returncode == 0
    assert (run / "final/model.safetensors").read_bytes() == (
        undisturbed / "final/model.safetensors"
    ).read_bytes()


def test_a_finished_run_answers_at_once(undisturbed: Path) -> None:
    again = launch("auto", *SETTINGS, "--name", "ref", "--processes", "1", cwd=undisturbed.parent.parent)
    assert again.returncode == 0
    assert "is done" in again.stderr or "done" in again.stdout
    assert len(list(undisturbed.parent.iterdir())) == 1


def test_early_stop_keeps_the_best(tmp_path: Path) -> None:
    words = [
        "--task",
        RAGGED,
        "--steps",
        "400",
        "--lr",
        "0.05",
        "--eval-every",
        "4",
        "--patience",
        "2",
        "--quiet",
    ]
    done = launch("auto", *words, "--name", "early", "--schedule", "constant", cwd=tmp_path)
    run = tmp_path / "runs" / "early"
    assert done.returncode == 0, done.stderr
    decisions = rows(run, "decisions.jsonl")
    best = [d for d in decisions if d["decision"] == "best checkpoint"][-1]
    (stop,) = [d for d in decisions if d["decision"] == "early stop"]
    assert stop["best_step"] == best["step"] == stop["step"] - 2 * 4
    assert summary(run)["steps"] == stop["step"] < 400
    # final/ is the best checkpoint, so the held-out loss is the best one seen.
    assert summary(run)["metrics"]["loss"] == pytest.approx(best["value"], abs=2e-6)
