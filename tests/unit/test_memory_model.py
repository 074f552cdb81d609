"""Tests of engine/planning/memory_model.py: bytes and FLOPs; the arithmetic stands beside each assert."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from isobatch.core.recipe import Recipe
from isobatch.engine.planning.memory_model import (
    CONTEXT_BYTES,
    ExecutionChoices,
    activation_bytes_per_token,
    flops_per_token,
    logits_bytes,
    memory_footprint,
)
from isobatch.models.base import ModelSize

if TYPE_CHECKING:
    from isobatch.core.plan import StrategyName

LAYERS, HIDDEN = 12, 768
GPT2 = ModelSize(
    parameters=124_439_808,
    trainable=124_439_808,
    layers=LAYERS,
    hidden=HIDDEN,
    heads=12,
    intermediate=3072,
    vocabulary=50257,
)
PLAIN = Recipe(task="causal-lm")


def test_static_bytes_of_adamw_in_fp32() -> None:
    parts = memory_footprint(PLAIN, GPT2, ExecutionChoices(), tokens=0, length=128)
    n = GPT2.parameters
    assert (parts.weights, parts.gradients, parts.moments) == (4 * n, 4 * n, 8 * n)
    assert parts.peak == pytest.approx(16 * n + CONTEXT_BYTES["cpu"] + 4 * n)  # the update's temporaries


@pytest.mark.parametrize(("optimizer", "per_parameter"), [("adamw", 8), ("adamw8bit", 2), ("sgd", 0)])
def test_moments_follow_the_optimizer_and_only_what_trains(optimizer: str, per_parameter: float) -> None:
    lora = ModelSize(parameters=1000, trainable=10)
    parts = memory_footprint(Recipe(task="x", optimizer=optimizer), lora, ExecutionChoices(), 0, 1)  # type: ignore[arg-type]
    assert (parts.weights, parts.gradients, parts.moments) == (4000, 40, 10 * per_parameter)


def test_activations_equal_the_measured_saved_tensors() -> None:
    # GPT-2 saves 120.1 h bytes a layer in fp32 and 64 h under autocast; the gradients of one come on top.
    assert activation_bytes_per_token(GPT2, ExecutionChoices(), 128) == 13 * 120 * HIDDEN
    assert activation_bytes_per_token(GPT2, ExecutionChoices(precision="bf16"), 128) == 13 * 64 * HIDDEN


def test_eager_attention_grows_with_length_and_sdpa_does_not() -> None:
    def grows(attention: str) -> float:
        choices = ExecutionChoices(attention=attention)  # type: ignore[arg-type]
        return activation_bytes_per_token(GPT2, choices, 1024) - activation_bytes_per_token(
            GPT2, choices, 512
        )

    assert grows("sdpa") == 0
    assert grows("eager") == 13 * 9 * 12 * 512


def test_checkpointing_keeps_a_layer_input_each_and_two_layers_at_work() -> None:
    kept = activation_bytes_per_token(GPT2, ExecutionChoices(activation_checkpointing=True), 128)
    assert kept == 12 * 4 * HIDDEN + 2 * 120 * HIDDEN


def test_logits() -> None:
    full, half = ExecutionChoices(), ExecutionChoices(precision="bf16")
    assert (logits_bytes(GPT2, full, 100), logits_bytes(GPT2, half, 100)) == (1200 * 50257, 1600 * 50257)
    chunked = dataclasses.replace(GPT2, head_bytes=1 << 20)
    assert logits_bytes(chunked, full, 1) == 12 * 50257
    assert (logits_bytes(chunked, full, 100), logits_bytes(chunked, half, 100)) == (3 << 20, 4 << 20)
    assert logits_bytes(chunked, ExecutionChoices(strategy="zero3"), 100) == 1200 * 50257


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "moments"),
    [
        ("ddp", 4, 8, 8),
        ("zero1", 4, 8, 3),
        ("zero2", 4, 8, 3),
        ("zero3", 1, 2, 3),
        ("zero3-offload", 0, 0, 0),
    ],
)
def test_what_four_ranks_share(
    strategy: StrategyName, weights: float, gradients: float, moments: float
) -> None:
    parts = memory_footprint(PLAIN, GPT2, ExecutionChoices(processes=4, strategy=strategy), 0, 128)
    found = [part / GPT2.parameters for part in (parts.weights, parts.gradients, parts.moments)]
    assert found == [weights, gradients, moments]


def test_flops_of_gpt2() -> None:
    stack = 12 * 12 * HIDDEN**2  # 12 layers of 4 h^2 + 2 h 4h
    expected = 6 * (stack + 50257 * HIDDEN) + 12 * 12 * HIDDEN * 128
    assert flops_per_token(GPT2, 128) == pytest.approx(expected)
    assert flops_per_token(GPT2, 128, True) == pytest.approx(expected * 8 / 6)


def test_frozen_weights_need_no_weight_gradient() -> None:
    frozen = ModelSize(parameters=GPT2.parameters, trainable=0, layers=12, hidden=HIDDEN)
    trained = ModelSize(parameters=GPT2.parameters, trainable=GPT2.parameters, layers=12, hidden=HIDDEN)
    assert flops_per_token(frozen, 128) == pytest.approx(flops_per_token(trained, 128) * 4 / 6)


def test_a_model_that_says_nothing_of_itself_counts_as_a_stack_of_its_size() -> None:
    # 144 million parameters are 12 layers of width 1000.
    unknown = ModelSize(parameters=144_000_000, trainable=144_000_000)
    assert activation_bytes_per_token(unknown, ExecutionChoices(), 1) == pytest.approx(13 * 120 * 1000)
    assert flops_per_token(unknown, 1) == 6 * 144_000_000
