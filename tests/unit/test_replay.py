"""One step of a run again: what it was, sample by sample, and what in it is not finite."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import isobatch
from isobatch.core.atomic_files import rows_in
from isobatch.core.errors import TrainingError, UserError
from isobatch.engine.forensics.observed_step import (
    BACKWARD,
    FORWARD,
    ModuleRecorder,
    ObservedStep,
    observe_step,
)
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.forensics import replay as command
from isobatch.launch.forensics.replay import ReplayOptions, open_replay
from isobatch.tests.paths import ROOT
from isobatch.tests.tasks import planted

if TYPE_CHECKING:
    from pathlib import Path

WAYS = (FORWARD, BACKWARD)
TASK = f"{ROOT}/tests/tasks/planted.py:Planted"


def trained(out: Path, name: str, **options: Any) -> RunFolder:
    where = {"out": str(out), "name": name, "device": "cpu", "precision": "fp32"}
    run = isobatch.train(isobatch.Recipe(task=TASK), quiet=True, log_every=1, **where, **options)
    return RunFolder.open(run.folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("runs"), "run", micro_batch=5, save_every=4, keep=2)


def replay_step(run: RunFolder, **options: Any) -> ObservedStep:
    return observe_step(*open_replay(run, ReplayOptions(**options)))


@pytest.mark.parametrize(("step", "start"), [(3, "the initial weights"), (11, "train-9"), (12, "train-9")])
def test_a_step_is_what_was_logged_and_its_samples_add_up(step: int, start: str, run: RunFolder) -> None:
    seen = replay_step(run, step=step)
    assert seen.logged is not None
    assert seen.window.checkpoint == start
    loss, norm = seen.figures
    assert loss == pytest.approx(seen.logged.loss, rel=1e-6)
    assert norm == pytest.approx(seen.logged.grad_norm, rel=1e-5)
    assert seen.rate == seen.logged.lr
    assert len(seen.alone) == 16
    assert sum(sum(losses.values()) for _, losses in seen.alone) == pytest.approx(loss, rel=1e-5)
    assert np.sqrt(np.square(list(seen.gradients.values())).sum()) == pytest.approx(norm, rel=1e-5)
    assert all(np.isfinite(norms).all() for norms, _ in seen.outputs.values())


def test_the_cut_of_a_replay_changes_nothing_but_rounding(run: RunFolder) -> None:
    one, other = (replay_step(run, step=7, micro_batch=n) for n in (2, 16))
    assert list(one.outputs) == list(other.outputs)
    assert next(iter(one.outputs)) == ("inner", FORWARD)
    for key, (norms, _) in one.outputs.items():
        assert norms == pytest.approx(other.outputs[key][0], rel=1e-4, abs=1e-6)


def test_python_gets_the_model_the_batch_and_the_noise_of_the_step(run: RunFolder) -> None:
    row = next(row for row in rows_in(run.metrics) if row.get("step") == 5 and "chain" in row)
    with isobatch.replay(run.folder, 5) as (model, batch, step):
        task = planted.Planted(run.recipe, planted.PlantedOptions())
        assert float(task.loss(model, batch, step)["loss"].sum.detach()) / 16 == pytest.approx(
            row["loss"], rel=1e-5
        )
        whole = batch["index"].tolist()
    with isobatch.replay(str(run.folder), 5, samples=whole[3:5]) as (model, batch, step):
        assert batch["index"].tolist() == whole[3:5]
    with (
        pytest.raises(UserError, match="sample 64: is not in step 5"),
        isobatch.replay(run.folder, 5, samples=[64]),
    ):
        pass


def test_a_run_that_became_nan_ends_with_the_line_that_shows_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(planted.NAN, "6")
    with pytest.raises(
        TrainingError, match=r"became nan at step 7 .* `isobatch replay .* --phase train --step 7`"
    ):
        trained(tmp_path, "nan", save_every=2)
    assert command.replay([str(tmp_path / "nan"), "--phase", "train", "--step", "7"]) == 0
    said = capsys.readouterr().out
    assert "the first output with a NaN or an infinity: inner (forward), in samples" in said
    assert said.split("loss  sample")[1].splitlines()[1].split()[0] == "nan"


WRONG: dict[str, tuple[list[str], str]] = {
    "no run": ([], "give the folder of one run"),
    "too far": (["--step", "99"], "--step 99: this run has train with 12 steps"),
    "no such phase": (
        ["--phase", "training", "--step", "1"],
        "--phase training --step 1: this run has train",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_question_is_one_line(case: str, run: RunFolder) -> None:
    words, expected = WRONG[case]
    with pytest.raises(UserError, match=expected) as raised:
        command.replay([str(run.folder), *words] if words else [])
    assert "\n" not in str(raised.value)


def test_the_text_has_the_norms_of_modules(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    seen = replay_step(run, step=5)
    assert command.replay([str(run.folder), "--step", "5"]) == 0
    said = capsys.readouterr().out
    line = next(line.split() for line in said.splitlines() if line.split()[:1] == ["norm"])
    norms = [np.linalg.norm(seen.outputs["norm", way][0]) for way in WAYS]
    assert [float(word) for word in line[1:]] == pytest.approx(norms, rel=1e-3)


def test_json_has_every_sample_and_every_module(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.replay([str(run.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 12
    assert sorted(s for one in found["alone"] for s in one["samples"]) == sorted(found["samples"])
    assert {one["direction"] for one in found["modules"]} == {FORWARD, BACKWARD}


def test_outputs_of_one_norm_and_another_direction_are_told_apart() -> None:
    torch = pytest.importorskip("torch")
    records = []
    binding, task = SimpleNamespace(positions=np.array([1, 0])), SimpleNamespace(rows_per_sample=1)
    state: Any = SimpleNamespace(binding=binding, task=task)
    for rows in ([[3.0, 4.0], [1.0, 0.0]], [[4.0, 3.0], [1.0, 0.0]]):
        model, recorder = torch.nn.Sequential(torch.nn.Identity()), ModuleRecorder(state, 2)
        with recorder.hooked(model):
            model(torch.tensor(rows))
        records.append(recorder.outputs()["0", FORWARD])
    (norms, products), (other_norms, other_products) = records
    assert norms.tolist() == other_norms.tolist() == [1.0, 5.0]
    assert products[0] == other_products[0]
    assert products[1] != other_products[1]
