"""Tests of engine/registry.py: a field of the recipe changes something for a task, or it is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from contextlib import closing, suppress
from functools import cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import TrainingError, UserError
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.optimization.early_stopping import EarlyStopping
from isobatch.engine.optimization.schedule import learning_rate
from isobatch.engine.registry import TASKS, workload
from isobatch.engine.train.build import Builder
from isobatch.engine.train.evaluate import evaluate
from isobatch.engine.train.hooks import Hooks, Seen
from isobatch.engine.train.loop import run_phase
from isobatch.tests.paths import ROOT
from isobatch.tests.unit.helpers import plan, small_demos
from isobatch.tests.unit.test_recipe import OTHER as ANOTHER

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from isobatch.core.recipe import Recipe

BASE: dict[str, Any] = {"batch_size": 8, "max_length": 16, "steps": 4, "eval_fraction": 0.02, "clip": 0.01}
SMALL: dict[str, dict[str, Any]] = {
    "pruning": {"prune_every": 1, "multiple": 128, "recover": 0.5},
    "recommender": {"text": "frozen", "dim": 8, "negatives": 4},
    "sequence-vae": {"hidden": 8, "latent": 2, "monitor": "off"},
}
TOKENIZER = str(ROOT / "tests/fixtures/hub/models--tests--decoder/snapshots/0/tokenizer.json")
NAMES = {
    *("task", "mode", "preset", "data", "phase", "model", "options", "starts_from"),
    *("on_spike", "order", "shuffle_window", "ema"),
}
"""Fields that are not tried: they name things, change nothing by themselves, or are tried below."""
OTHER = {field: value for field, value in ANOTHER.items() if field not in NAMES} | {"tokenizer": TOKENIZER}
"""Another value of every field that can change what is learnt, without a download."""

UNSEEN = {"kto": ("format", "eval_fraction"), "reward": ("eval_fraction",)}
"""Fields that the first figures cannot show: before its first step a policy is its reference, a reward is
0 on any share of the held-out rows; of another reading of the same rows the reference differs by rounding."""


@pytest.fixture(scope="module", autouse=True)
def _small_demos(tmp_path_factory: pytest.TempPathFactory, _cache: None) -> Iterator[None]:
    with small_demos(tmp_path_factory.mktemp("cache")):
        yield


@cache
def base(task: str, **more: Any) -> Recipe:
    return workload(task).complete({**BASE, **SMALL.get(task, {}), **more})[0]


def footprint(recipe: Recipe) -> Generator[Any, None, None]:
    """What a run of this recipe begins with, the cheap first: its length, samples, rates, losses, weights."""
    _, data = workload(recipe.task).make(recipe)
    facts = prepare(data)
    arrangement = plan(threads=1, micro_batch_samples=64, micro_batch_tokens=2048, micro_batch_cost=64.0)
    metrics = [0.50, 0.55, 0.50, 0.56, 0.51, 0.52, 0.50, 0.51]
    stopping = EarlyStopping("max", recipe.patience, recipe.min_delta)
    with Builder(recipe, facts, arrangement, Communicator(arrangement)) as builder:
        yield builder.schedules, facts.fingerprint
        best = [stopping.update(m, s) for s, m in enumerate(metrics) if not stopping.should_stop]
        yield best if recipe.patience and any(s.early_stopping for s in builder.schedules) else []
        schedule, seen = builder.schedules[0], Seen()
        with builder.phase(schedule) as state:
            lengths = schedule.steps, schedule.steps_per_epoch
            yield [learning_rate(recipe, schedule.lr, step, *lengths) for step in range(schedule.steps)]
            yield evaluate(state, "valid", recipe.eval_fraction)
            run_phase(state, Hooks([seen]), 0, min(3, schedule.steps))
        for figures in seen.figures:
            yield figures.step, figures.output.loaded.work.samples.tolist(), figures.output.sums.read()
        digest = hashlib.sha256()
        for value in builder.state.model.state_dict().values():
            digest.update(value.detach().contiguous().numpy().tobytes())
        yield digest.hexdigest()


@cache
def footprint_of(task: str) -> list[str]:
    return [*map(str, footprint(base(task)))]


def differs(task: str, changed: Recipe) -> bool:
    with closing(footprint(changed)) as found, suppress(TrainingError):
        return any(one != other for one, other in zip_longest(map(str, found), footprint_of(task)))
    return False  # such as native noise for a task that draws its own: a run that cannot be


@pytest.mark.parametrize("task", TASKS)
def test_a_field_changes_something_or_is_refused(task: str) -> None:
    wrong = []
    for field, value in OTHER.items():
        if field in UNSEEN.get(task, ()):
            continue
        changes = {"epochs": value, "steps": None} if field == "epochs" else {field: value}
        asked = {k: v for k, v in {**BASE, **SMALL.get(task, {}), **changes}.items() if v is not None}
        refused = False
        try:
            changed = workload(task).complete(asked)[0]
        except UserError as error:
            refused = str(error).endswith("; leave it out")
            changed = dataclasses.replace(base(task), **changes)
        if refused == differs(task, changed):
            wrong.append(field)
    assert not wrong, f"refused though it changes something, or accepted though it changes nothing: {wrong}"


@pytest.mark.parametrize(
    ("task", "asked", "problem"),
    [
        ("recommender", {"dropout": 0.1}, "--dropout 0.1: only a recommender of --samples"),
        ("recommender", {"text": "off", "max_length": 8}, "--max-length 8: no texts are read"),
        ("recommender", {"loss": "bce", "noise": "native"}, "--noise native: the negatives' draws are keyed"),
        ("causal-lm", {"revision": "main"}, "--revision main: no model here is from the hub"),
        ("classifier", {"format": "csv"}, "--format csv: the demo's data has one form"),
        ("pruning", {"phase": "prune", "patience": 3}, "--patience 3: no phase that trains here stops early"),
    ],
)
def test_what_changes_nothing_is_refused(task: str, asked: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(problem)}"):
        workload(task).complete(asked)


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        ("causal-lm", {"noise": "native", "dropout": 0.1}),
        ("causal-lm", {"min_delta": 0.1, "patience": 2}),
        ("classifier", {"model": "tests/encoder", "revision": "main"}),
        ("classifier", {"format": "csv", "data": "rows.txt"}),
        ("pruning", {"phase": "recover", "patience": 3}),
        ("recommender", {"text": "off", "dropout": None, "max_length": 128}),  # as they are without them
    ],
)
def test_what_changes_something_is_taken(task: str, asked: dict[str, Any]) -> None:
    recipe, _ = workload(task).complete(asked)
    for name in asked.keys() - recipe.options.keys():
        assert getattr(recipe, name) == asked[name]


def test_what_a_preset_or_fast_mode_sets_for_nothing_is_left_out() -> None:
    assert workload("recommender").complete({"mode": "fast"})[0].min_delta == 0
    assert workload("pruning").complete({"recover": 0, "data": "rows.csv"})[0].patience == 0  # 5 by default


def test_fields_of_ones_own_task_are_those_that_its_files_name() -> None:
    mine = workload(str(ROOT / "examples/own_task/mine.py:Mine"))
    assert mine.complete({"dropout": 0.2})[0].dropout == 0.2
    with pytest.raises(UserError, match=r"--tokenizer t\.json: no file of this task names it"):
        mine.complete({"tokenizer": "t.json"})


@pytest.mark.parametrize("line", ["cfg = self.recipe", "r = wrap(self.recipe)", "n = self.recipe.max_length"])
def test_a_recipe_that_is_handed_on_may_be_read(line: str, tmp_path: Path) -> None:
    body = """from isobatch import Data, Loss, Task
class Rows(Data):
    def read(self): return {}
class Mine(Task):
    data = Rows
    def build_model(self, facts):
        LINE
    def loss(self, model, batch, step): return {}
"""
    (tmp_path / "mine.py").write_text(body.replace("LINE", line))
    recipe, _ = workload(f"{tmp_path}/mine.py:Mine").complete({"max_length": 64})
    assert recipe.max_length == 64
    (tmp_path / "other.py").write_text(body.replace("LINE", "pass"))
    with pytest.raises(UserError, match="--max-length 64: no file of this task names it"):
        workload(f"{tmp_path}/other.py:Mine").complete({"max_length": 64})
