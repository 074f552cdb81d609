"""Tests of the chain `compress`: how it goes on, and what its stages begin with."""

from __future__ import annotations

from typing import Any

import pytest

from isobatch.core.errors import STOPPED, UserError
from isobatch.core.facts import Facts
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import Verdict
from isobatch.launch.commands.auto import auto
from isobatch.launch.commands.compress import CompressOptions, compress, parse_stages, stages_of
from isobatch.launch.commands.plan import plan
from isobatch.models.compression.pruning import Pruning


def test_fast_mode_trains_long_enough_on_small_data_unless_a_length_is_given() -> None:
    recipe, notes = workload("classifier").complete({"data": "rows", "mode": "fast"})
    assert (recipe.least_steps, recipe.lr, recipe.batch_size) == (500, 1e-4, 32)
    assert "least_steps 500" in notes[-1]
    full, _ = workload("classifier").complete({"data": "rows"})
    assert (full.least_steps, full.lr) == (1000, 5e-5)
    for length in ({"epochs": 1}, {"steps": 9}):
        recipe, notes = workload("classifier").complete({"mode": "fast", **length})
        assert recipe.least_steps == 0
        assert "least_steps" not in notes[-1]


def test_a_model_from_scratch_learns_at_a_rate_of_its_width() -> None:
    for asked, rate in (
        ({}, 1e-3),
        ({"mode": "fast"}, 1e-3),
        ({"data": "rows", "model": "tiny", "mode": "fast"}, 1e-3),
        ({"data": "rows", "model": "bert-6l"}, 0.128 / 768),
        ({"data": "rows", "model": "tiny", "lr": 2e-5}, 2e-5),
        ({"data": "rows", "mode": "fast"}, 1e-4),
    ):
        recipe, notes = workload("classifier").complete(asked)
        assert recipe.lr == pytest.approx(rate)
        assert ("lr 0.0001" in notes[-1] if notes else False) is (rate == 1e-4)


@pytest.mark.parametrize(
    ("classes", "asked", "steps"), [(2, {}, 500), (150, {}, 938), (150, {"epochs": 1}, 0)]
)
def test_many_classes_need_more_steps(classes: int, asked: dict[str, Any], steps: int) -> None:
    """200 samples of each of 150 classes in batches of 32 are 937.5 steps; a length that is given stands."""
    recipe, _ = workload("classifier").complete({"data": "rows", "mode": "fast", **asked})
    task, _ = workload("classifier").make(recipe)
    known = Facts(fingerprint="", folder="", samples={}, lengths=(9,), extra={"labels": ["a"] * classes})
    assert task.fewest_steps(known) == steps


@pytest.mark.parametrize(("every", "ramp", "steps"), [(40, 17, 40), ("20%", 17, 3), ("20%", 630, 126)])
def test_the_interval_of_pruning_may_follow_the_ramp(every: Any, ramp: int, steps: int) -> None:
    recipe, _ = workload("pruning").complete({"prune_every": every})
    task, _ = workload("pruning").make(recipe)
    assert isinstance(task, Pruning)
    assert task.steps_between(ramp) == steps


def test_a_stopped_stage_leads_back_to_compress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Typed again, it goes on with the stopped stage: each is found by its recipe, as `auto` finds a run."""
    stopped = (None, Verdict(STOPPED, ""))
    monkeypatch.setattr("isobatch.launch.commands.compress.find_or_train", lambda _: stopped)
    assert compress(["--task", "compress", "--steps", "6"]) == STOPPED
    assert "the same command again" in capsys.readouterr().err


def test_fast_mode_removes_what_was_measured_to_cost_nothing() -> None:
    """benchmarks/LOG.md, accuracy: half of the heads and neurons."""
    recipe, notes = workload("pruning").complete({"mode": "fast"})
    assert recipe.options["sparsity"] == 0.5
    assert "sparsity 0.5" in notes[-1]


def test_each_way_to_round_is_a_form_or_a_stage() -> None:
    def stages(*quantize: str) -> dict[str, tuple[str, ...]]:
        return {stage.name: stage.exports for stage in stages_of(quantize)}

    default = stages(*CompressOptions().quantize)
    assert list(default) == ["classifier", "pruning", "qat"]
    assert default["classifier"] == ("onnx", "onnx-dynamic")
    assert default["pruning"] == ("hf", "dense", "onnx", "onnx-dynamic", "onnx-static")
    assert default["qat"] == ("onnx-int4",)
    assert list(stages("dynamic")) == ["classifier", "pruning"]
    assert stages("int8-qat", "int4")["qat-int8"] == ("onnx-int8",)
    assert list(stages("int8-qat", "int4")) == ["classifier", "pruning", "qat-int8", "qat"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--quantize", "int3"], "--quantize int3"),
        (["--choose", "best"], "--choose best"),
        (["--bits", "8"], "--bits 8: of this chain --quantize int8-qat,int4 says it"),
        (["--steps", "1,2"], "2 numbers for 3 stages: .* one for each of classifier, pruning, qat"),
        (["--steps", "1,2,3", "--quantize", "dynamic"], "for 2 stages: .* each of classifier, pruning"),
        (["--epochs", "1,2,3", "--quantize", "int8-qat,int4"], "for 4 stages: .* pruning, qat-int8, qat"),
    ],
)
def test_flags_of_the_chain_are_checked_before_it_trains(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        compress(["--task", "compress", *words])


@pytest.mark.parametrize("quantize", ["dynamic", "static,int4", "int8-qat,int4"])
def test_each_stage_that_is_there_may_have_its_own_length(quantize: str) -> None:
    stages = stages_of(quantize.split(","))
    steps = [str(number) for number in range(1, len(stages) + 1)]
    words = ["--task", "compress", "--quantize", quantize, "--steps", ",".join(steps)]
    assert [flags["steps"] for flags in parse_stages(words)[2].values()] == steps


def test_a_chain_has_no_plan_of_its_own() -> None:
    with pytest.raises(UserError, match="classifier, pruning, qat"):
        plan(["--task", "compress"])
    with pytest.raises(UserError, match="--dry-run: a stage begins with what others wrote"):
        auto(["--task", "compress", "--dry-run"])
