"""A run goes on from its newest whole checkpoint, and a finished one answers. Kills: test_walks.py."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from isobatch.core import atomic_files
from isobatch.tests.integration.helpers import RAGGED, launch, rows, run_code, succeed, summary

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ["--task", RAGGED, "--epochs=10", "--ledger", "--save-every=5", "--eval-every=9", "--quiet"]
STEPS = 40  # 93 samples in batches of 24 are 4 steps an epoch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    succeed("auto", *SETTINGS, "--name", "ref", "--processes", "1", cwd=folder)
    return folder / "runs" / "ref"


def test_a_damaged_checkpoint_is_passed_over_and_another_library_is_named(
    undisturbed: Path, tmp_path: Path
) -> None:
    run = stopped_copy(undisturbed, tmp_path / "runs" / "ref")
    made_by = json.loads((run / "environment.json").read_text())
    atomic_files.write_json(run / "environment.json", {**made_by, "torch": "0.1"})
    newest, before = sorted((run / "checkpoints").iterdir(), key=lambda p: -int(p.name.split("-")[1]))[:2]
    damaged = newest / "node-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    succeed("resume", str(run), cwd=tmp_path)
    assert summary(run)["resumed_from"] == before.name
    log, torch = (run / "log.txt").read_text(), made_by["torch"]
    assert newest.name in log
    assert f"torch: {torch} here, 0.1 before" in log
    changed = {"decision": "another library", "library": "torch", "before": "0.1", "here": torch}
    assert list(atomic_files.rows_in(run / "decisions.jsonl"))[-1] == changed
    verified = json.loads(succeed("verify", str(run), "--json", cwd=tmp_path).stdout)
    assert f"torch 0.1 and {torch} trained it, {torch} is here" in verified["coverage"]
    assert "accelerate" not in verified["coverage"]
    one, other = (folder / "final" / "model.safetensors" for folder in (run, undisturbed))
    assert one.read_bytes() == other.read_bytes()


def stopped_copy(undisturbed: Path, run: Path) -> Path:
    """A copy that has no summary yet, as if it had been killed at its end."""
    shutil.copytree(undisturbed, run)
    (run / "summary.json").unlink()
    return run


@pytest.mark.parametrize("harm", ["damaged", "gone", "gone with the log"])
def test_no_checkpoint_that_can_be_read_is_an_error_and_deletes_nothing(
    harm: str, undisturbed: Path, tmp_path: Path
) -> None:
    run = stopped_copy(undisturbed, tmp_path / "runs" / "ref")
    for folder in list((run / "checkpoints").iterdir()):
        if harm == "damaged":
            (folder / "index.json").write_text("{}")
        else:
            shutil.rmtree(folder)
    if harm == "gone with the log":
        (run / "metrics.jsonl").write_bytes(b"")
        (run / "summary.json").write_text('{"status": "stopped", "steps": 20}')
    before = sorted(p.name for p in (run / "checkpoints").iterdir())
    log = (run / "metrics.jsonl").read_bytes()
    done = launch("resume", str(run), cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "none of the checkpoints" in done.stderr
    assert f"auto --like {run} --again" in done.stderr
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before
    assert (run / "metrics.jsonl").read_bytes() == log


@pytest.mark.parametrize("harm", ["cut", "gone", "changed"])
def test_lost_rows_of_the_log_are_named_and_no_step_stands_twice(
    harm: str, undisturbed: Path, tmp_path: Path
) -> None:
    run = stopped_copy(undisturbed, tmp_path / "runs" / "ref")
    log = run / "metrics.jsonl"
    rest = {"cut": log.read_bytes()[:1000], "gone": b"", "changed": log.read_bytes().replace(b"1", b"01", 1)}
    log.write_bytes(rest[harm])
    shutil.rmtree(run / "checkpoints" / f"train-{STEPS}")
    succeed("resume", str(run), cwd=tmp_path)
    assert "were lost or changed" in (run / "log.txt").read_text()
    found = [row["step"] for row in rows(run) if "lr" in row]
    assert len(found) == len(set(found))
    assert found[-1] == STEPS
    verified = launch("verify", str(run), cwd=tmp_path)
    assert verified.returncode == 3
    # The seal before the changed row is the first to differ.
    assert ("was changed" if harm == "changed" else "were lost or changed") in verified.stdout


STOPPED_AFTER = """
import importlib, os, signal, sys
from isobatch.launch import cli

module, name = importlib.import_module(sys.argv[1]), sys.argv[2]
whole = getattr(module, name)

def interrupted(*words):
    try:
        whole(*words)
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception:
        os._exit(9)
    raise AssertionError("the signal was not heard")

setattr(module, name, interrupted)
sys.argv[1:3] = []
sys.exit(cli.main())
"""
CLASSICS = ["--task", "recommender", "--preset", "classics", "--data", "log.csv", "--quiet"]


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (SETTINGS, "isobatch.engine.trainer.finish _export"),
        (CLASSICS, "isobatch.models.recommendation.classics als_vectors"),
        pytest.param(
            [*CLASSICS, "--split", "none"],
            "isobatch.models.recommendation.classics als_vectors",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["export", "measured", "unmeasured"],
)
def test_a_stop_while_it_finishes_is_heard_and_leaves_no_part_of_final(
    words: list[str], place: str, tmp_path: Path
) -> None:
    bought = [f"{user},{(user * 7 + n * n) % 30}" for user in range(40) for n in range(6)]
    (tmp_path / "log.csv").write_text("\n".join(["user,item", *bought]))
    succeed("auto", *words, "--name", "whole", "--processes", "1", cwd=tmp_path)
    whole, run = tmp_path / "runs" / "whole", tmp_path / "runs" / "cut"
    other = ["auto", *words, "--name", "cut", "--processes", "1", "--again"]
    done = run_code(STOPPED_AFTER, *place.split(), *other, cwd=tmp_path)
    assert done.returncode == 75, done.stderr
    assert summary(run)["status"] == "stopped"
    assert not (run / "final").exists()
    if words is not SETTINGS:
        asked = launch("recommend", str(run), "--user", "1", cwd=tmp_path)
        assert (asked.returncode, asked.stderr.count("\n")) == (2, 1)
        assert "has no final/ yet: it is stopped; `resume " in asked.stderr
    succeed("resume", str(run), "--quiet", cwd=tmp_path)
    assert not (run / ".final.tmp").exists()
    found, wanted = (summary(folder) for folder in (run, whole))
    assert found["metrics"] == wanted["metrics"]
    files = [{p.name: p.read_bytes() for p in (one / "final").iterdir()} for one in (run, whole)]
    assert files[0] == files[1]
    verified = succeed("verify", str(run), cwd=tmp_path).stdout
    assert ("which have no steps" in verified) is (words is not SETTINGS)
    succeed("receipt", str(run), cwd=tmp_path)
    succeed("receipt", "check", str(run / "receipt.json"), cwd=tmp_path)


def test_a_begun_run_keeps_its_precision(tmp_path: Path) -> None:
    words = ["--task", RAGGED, "--steps", "6", "--save-every", "2", "--quiet", "--name", "half"]
    succeed("auto", *words, "--precision", "bf16", cwd=tmp_path)
    run = tmp_path / "runs" / "half"
    for lost in ("summary.json", "metrics.jsonl"):
        (run / lost).unlink()
    launch("resume", str(run), cwd=tmp_path)
    kept = json.loads((run / "plan.json").read_text())
    # Where the processor has no arithmetic for bf16, the wish becomes fp32, and the plan says so.
    assert kept["precision"] == "bf16" or "no arithmetic for bf16" in kept["reasons"]["precision"]
    (run / "summary.json").unlink()
    succeed("resume", str(run), "--precision", "fp32", cwd=tmp_path)
    assert json.loads((run / "plan.json").read_text())["precision"] == "fp32"


def test_early_stop_keeps_the_best(tmp_path: Path) -> None:
    words = ["--task", RAGGED, "--steps=400", "--lr=0.05", "--eval-every=4", "--patience=2", "--quiet"]
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
