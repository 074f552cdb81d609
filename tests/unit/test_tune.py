"""What `tune` tries, measures and recommends."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.facts import Facts
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.core.terminal import rendered
from isobatch.engine.machine.hardware import parse_hardware
from isobatch.engine.planning.estimate import Target
from isobatch.engine.planning.planner import make_plan
from isobatch.launch.measuring import trial, tune
from isobatch.launch.measuring.trial import Variant
from isobatch.launch.measuring.tune import PairedRounds, Setting, settings
from isobatch.models.base import ModelSize
from isobatch.tests.paths import RAGGED

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.tests.unit.conftest import Say

HERE = dataclasses.replace(parse_hardware("cpu:2x24gb"), source="detected", cpu_bf16=True)
SIZE = ModelSize(parameters=10**6, trainable=10**6, layers=2, hidden=64, heads=4, vocabulary=500, packs=True)
FACTS = Facts(fingerprint="", folder="", samples={"train": 1000}, lengths=[8, 20, 60, 128])
RECIPE = Recipe(task="causal-lm")


def variant(asked: PlanOptions = PlanOptions(), recipe: Recipe = RECIPE, **changes: Any) -> Variant:  # noqa: B008
    workload: Any = None
    target = Target("", workload, recipe, FACTS, HERE, asked)
    plan = make_plan(recipe, FACTS, SIZE, HERE, asked)
    return Variant(target=target, size=SIZE, plan=dataclasses.replace(plan, **changes))


def flags(name: str, base: Variant) -> list[str]:
    return [setting.flags for setting in settings(base) if setting.measure == name]


def test_a_measure_is_tried_only_where_it_applies() -> None:
    plain = variant()
    assert flags("batch", plain) == ["--batch-size 64", "--batch-size 128"]
    assert flags("pinned memory", plain) == []
    assert flags("monitoring interval", plain) == []
    assert flags("packing", plain) == ["--pack on"]
    assert flags("packing", variant(pack=True)) == ["--pack off"]
    assert flags("compile", plain) == ["--compile on"]
    assert flags("optimizer", plain) == ["--optimizer adamw8bit"]
    assert flags("length grouping", plain) == ["--group-by-length on"]
    assert flags("accumulation", plain) == ["--batch-size 64 --micro-batch 32"]
    assert flags("micro-batch", variant(PlanOptions(micro_batch=1))) == ["no --micro-batch"]
    assert flags("loading", variant(processes=2))[0] == "--workers 1"
    vae = dataclasses.replace(RECIPE, options={"monitor": "full"})
    assert flags("monitoring interval", variant(recipe=vae)) == ["--monitor fast", "--monitor off"]


NOTHING = Setting("the recipe itself")
QUIET = PairedRounds(NOTHING, [1.0] * 3)


class Steps:
    """A trial whose rounds take the seconds that a test names."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = iter(seconds)
        self.world = SimpleNamespace(broadcast_object=lambda value: value)
        self.steps_per_round = 4

    def round(self, _steps: int) -> Any:
        seconds = next(self.seconds)
        return SimpleNamespace(seconds_for=lambda _unit: seconds)


def test_rounds_are_paired_and_their_median_counts() -> None:
    found = PairedRounds(NOTHING)
    base: Any = Steps([2.0, 20.0, 2.0])  # another program took the cores in the second round
    faster: Any = Steps([1.0, 10.0, 1.1])
    tune.alternate(base, faster, found, 0.0, math.inf)
    assert found.ratios == pytest.approx([2.0, 2.0, 2 / 1.1])
    assert found.ratio == 2.0
    assert found.beats(QUIET)


@pytest.mark.parametrize(
    ("ratios", "noise", "beats"),
    [
        ([1.12] * 3, [1.0] * 3, True),
        ([1.02] * 3, [1.0] * 3, False),  # as good as the same
        ([1.5, 0.9, 1.1], [1.0] * 3, False),  # the noise is larger than the gain
        ([1.5, 1.5], [1.0] * 3, False),  # two rounds show no noise
        ([1.12] * 3, [1.1, 1.16, 1.2], False),  # the base beside itself seemed to be as fast
        ([1.5] * 3, [1.1, 1.16, 1.2], True),
    ],
)
def test_only_what_is_beyond_the_noise_helps(ratios: list[float], noise: list[float], beats: bool) -> None:
    assert PairedRounds(NOTHING, ratios).beats(PairedRounds(NOTHING, noise)) is beats
    assert not PairedRounds(NOTHING, ratios, problem="out of memory").beats(QUIET)


def test_no_round_begins_after_the_limit() -> None:
    found, none = PairedRounds(NOTHING), Steps([])
    tune.alternate(none, none, found, math.inf, time.perf_counter() - 1)  # type: ignore[arg-type]
    assert not found.ratios


def few(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let `tune` try these measures alone."""
    monkeypatch.setattr(tune, "settings", lambda base: (s for s in settings(base) if s.measure in names))


def test_of_two_settings_of_one_field_the_faster_is_named() -> None:
    tried = [
        PairedRounds(Setting("batch", recipe={"batch_size": 128})),
        PairedRounds(Setting("loading", plan={"prefetch": 8})),
        PairedRounds(Setting("accumulation", recipe={"batch_size": 64}, plan={"micro_batch": 4})),
        PairedRounds(Setting("loading", plan={"workers": 4})),
    ]
    assert tune.compatible(tried) == tried[:2]


def test_only_plan_choices_that_learn_as_exactly_are_to_be_typed(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that are made up: prefetching 1.3 times as fast, bf16 2 times, a larger batch 1.5 times."""
    gains = {"prefetch": 1.3, "precision": 2.0, "batch_size": 1.5}

    def made_up(base: Any, other: Any, found: PairedRounds, *_: Any) -> None:
        (plan, recipe), (old_plan, old) = ((one.state.plan, one.state.recipe) for one in (other, base))
        changed = {
            "prefetch": plan.prefetch != old_plan.prefetch,
            "precision": plan.precision != old_plan.precision,
            "batch_size": recipe.batch_size != old.batch_size,
        }
        found.ratios = [math.prod(gains[name] for name, is_so in changed.items() if is_so)] * 3

    monkeypatch.setattr(tune, "alternate", made_up)
    few(monkeypatch, "batch", "loading", "mixed precision")
    words = ("--task", RAGGED, "--out", str(tmp_path), "--device", "cpu", "--quiet")
    found = json.loads(say(tune.tune, *words, "--json")[1])
    assert found["keep"]["flags"] == "--prefetch 8"
    assert found["keep"]["ratio"] == pytest.approx(1.3)
    assert any("--batch-size" in flags for flags in found["other"])
    text = rendered(tune.__file__, "tune", **found)
    assert "\ntype: --prefetch 8" in text


def test_tune_on_a_task(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough minutes for a busy machine: the rounds are what ends it."""
    few(monkeypatch, "micro-batch", "packing")
    monkeypatch.setattr(trial, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(tune, "MOST_ROUNDS", 3)
    found = _tuned(say, tmp_path, monkeypatch, "4")
    ratios = {row["measure"]: row.get("ratio") for row in found["rows"]}
    assert ratios["micro-batch"] > 1.2
    assert list(tmp_path.glob("tuned/*/tune.json"))


def test_nothing_is_tried_after_its_minutes(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, "micro-batch", "packing")
    found = _tuned(say, tmp_path, monkeypatch, "0.01")
    assert {row["problem"] for row in found["rows"]} == {"no time was left to measure it"}
    assert found["keep"] is None


def _tuned(say: Say, folder: Path, monkeypatch: pytest.MonkeyPatch, minutes: str) -> dict[str, Any]:
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setenv("ISOBATCH_STARTED", str(time.time()))
    words = ("--task", RAGGED, "--out", str(folder), "--device", "cpu", "--quiet", "--micro-batch", "1")
    code, out, _ = say(tune.tune, *words, "--minutes", minutes, "--json")
    assert code == 0
    return json.loads(out)
