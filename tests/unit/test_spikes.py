"""Tests of --on-spike and --skip-step: the rule, what is left out, and that `verify` knows it."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.torch import load_file

import isobatch
from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import TrainingError, UserError
from isobatch.engine.checkpointing.host_buffer import HostBuffer
from isobatch.engine.hooks.spikes import WINDOW, SpikeWatch
from isobatch.engine.optimization.left_out import ASKED, LEAVE_OUT, leave_out
from isobatch.engine.registry import complete
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.verification.run_order import RunOrder
from isobatch.launch.commands.auto import resume
from isobatch.launch.local.launch_run import launch_run, steps_to_skip
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.tests.forgery import edit_log
from isobatch.tests.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TASK = f"{ROOT}/tests/tasks/spiky.py:Spiky"
SPIKE, STEPS = 83, 120
"""The step that holds the corrupt row, and those of the run."""


def trained(out: Path, name: str, **values: Any) -> RunFolder:
    options = {"save_every": 15, "keep": 99, "ledger": True, "log_every": 4, "quiet": True}
    options |= {k: values.pop(k) for k in ("save_every", "log_every") if k in values}
    recipe = isobatch.Recipe(
        task=TASK, **{"epochs": 1.0, "schedule": "constant", "eval_every": SPIKE, **values}
    )
    return RunFolder(isobatch.train(recipe, out=out, name=name, **options).folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    out = tmp_path_factory.mktemp("spikes")
    return {mode: trained(out, mode, on_spike=mode) for mode in ("warn", "skip", "rollback")}


def rows_left_out(run: RunFolder) -> list[int]:
    return [row["step"] for row in rows_in(run.metrics) if "left_out" in row]


def loss_of(run: RunFolder) -> float:
    return float((run.summary() or {})["metrics"]["loss"])


def verified(run: RunFolder, level: str = "steps") -> isobatch.Verification:
    return isobatch.verify(run.folder, processes=1, level=level)


def test_a_corrupt_batch_ruins_a_run_that_only_warns(runs: dict[str, RunFolder]) -> None:
    assert loss_of(runs["warn"]) > 1e6
    assert rows_left_out(runs["warn"]) == []
    said = (runs["warn"].folder / "log.txt").read_text()
    assert said.count("is a spike") == 1, "those that follow it are not new"
    assert f"step {SPIKE} of train is a spike: its loss was 1.25e+11, and" in said
    assert f"--phase train --step {SPIKE}` shows its samples" in said


@pytest.mark.parametrize(("mode", "first"), [("skip", SPIKE), ("rollback", SPIKE - 20)])
def test_a_run_goes_back_and_leaves_it_out(mode: str, first: int, runs: dict[str, RunFolder]) -> None:
    run = runs[mode]
    assert loss_of(run) < 2
    assert rows_left_out(run) == list(range(first, SPIKE + 1))
    (decision,) = [row for row in rows_in(run.decisions) if row["decision"] == LEAVE_OUT]
    assert (decision["of"], decision["first"], decision["last"]) == ("train", first, SPIKE)
    evaluated = [row["step"] for row in rows_in(run.metrics) if row.get("split") == "valid"]
    assert evaluated == [SPIKE, STEPS], "what is due after a step that is left out is done"
    for level in ("records", "steps", "full"):
        found = verified(run, level)
        assert found.verified, found.problems
    left = SPIKE + 1 - first
    assert f"{STEPS - left} of {STEPS - left} steps redone equal " in found.coverage
    assert f", {left} left out as decided" in found.coverage
    order = RunOrder.of(run.recipe, run.facts)
    assert not any(order.sightings(run, order.sampler.batch(SPIKE - 1).tolist()).values())


def test_where_checkpoints_lie_changes_nothing(tmp_path: Path, runs: dict[str, RunFolder]) -> None:
    """And a decision by hand, before training, is the same as one by the rule."""
    often = trained(tmp_path, "often", on_spike="skip", save_every=7, log_every=1)
    by_hand = RunFolder.create(tmp_path / "hand", runs["warn"].recipe, often.facts, often.options())
    by_hand.write_plan(often.plan)
    leave_out(by_hand, *steps_to_skip(by_hand, str(SPIKE)), ASKED)
    with preserve_process_state():
        assert launch_run(by_hand, by_hand.options()).code == 0
    wanted = load_file(runs["skip"].final / "model.safetensors")
    for run in (often, by_hand):
        found = load_file(run.final / "model.safetensors")
        assert all(found[name].equal(wanted[name]) for name in wanted)
    assert verified(by_hand, "full").verified


def test_by_hand_a_run_that_failed_goes_on_without_it(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="became nan at step 40"):
        trained(tmp_path, "failed", nan_at=40)
    with preserve_process_state():
        assert resume([str(tmp_path / "failed"), "--skip-step", "38-40", "--quiet"]) == 0
    run = RunFolder(tmp_path / "failed")
    assert rows_left_out(run) == [38, 39, 40]
    assert verified(run, "full").verified
    with pytest.raises(UserError, match=r"--skip-step 3: .* is done"):
        resume([str(run.folder), "--skip-step", "3"])
    with pytest.raises(UserError, match="give a step or an ascending range"):
        resume([str(run.folder), "--skip-step", "abc"])


def test_a_slow_disk_loses_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is still written when the next is saved is known to the log that this one keeps."""
    write = HostBuffer.write

    def first_slowly(buffer: HostBuffer, path: Path, *place: int) -> dict[str, int | str]:
        time.sleep(1.0 if "train-15" in str(path) else 0.0)
        return write(buffer, path, *place)

    with monkeypatch.context() as patch:
        patch.setattr(HostBuffer, "write", first_slowly)
        with pytest.raises(TrainingError, match="became nan at step 44"):
            trained(tmp_path, "slow", nan_at=44)
    with preserve_process_state():
        assert resume([str(tmp_path / "slow"), "--skip-step", "44", "--quiet"]) == 0
    run = RunFolder(tmp_path / "slow")
    assert (run.checkpoints / "train-15").is_dir()
    found = verified(run)
    assert found.verified, found.problems


def write_decisions(run: RunFolder, rows: list[dict[str, Any]]) -> None:
    """Others, with a log that agrees."""
    from isobatch.engine.checkpointing.digests import bytes_digest

    run.decisions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digest = bytes_digest(run.decisions) if rows else ""
    edit_log(run, lambda logged: [row.update(decisions=digest) for row in logged if "final" in row])


def another_step(run: RunFolder) -> None:
    decisions = list(rows_in(run.decisions))
    write_decisions(run, [{**row, "first": 84, "last": 84} for row in decisions])


def one_step_more(run: RunFolder) -> None:
    """Decided and logged: but the chain of samples holds it."""
    leave_out(run, "train", 50, 50, "asked for")
    write_decisions(run, list(rows_in(run.decisions)))
    edit_log(
        run, lambda rows: rows.insert(_place(rows, 50), {"phase": "train", "step": 50, "left_out": True})
    )


def no_row(run: RunFolder) -> None:
    edit_log(run, lambda rows: rows.remove({"phase": "train", "step": SPIKE, "left_out": True}))


def _place(rows: list[dict[str, Any]], step: int) -> int:
    return next(n for n, row in enumerate(rows) if row["step"] > step)


@pytest.mark.parametrize("forge", [lambda run: write_decisions(run, []), another_step, one_step_more, no_row])
def test_an_edited_decision_is_found(
    forge: Callable[[RunFolder], None], tmp_path: Path, runs: dict[str, RunFolder]
) -> None:
    run = RunFolder(shutil.copytree(runs["skip"].folder, tmp_path / "forged"))
    forge(run)
    found = verified(run, "records")
    assert not found.verified
    assert found.problems


def test_ordinary_training_has_no_spike() -> None:
    """Falling losses with noise, of 100 runs; and a decision does not hang on the last digits."""
    for seed in range(100):
        draws = np.random.default_rng(seed)
        losses = (4 * np.exp(-np.arange(400) / 150) + 1) * np.exp(0.05 * draws.normal(size=400))
        norms = np.exp(0.5 * draws.normal(size=400))
        watch = SpikeWatch()
        for loss, norm in zip(losses.tolist(), norms.tolist(), strict=True):
            assert watch.judge(loss, norm) == ""
            watch.take_in(loss * (1 + 1e-7), norm)
        assert len(watch.losses) == WINDOW
        assert "its loss was" in watch.judge(2 * losses[-1], 1.0)
        assert "its gradient norm was" in watch.judge(losses[-1], 100.0)
        assert "nan" in watch.judge(float("nan"), 1.0)


def test_a_converged_run_has_no_spike_until_one_is_far_out_of_its_own_scatter() -> None:
    """Where the loss is near zero, batches differ by factors."""
    for seed in range(100):
        draws = np.random.default_rng(seed)
        losses, norms = np.exp(draws.normal(size=(2, 200))) * [[1e-3], [1e-2]]
        watch = SpikeWatch()
        for loss, norm in zip(losses.tolist(), norms.tolist(), strict=True):
            assert watch.judge(loss, norm) == ""
            watch.take_in(loss, norm)
        assert "its loss was" in watch.judge(1e3, 1e-2)
        assert "its gradient norm was" in watch.judge(1e-3, 1e2)


def test_too_many_spikes_end_training(tmp_path: Path) -> None:
    assert SpikeWatch().judge(1e9, 1.0) == "", "there is nothing to compare the first steps with"
    with pytest.raises(TrainingError, match="8 of the 64 steps before were left out: lower --lr"):
        trained(tmp_path, "diverges", on_spike="skip", lr=3.0)


@pytest.mark.parametrize("task", ["pruning", "sequence-vae"])
def test_a_task_that_counts_steps_leaves_out_none(task: str) -> None:
    with pytest.raises(UserError, match="--on-spike skip: this task can leave out no step"):
        complete(task, {"on_spike": "skip"})
