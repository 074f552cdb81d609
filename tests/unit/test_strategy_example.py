"""examples/strategy.py takes the steps that the strategies of the project take, on worlds of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from isobatch.engine.strategies.replicated import ReplicatedStrategy
from isobatch.engine.train.hooks import Hooks
from isobatch.engine.train.step import train_step
from isobatch.examples.strategy import PerParameterStrategy
from isobatch.tests.unit.helpers import optimizer_of, plan
from isobatch.tests.unit.test_train_step import RECIPE, model, state_of

if TYPE_CHECKING:
    from isobatch.engine.strategies.base import Strategy


def weights_after_two_steps(kind: type[Strategy], size: int) -> Any:
    """A rank's part."""
    models = [model() for _ in range(size)]  # made here: seeding is global, threads would mix it up

    def part(world: Any) -> dict[str, torch.Tensor]:
        chosen = plan(processes=size, micro_batch_tokens=40)
        strategy: Any = kind(models[world.rank], lambda m: optimizer_of(m, RECIPE), chosen, world, clip=0.5)
        state = state_of(strategy, steps=2)
        for batch in state.batches(0):
            train_step(state, batch, Hooks())
        return {name: p.detach().clone() for name, p in strategy.unwrapped.named_parameters()}

    return part


@pytest.mark.parametrize("size", [1, 2, 5])
def test_it_takes_the_same_steps(size: int, run_ranks: Any) -> None:
    ours = run_ranks(size, weights_after_two_steps(PerParameterStrategy, size))
    theirs = run_ranks(size, weights_after_two_steps(ReplicatedStrategy, size))
    assert all(calls == ours.calls[0] for calls in ours.calls)
    for found in ours.values:
        for name, weight in theirs.values[0].items():
            assert torch.allclose(found[name], weight, atol=1e-6), name
