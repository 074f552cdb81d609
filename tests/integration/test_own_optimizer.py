"""A task that makes its own optimizer: it trains, resumes, is verified; what it cannot have is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import isobatch
from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, list_checkpoints
from isobatch.engine.checkpointing.portable_state import saved_moments
from isobatch.tests.integration.helpers import ROOT, launch, losses, warm_python

TASKS = f"{ROOT}/tests/tasks"
OWN = f"{TASKS}/own_optimizer.py:OwnOptimizer"


@pytest.mark.parametrize(
    ("task", "processes", "kept"),
    [
        ("OwnOptimizer", 1, {"momentum"}),
        ("OwnOptimizer", 2, {"momentum"}),
        ("TwoOptimizers", 1, {"momentum_buffer", "step", "exp_avg", "exp_avg_sq"}),
    ],
)
def test_it_trains_resumes_to_the_bit_and_is_verified(
    task: str, processes: int, kept: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", warm_python())
    settings: dict[str, Any] = {"processes": processes, "save_every": 4, "quiet": True}
    recipe = isobatch.Recipe(task=f"{TASKS}/own_optimizer.py:{task}", lr=0.05, steps=20)
    assert recipe.optimizer == "own"
    whole = isobatch.train(recipe, name="whole", **settings)
    assert sum(losses(whole.folder)[-5:]) < 0.8 * sum(losses(whole.folder)[:5])
    Path("interrupt").touch()
    with pytest.raises(UserError, match="stopped in the tenth step"):
        isobatch.train(recipe, name="stopped", **settings)
    Path("interrupt").unlink()
    saved = list_checkpoints(Path("runs/stopped/checkpoints"), ["train"])[-1]
    assert {kind for _, kind, _ in saved_moments(SavedCheckpoint(saved))} == kept
    resumed = isobatch.train(recipe, name="stopped", **settings)
    assert losses(resumed.folder) == losses(whole.folder)
    final = [(run.folder / "final" / "model.safetensors").read_bytes() for run in (whole, resumed)]
    assert final[0] == final[1]
    assert isobatch.verify(resumed)
    assert "stopped" in launch("runs", cwd=tmp_path).stdout


def test_groups_keep_their_share_of_the_rate(tmp_path: Path) -> None:
    """Vectors move by a tenth of the rate, in every step of the schedule."""
    from safetensors.torch import load_file

    found = {}
    for steps in (1, 2):
        recipe = isobatch.Recipe(task=OWN, lr=0.1, steps=steps, warmup="0", schedule="constant", clip=0.0)
        run = isobatch.train(recipe, out=tmp_path, name=str(steps), quiet=True)
        found[steps] = load_file(run.folder / "final" / "model.safetensors")
    moved = (found[2]["2.bias"] - found[1]["2.bias"]).abs()
    assert float(moved) == pytest.approx(0.01, rel=1e-4)


def test_what_it_cannot_have_is_refused() -> None:
    with pytest.raises(UserError, match=r"--optimizer sgd: .* makes its own optimizer: leave it out"):
        isobatch.Recipe(task=OWN, optimizer="sgd")
    with pytest.raises(UserError, match=r"--optimizer own: .* makes none: leave it out"):
        isobatch.Recipe(task=f"{TASKS}/failing.py:Line", optimizer="own")
    with pytest.raises(UserError, match=r"own optimizer may need whole matrices, and ZeRO's shards are flat"):
        isobatch.plan(isobatch.Recipe(task=OWN), hardware="8xh100", processes=8, strategy="zero3")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("LeavesOut", "make_optimizer.. leaves out 0.bias: put it into a group"),
        ("NoOptimizer", "make_optimizer.. returned a str: return a torch.optim.Optimizer, or a list"),
    ],
)
def test_a_wrong_one_is_refused_in_words(task: str, message: str, tmp_path: Path) -> None:
    recipe = isobatch.Recipe(task=f"{TASKS}/own_optimizer.py:{task}")
    with pytest.raises(UserError, match=message):
        isobatch.train(recipe, out=tmp_path, quiet=True)
