"""Tests of core/recipe.py: what it refuses, its hash, its file, and what it never mentions."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.flags import Interval
from isobatch.core.recipe import Recipe
from isobatch.tests.paths import REGISTER

ROOT = Path(__file__).parents[2]
BASE = Recipe(task="causal-lm", options={"generate_tokens": 60})
OTHER: dict[str, Any] = {
    "task": "classifier",
    "mode": "fast",
    "preset": "ids",
    "data": "text.txt",
    "format": "jsonl",
    "model": "small",
    "tokenizer": "tokenizer.json",
    "revision": "main",
    "seed": 1,
    "epochs": (3.0,),
    "steps": (5,),
    "phase": "train",
    "least_steps": 9,
    "order": "shards",
    "shuffle_window": 7,
    "on_spike": "skip",
    "batch_size": 4,
    "max_length": 8,
    "lr": 0.5,
    "weight_decay": 0.5,
    "warmup": Interval(50, "percent"),
    "schedule": "constant",
    "decay": Interval(9, "steps"),
    "decay_shape": "linear",
    "ema": 0.9,
    "clip": 0.001,
    "dropout": 0.4,
    "optimizer": "sgd",
    "train_fraction": 0.5,
    "eval_fraction": 0.05,
    "eval_every": Interval(1, "steps"),
    "patience": 3,
    "min_delta": 0.1,
    "group_by_length": True,
    "noise": "native",
    "adam_beta1": 0.5,
    "adam_beta2": 0.9,
    "adam_eps": 1e-2,
    "label_smoothing": 0.3,
    "lr_floor": 0.5,
    "options": {"generate_tokens": 61},
    "starts_from": {"run": "runs/a", "checkpoint": "train-9", "digest": "d"},
}
"""Another value for every field. A new field belongs here: it must change the hash, and what is learnt."""
FIELDS = [f.name for f in dataclasses.fields(Recipe)]


def test_every_field_has_another_value_here() -> None:
    assert sorted(OTHER) == sorted(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_hash_and_survives_the_file(field: str) -> None:
    changed = dataclasses.replace(BASE, **{field: OTHER[field]})
    assert changed.hash() != BASE.hash()
    again = Recipe.from_dict(json.loads(json.dumps(changed.to_dict())))
    assert again == changed
    assert again.hash() == changed.hash()


def test_the_hash_is_twelve_digits_and_the_same_in_every_process() -> None:
    code = REGISTER + "from isobatch.core.recipe import Recipe; print(Recipe(task='causal-lm').hash())"
    here = Recipe(task="causal-lm").hash()
    assert len(here) == 12
    for python_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": python_seed}
        there = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here


def test_a_recipe_file_with_a_field_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UserError, match="unknown fields: colour"):
        Recipe.from_dict({**BASE.to_dict(), "colour": "red"})
    for wrong in ({"options": None}, {"options": ["a"]}, {"starts_from": "runs/a"}):
        with pytest.raises(UserError, match="is no object"):
            Recipe.from_dict({**BASE.to_dict(), **wrong})


def test_plain_python_values_become_the_fields_types() -> None:
    made = Recipe(task="causal-lm", epochs=3, warmup=10, lr="1e-4", data=Path("reviews"))  # type: ignore[arg-type]
    assert (made.epochs, made.warmup, made.lr, made.data) == ((3.0,), Interval(10, "steps"), 1e-4, "reviews")


def test_the_hash_in_the_file_is_no_field() -> None:
    assert Recipe.from_dict({**BASE.to_dict(), "hash": BASE.hash()}) == BASE


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"batch_size": "abc"}, "--batch-size abc: is not an integer"),
        ({"optimizer": "adam"}, "did you mean adamw"),
        ({"epochs": (1.0,), "steps": (5,)}, "--epochs and --steps exclude each other"),
        ({"warmup": Interval(1, "minutes")}, "minutes depend on the machine"),
        ({"eval_every": Interval(1, "minutes")}, "minutes depend on the machine"),
        ({"eval_every": Interval(0, "steps")}, "--eval-every 0: must be above 0"),
        ({"warmup": "101%"}, "--warmup 101%: is more than the whole run"),
        ({"epochs": (2.0, 0.0)}, "--epochs 2.0,0.0: must be above 0"),
    ],
)
def test_a_recipe_made_in_python_is_checked(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        Recipe(task="causal-lm", **values)


def test_a_recipe_mentions_no_hardware() -> None:
    machine = {"processes", "world", "rank", "device", "gpu", "gpus", "cuda", "nodes", "workers", "threads"}
    machine |= {"precision", "strategy", "micro", "compile", "memory", "attention", "prefetch", "pin"}
    words = {word for name in FIELDS for word in name.split("_")}
    assert not words & machine
