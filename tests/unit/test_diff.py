"""Where two runs part: planted differences are found at their step, module and sample; cuts are none."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

import isobatch
from isobatch.core.errors import UserError
from isobatch.core.recipe import TASK_CODE
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.engine.verification.run_order import RunOrder
from isobatch.launch.forensics.diff import diff, diff_runs
from isobatch.tests.paths import ROOT
from isobatch.tests.tasks import planted

if TYPE_CHECKING:
    from collections.abc import Callable

TASK = f"{ROOT}/tests/tasks/planted.py:Planted"
names = itertools.count()


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunFolder]:
    """Trains the task with other values of the recipe, or of the plan under `plan`."""
    out = tmp_path_factory.mktemp("runs")

    def run(plan: dict[str, Any] | None = None, **values: Any) -> RunFolder:
        recipe = isobatch.Recipe(task=TASK, **values)
        options = {"precision": "fp32", "device": "cpu", "processes": 1, "log_every": 1, **(plan or {})}
        kept = {"out": str(out), "name": f"run{next(names)}", "quiet": True, "again": True}
        return RunFolder.open(isobatch.train(recipe, **options, **kept).folder)

    return run


@pytest.fixture(scope="module")
def plain(train: Callable[..., RunFolder]) -> RunFolder:
    return train()


@pytest.mark.parametrize("values", [{}, {"dropout": 0.0}, {"seed": 3}, {"optimizer": "sgd"}], ids=str)
def test_runs_that_differ_by_their_cut_are_equal(values: dict[str, Any], train: Any) -> None:
    one = train(**values)
    for cut in ({"micro_batch": n} for n in ((3,) if values else (1, 2, 3, 5, 7))):
        found = diff_runs(one, train(cut, **values))
        assert found["equal"], found["verdict"]
        assert "micro_batch_samples" in found["plan"]
        assert max(found["log"]["largest"].values()) < 1e-5


PLANTED: dict[str, tuple[dict[str, Any], str, int, str | None]] = {
    # what B has -> kind, step, module
    "one module in bf16": ({"plant": "bf16"}, "jump", 1, "inner"),
    "another attention kernel": ({"plant": "attention"}, "jump", 1, "attn"),
    "a dropout site unkeyed": ({"plant": "unkeyed"}, "jump", 1, "drop"),
    "other initial weights": ({"plant": "start"}, "jump", 1, None),
    "a scaled loss": ({"plant": "scale"}, "jump", 1, "head"),
    "another optimizer": ({"optimizer": "sgd"}, "jump", 2, None),
    "another rate": ({"lr": 2e-2}, "rate", 1, None),
    "another order": ({"seed": 1}, "samples", 1, None),
    "another batch size": ({"batch_size": 8}, "samples", 1, None),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_difference_is_found_where_it_is(case: str, plain: RunFolder, train: Any) -> None:
    values, kind, step, module = PLANTED[case]
    found = diff_runs(plain, train(**values), level="sample")
    log = found["log"]
    assert not found["equal"]
    assert (log["kind"], log["step"]) == (kind, step), found
    assert next(iter(values)) in found["recipe"]
    if module is not None:
        assert found["step"]["module"]["module"] == module, found["step"]
        assert f"in {module}" in found["verdict"]
    if kind == "samples":
        assert found["samples"]["step"] == 1
        assert "they saw other samples, because of another" in found["verdict"]


@pytest.fixture(scope="module")
def later(train: Callable[..., RunFolder]) -> RunFolder:
    """Sees the touched sample in its fourth step first."""
    return train(seed=3)


def test_the_sample_that_carries_a_difference_is_named(later: RunFolder, train: Any) -> None:
    found = diff_runs(later, train(seed=3, plant="sample"), level="sample")
    assert found["log"]["step"] == 4
    assert [planted.TOUCHED in batch(later, step) for step in (1, 2, 3, 4)] == [False, False, False, True]
    assert found["step"]["module"]["module"] == "attn.project"
    assert found["step"]["module"]["samples"] == [planted.TOUCHED]
    assert found["verdict"].endswith("6% of the samples carry it, most: 13")


def batch(run: RunFolder, step: int) -> list[int]:
    """The samples of a step."""
    return RunOrder.of(run.recipe, run.facts).sampler.batch(step - 1).tolist()


def test_a_step_between_two_logged_ones_is_found(train: Any) -> None:
    one, other = (train({"log_every": 12}, seed=3, **values) for values in ({}, {"plant": "sample"}))
    found = diff_runs(one, other, level="sample")
    assert (found["log"]["previous"], found["log"]["step"], found["step"]["step"]) == (1, 9, 4)
    assert "they part at step 4, logged at 9 (" in found["verdict"]
    assert found["step"]["module"]["samples"] == [planted.TOUCHED]


@pytest.mark.parametrize(
    ("change", "rows"),
    [("one row", "37"), ("swapped", "5, 9"), ("tokenizer", "0, 1, 2"), ("a row more", "A has 64 rows, B 65")],
)
def test_changed_data_is_named_by_its_rows(change: str, rows: str, plain: RunFolder, train: Any) -> None:
    found = diff_runs(plain, train(change=change))
    assert not found["equal"]
    assert found["data_differs"]
    assert rows in found["verdict"]


@pytest.mark.parametrize(("what", "step"), [(planted.LABEL, 7), (planted.FLIP, 8)])
def test_what_no_recipe_says_is_told_by_the_side_that_did_it(
    what: str, step: int, plain: RunFolder, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(what, "6")
    other = train()
    monkeypatch.delenv(what)
    found = diff_runs(plain, other)
    assert found["log"]["step"] == step
    assert found["recipe"] == {}
    assert ": B logged " in found["verdict"]
    assert diff_runs(other, plain)["verdict"].count(": A logged ") == 1


def test_the_command_says_it_in_a_sentence_and_by_its_exit_code(
    plain: RunFolder, train: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other = train(plant="epsilon")
    assert diff([str(plain.folder), str(other.folder)]) == 3
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"A: {plain.folder}"
    assert any(line.split() == ["plant", "nothing", "epsilon"] for line in said)
    assert said[-1].startswith("both saw the same samples; they part at step 1 (")
    assert "in norm, where plant is nothing in A and epsilon in B" in said[-1]
    assert diff([str(plain.folder), str(other.folder), "--level", "step", "--json"]) == 3
    assert "step" not in json.loads(capsys.readouterr().out)
    with pytest.raises(UserError, match="give two runs"):
        diff([str(plain.folder)])


@pytest.mark.parametrize(
    ("codes", "why"),
    [("ab", "only one can be there: `replay`"), ("aa", "there is no file; put that")],
)
def test_the_logs_are_compared_without_the_code(codes: str, why: str, plain: RunFolder, train: Any) -> None:
    runs = RunFolder(plain.folder), RunFolder(train(plant="epsilon").folder)
    for run, code in zip(runs, codes, strict=True):
        run.recipe = dataclasses.replace(run.recipe, task="./gone.py:Mine", options={TASK_CODE: code})
    found = diff_runs(*runs)
    assert why in found["step"]["why_not"]
    assert found["recipe"].get(TASK_CODE) == (["a", "b"] if codes == "ab" else None)
    assert found["verdict"].startswith("both saw the same samples; they part at step 1 (")
    assert "step" not in diff_runs(*runs, "step")
