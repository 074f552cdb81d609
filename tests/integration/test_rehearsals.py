"""The rehearsal of the largest micro-batch, which GPUs alone make, passes for every task."""

from __future__ import annotations

from typing import Any

import pytest

from isobatch.benchmarks.sessions import make_builder
from isobatch.engine.train import memory_probe
from isobatch.models.base import StepContext

CASES: dict[str, dict[str, Any]] = {
    "causal-lm": {},
    "dpo": {},
    "kto": {},
    "reward": {},
    "classifier": {},
    "recommender": {},
    "recommender of sequences": {"preset": "sequence"},
    "recommender without a split": {"split": "none"},
    "sequence-vae": {},
}


@pytest.mark.parametrize("case", CASES)
def test_the_longest_samples_train_and_are_evaluated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out samples may have other columns, and arrays of a task must reach its device."""

    def on_the_host(_: object) -> None:
        raise AssertionError("an array of a task stays where it is")

    made = StepContext.__init__.__defaults__ or ()
    default = StepContext.__dataclass_fields__["to_device"].default
    others = tuple(on_the_host if value is default else value for value in made)
    monkeypatch.setattr(StepContext.__init__, "__defaults__", others)
    builder = make_builder(case.partition(" ")[0], CASES[case])
    with builder, builder.phase(builder.schedules[0]) as state:
        assert memory_probe.largest_micro_batch_fits(state)
        assert all(p.grad is None for p in state.model.parameters())
