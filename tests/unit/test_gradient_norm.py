"""Tests of engine/strategies/gradient_norm.py: the norm that is logged and clipped by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isobatch.engine.strategies.base import BLOCK, gradient_norm
from isobatch.engine.strategies.replicated import ReplicatedStrategy
from isobatch.tests.unit.helpers import plan

CPU = torch.device("cpu")


@pytest.mark.parametrize("sizes", [(1,), (3, BLOCK + 1), (10_000_000, 7)])
def test_it_is_the_norm_of_all_values(sizes: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(size, generator=draw) for size in sizes]
    exact = torch.cat(gradients).double().square().sum().sqrt()
    assert abs(float(gradient_norm(gradients, CPU)) / float(exact) - 1) < 1e-6


def test_the_shape_and_the_order_in_memory_do_not_matter() -> None:
    gradient = torch.randn(3, 50_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gradient_norm([gradient.T.contiguous().T], CPU), gradient_norm([gradient], CPU))


def test_without_gradients_it_is_zero() -> None:
    assert float(gradient_norm([], CPU)) == 0


@pytest.mark.parametrize("clip", [1e-3, 1e3])
def test_an_update_that_clips_learns_what_clipped_gradients_teach(clip: float) -> None:
    """As on a GPU, where torch's fused AdamW divides gradients as it reads them; eps is large, so that their
    size counts.
    """
    world: Any = SimpleNamespace(size=1, device=CPU)
    learnt = []
    for in_update in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        strategy = ReplicatedStrategy(
            model, lambda m: torch.optim.AdamW(m.parameters(), 0.1, eps=1e-2, fused=True), plan(), world, clip
        )
        strategy._update_clips = in_update  # noqa: SLF001  what a plan for a GPU sets
        for _ in range(3):
            strategy.backward(model(torch.ones(2, 5)).square().sum())
            strategy.step_optimizer(0.1)
        learnt.append(model.weight.detach())
    assert torch.allclose(*learnt, rtol=1e-6, atol=0)
