"""Tests of engine/strategies/gradient_norm.py: the norm that is logged and clipped by."""

from __future__ import annotations

import pytest
import torch

from isobatch.engine.strategies.base import BLOCK, gradient_norm

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
