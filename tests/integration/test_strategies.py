"""DDP and ZeRO learn the same and resume from each other's checkpoints."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.benchmarks.quality import strategies
from isobatch.tests.integration import helpers
from isobatch.tests.integration.helpers import RAGGED, ROOT, furthest, losses, succeed, warm_python
from isobatch.tests.integration.test_bad_input import complaint
from isobatch.tests.tiny_models import save_gpt2

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python())
        return {row["what"]: row for row in strategies.measure(quick=True)}


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2", "fsdp2-offload", "hsdp:2"])
def test_a_strategy_changes_neither_losses_nor_gradients(found: Any, strategy: str) -> None:
    row = found[f"train-2-{strategy}"]
    assert row["largest_loss_difference"] < 1e-4
    assert row["largest_norm_difference"] < 1e-6
    assert row["first_gradient_difference"] < 1e-5


def test_a_strategy_goes_on_from_its_own_checkpoint_and_from_anothers(found: Any) -> None:
    """All pairs: `python -m benchmarks strategies`."""
    resumes = {what: row for what, row in found.items() if "->" in what}
    assert len(resumes) == 14
    assert max(row["largest_loss_difference"] for row in resumes.values()) < 1e-4
    assert all(
        row["largest_loss_difference"] == 0 for row in resumes.values() if row["same_world_and_strategy"]
    )


@pytest.mark.slow
def test_every_mesh_of_four_processes_learns_the_same_and_reads_the_others(tmp_path: Path) -> None:
    """1 x 4, 2 x 2 and 4 x 1, and back and forth between them, DDP, FSDP2 and ZeRO-2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(strategies.QUICK, "1")
        patch.setattr(sys, "executable", warm_python())
        strategies.launch(1, tmp_path, "train")
        strategies.launch(4, tmp_path, "train+resume", (*strategies.MESHES, "ddp", "fsdp2", "zero2"))
        rows = [*strategies.parity(tmp_path), *strategies.resumes(tmp_path)]
    assert len(rows) == 7 + 12
    assert max(row["largest_loss_difference"] for row in rows) < 2e-6
    assert max(row.get("largest_norm_difference", 0) for row in rows) < 1e-6
    assert max(row.get("first_gradient_difference", 0) for row in rows) < 1e-6


@pytest.mark.slow
def test_copies_of_shards_learn_with_the_head_in_chunks(tmp_path: Path) -> None:
    save_gpt2(tmp_path / "base", 600, n_layer=2)
    words = ["auto", "--task", "causal-lm", "--model", "base", "--max-length", "64", "--quiet", "--again"]
    words += ["--steps", "4", "--micro-batch", "2", "--batch-size", "16"]
    succeed(*words, "--name", "one", "--processes", "1", cwd=tmp_path)
    four = ["--processes", "4", "--strategy", "hsdp", "--copies", "2"]
    succeed(*words, "--name", "four", *four, cwd=tmp_path)
    assert helpers.plan_of(tmp_path / "runs" / "four")["copies"] == 2
    assert furthest(losses(tmp_path / "runs" / "one"), losses(tmp_path / "runs" / "four")) < 1e-5


@pytest.mark.parametrize(
    "strategy", ["zero3", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zero2", "fsdp2"))]
)
def test_a_phase_may_train_what_the_one_before_left_frozen(strategy: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    common = ["auto", "--task", f"{ROOT}/tests/tasks/failing.py:Thaws", "--quiet"]
    succeed(*common, "--name", "one", cwd=tmp_path)
    two = [*common, "--name", "two", "--again", "--processes", "2", "--strategy", strategy]
    succeed(*two, cwd=tmp_path)
    one, other = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    curves = [helpers.figure(run) for run in (one, other)]
    assert len(curves[0]) == 20
    assert furthest(*curves) < 1e-5
    weights, others = (load_file(run / "final" / "model.safetensors") for run in (one, other))
    for name, weight in weights.items():
        assert float((weight - others[name]).abs().max()) < 1e-5


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_only_rank_0_builds_a_model_that_is_sharded(strategy: str, tmp_path: Path) -> None:
    task = f"{ROOT}/tests/tasks/failing.py:BuildsOnce"
    words = ["auto", "--task", task, "--quiet", "--name", "run", "--processes", "2", "--steps", "4"]
    succeed(*words, "--strategy", strategy, cwd=tmp_path)
    assert [p.name for p in tmp_path.glob("built-[01]")] == ["built-0"]
    line = ["auto", "--task", task.replace("BuildsOnce", "Line"), "--quiet", "--name", "one", "--steps", "4"]
    succeed(*line, cwd=tmp_path)
    assert furthest(losses(tmp_path / "runs" / "run"), losses(tmp_path / "runs" / "one")) < 1e-5


def test_accelerates_config_decides_the_stage(tmp_path: Path) -> None:
    config = (ROOT / "configs" / "accelerate" / "zero3.yaml").read_text()
    mine = tmp_path / "zero3.yaml"
    mine.write_text(config.replace("num_processes: 8", "num_processes: 2"))
    start = [warm_python(), "-m", "accelerate.commands.launch", "--config_file", str(mine)]
    words = [f"{ROOT}/launch/train.py", "--task", RAGGED, "--steps", "5", "--name", "run", "--quiet"]
    done = helpers.command([*start, *words], tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert (helpers.summary(tmp_path / "runs" / "run")["strategy"]) == "zero3"


@pytest.mark.parametrize(
    ("strategy", "complains"),
    [
        ("zero1", "no loss touches idle"),
        pytest.param("hsdp", "last micro-batch's loss touches no idle", marks=pytest.mark.slow),
    ],
)
def test_a_parameter_that_no_loss_touches_is_refused(strategy: str, complains: str, tmp_path: Path) -> None:
    task = f"{ROOT}/tests/tasks/failing.py:Unused"
    words = ["auto", "--task", task, "--quiet", "--processes", "2", "--strategy", strategy]
    words += ["--copies", "2"] if strategy == "hsdp" else []
    assert complains in complaint(helpers.launch(*words, cwd=tmp_path))
