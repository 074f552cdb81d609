"""Tests of launch/local/words.py: which texts are lists, and which runs they make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.flags import BareValue, flags_of
from isobatch.core.recipe import Recipe
from isobatch.launch.local.arguments import parse_sweep
from isobatch.launch.local.words import combinations, label, values_of

RECIPE = flags_of(Recipe, "recipe")
LINE = f"{Path(__file__).parents[1]}/tasks/failing.py:Line"


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("lr", "1e-3,3e-3", ["1e-3", "3e-3"]),
        ("lr", "1e-3", ["1e-3"]),
        ("lr", "1e-3,,3e-3", ["1e-3,,3e-3"]),
        ("lr", "1e-3,1e-3", ["1e-3"]),
        ("seed", "0-2", ["0", "1", "2"]),
        ("seed", "5,0-2,1", ["5", "0", "1", "2"]),
        ("seed", "2-0", ["2-0"]),
        ("seed", "-1", ["-1"]),
        ("seed", "0-99999999999", ["0-99999999999"]),
        ("schedule", "linear,cosine", ["linear", "cosine"]),
        ("warmup", "10%,20%", ["10%", "20%"]),
        ("dropout", "0,0.1", ["0", "0.1"]),
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
        ({"lr": 1e-05}, "lr1e-05"),
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
