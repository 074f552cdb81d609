"""Tests of sweeps: which texts are lists, which runs they make, and what these came to."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, flags_of
from isobatch.core.recipe import Recipe
from isobatch.launch.commands.auto import auto
from isobatch.launch.local.arguments import parse_sweep
from isobatch.launch.local.words import combinations, label, values_of
from isobatch.launch.sweeps.sweep import Trained, format_sweep, summary

RECIPE = flags_of(Recipe)
LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("lr", "1e-3,3e-3", ["1e-3", "3e-3"]),
        ("lr", "1e-3,,3e-3", ["1e-3,,3e-3"]),
        ("lr", "1e-3,1e-3", ["1e-3"]),
        ("seed", "5,0-2,1", ["5", "0", "1", "2"]),
        ("seed", "2-0", ["2-0"]),
        ("seed", f"0-{10**30}", [f"0-{10**30}"]),
        ("warmup", "10%,20%", ["10%", "20%"]),
        ("group_by_length", "on,off", ["on", "off"]),
        ("epochs", "2,3", ["2,3"]),
        ("data", "a,b", ["a,b"]),
        ("seed", BareValue("True"), ["True"]),
    ],
)
def test_what_is_a_list_of_values(name: str, text: str, values: list[str]) -> None:
    assert values_of(RECIPE[name], text) == values


def test_every_combination_once() -> None:
    found = combinations({"task": "t", "lr": "1,2", "seed": "0-1"}, RECIPE)
    assert [flags for flags, _ in found] == [
        {"task": "t", "lr": lr, "seed": seed} for lr in "12" for seed in "01"
    ]
    assert {swept for _, swept in found} == {("lr", "seed")}
    assert combinations({"task": "a,b", "out": "x,y"}, RECIPE)[0][1] == ()
    with pytest.raises(UserError, match="1,000 runs at most"):
        combinations({"seed": "0-99", "batch_size": "1-99"}, RECIPE)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"lr": 1e-3, "seed": 4}, "lr0.001-seed4"),
        ({"seed": 4, "batch_size": 8}, "batch-size8-seed4"),
        ({"lr": 2.0, "warmup": "10%"}, "lr2-warmup10_"),
        ({"schedule": "cosine", "dropout": None}, "dropoutNone-schedulecosine"),
    ],
)
def test_a_run_is_called_after_what_was_swept(values: dict[str, Any], name: str) -> None:
    assert label(Recipe(task="t", **values), values) == name
    assert label(Recipe(task="t", **values), reversed(list(values))) == name


def test_words_become_requests() -> None:
    words = ["--task", LINE, "--learning-rate", "1e-3,0.003", "--seed", "0-1", "--epochs", "2"]
    found = [(request.recipe, swept) for request, swept in parse_sweep(words, "auto")]
    assert [(recipe.lr, recipe.seed) for recipe, _ in found] == [
        (lr, seed) for lr in (1e-3, 3e-3) for seed in (0, 1)
    ]
    assert label(*found[3]) == "lr0.003-seed1"
    assert len({recipe.hash() for recipe, _ in found}) == 4
    for flag, says in (("--lr", "is not a number"), ("--processes", "is not an integer")):
        with pytest.raises(UserError, match=f"{flag} 1,x.*{says}|{flag} x: {says}"):
            parse_sweep(["--task", LINE, flag, "1,x"], "auto")


def trained(code: int = 0, loss: float = 1.0, **values: Any) -> Trained:
    """A run whose loss on the test split is the better, the worse it is on the validation split."""
    name = "-".join(map(str, values.values()))
    splits = {"valid": {"accuracy": 1 - loss, "loss": loss, "note": "text"}, "test": {"loss": 1 - loss}}
    metrics = splits if code == 0 else {}
    return Trained(values=values, folder=Path(name), code=code, metrics=metrics)


def test_the_best_is_by_the_tasks_own_metric_and_direction() -> None:
    runs = [trained(loss=0.5, lr=1), trained(loss=0.2, lr=2), trained(code=3, lr=3)]
    assert summary(runs, "loss", "min")["best"]["values"] == {"lr": 2}
    assert summary(runs, "loss", "max")["best"]["values"] == {"lr": 1}
    assert summary(runs, "none", "max")["best"] is None
    lines = format_sweep(summary(runs, "accuracy", "max")).splitlines()
    assert re.split(r"\s{2,}", lines[0].strip()) == ["lr", "valid accuracy", "run"]
    assert lines[2].startswith("best")
    assert "(1 failed)" in lines[3]
    assert lines[-1] == "best: by valid accuracy (higher is better)"
    lines = format_sweep(summary(runs, "loss", "min")).splitlines()
    assert lines[-1] == "test, of the best alone: 0.8"


def test_what_the_test_split_says_of_settings_that_were_not_chosen_is_nowhere() -> None:
    runs = [trained(loss=loss, lr=lr, seed=seed) for lr, loss in ((1, 0.5), (2, 0.25)) for seed in (0, 1)]
    found = summary(runs, "loss", "min")
    assert found["split"] == "valid"
    assert [row["metrics"]["loss"] for row in found["rows"]] == [0.5, 0.25]
    assert found["best"]["test"] == {"metrics": {"loss": 0.75}, "deviations": {"loss": 0.0}}
    assert not any("test" in row for row in found["rows"])
    unseen = [dataclasses.replace(run, metrics={"test": {"loss": 0.1}}) for run in runs]
    found = summary(unseen, "loss", "min")
    assert found["best"] is None, "there is no validation split to choose by"
    assert "best: none, as no run has a loss of the valid split" in format_sweep(found)
    assert "0.1" not in format_sweep(found)


def test_recommenders_are_compared_by_the_figure_that_ranks_all_items() -> None:
    ((request, _),) = parse_sweep(["--task", "recommender", "--top-k", "5"], "auto")
    task, _ = request.workload.make(request.recipe)
    assert task.monitor == ("full_ndcg@5", "max")


def test_seeds_are_a_mean() -> None:
    one = summary([trained(loss=0.5, seed=0), trained(loss=0.3, seed=1)], "loss", "min")
    assert one["rows"][0]["metrics"]["loss"] == pytest.approx(0.4)
    assert format_sweep(one).splitlines()[-2] == "test: 0.6 +- 0.14"
    both = summary([trained(loss=0.5, lr=1, seed=0), trained(loss=0.3, lr=1, seed=1)], "loss", "min")
    (row,) = both["rows"]
    assert row["metrics"]["loss"] == pytest.approx(0.4)
    assert row["deviations"]["loss"] == pytest.approx(0.1 * 2**0.5)
    assert format_sweep(both).splitlines()[1].endswith("1-0 and 1 more")
    assert format_sweep(both).splitlines()[-1] == "+-: standard deviation of 2 seeds around their mean"


@pytest.mark.parametrize("words", ["--dry-run", "--dump-config"])
def test_flags_about_one_run_are_refused(words: str) -> None:
    with pytest.raises(UserError, match="about one run"):
        auto(["--task", LINE, "--lr", "1e-3,1e-2", *words.split()])
