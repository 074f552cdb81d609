"""Model FLOP utilisation: its formula, where it is left out, and the progress line."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isobatch.engine.hooks.machine import flop_utilisation
from isobatch.engine.loading.loader import BatchLoader, StepWork
from isobatch.models.base import CHANGES_SHAPE, ModelSize
from isobatch.models.causal_lm import model_sizes
from isobatch.models.flops import flops_per_token
from isobatch.tests.unit.helpers import plan

H100 = "NVIDIA H100 80GB HBM3"


def gpt2() -> ModelSize:
    size = model_sizes.size_from_config(model_sizes.PRESETS["gpt2-124m"].config(50257, 1024))
    assert size is not None
    return size


def work(tokens: int, token_length: float) -> StepWork:
    return StepWork(0, np.arange(1), {}, tokens, [], 0.0, token_length)


def test_the_formula() -> None:
    """GPT-2 124M at 1,024 tokens: 6 x 123.5 M weights that multiply and 12 x 12 x 768 x 1,024 for attention.

    That is 854 MFLOP a token; 989 TFLOP/s is the H100's dense bf16 peak.
    """
    used = flop_utilisation(gpt2(), plan(precision="bf16", processes=2), H100)
    assert used is not None
    weights = 12 * 12 * 768**2 + 50257 * 768
    flops = 6 * weights + 12 * 12 * 768 * 1024
    assert flops == pytest.approx(854e6, rel=1e-3)
    assert used(work(500_000, 1024.0), 0.5) == pytest.approx(1e6 * flops / (989e12 * 2))


def test_attention_counts_each_token_with_its_own_sample() -> None:
    """Samples of 2 and 6 tokens: 8 tokens in samples of (2 x 2 + 6 x 6) / 8 = 5 tokens on average."""
    source: Any = SimpleNamespace(lengths=lambda samples: np.array([2, 6], np.int32), weights={})
    loader = BatchLoader(source, lambda step: np.arange(2), plan(micro_batch_tokens=40), rank=0)
    done = loader.plan_step(0)
    assert (done.tokens, done.token_length) == (8, 5.0)
    used = flop_utilisation(gpt2(), plan(precision="fp32"), H100)
    assert used is not None
    by_sample = sum(length * flops_per_token(gpt2(), length) for length in (2, 6))
    assert used(done, 1.0) == pytest.approx(by_sample / 67e12)


@pytest.mark.parametrize(
    ("device", "precision", "changes"),
    [
        ("a GPU nobody knows", "bf16", {}),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", {}),
        ("Tesla V100-SXM2-16GB", "bf16", {}),  # has no bf16 arithmetic, so no such peak
        (H100, "bf16", {"layers": 0}),
        (H100, "bf16", {"recurrent_layers": 1}),
        (H100, "bf16", {"why_unshardable": CHANGES_SHAPE}),
    ],
)
def test_where_it_is_not_known_it_is_left_out(device: str, precision: Any, changes: dict[str, Any]) -> None:
    size = dataclasses.replace(gpt2(), **changes)
    assert flop_utilisation(size, plan(precision=precision), device) is None
