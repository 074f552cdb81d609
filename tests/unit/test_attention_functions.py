"""Tests of models/attention_functions.py: a decoder's attention stays `is_causal`, eager and compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.models.attention_functions import unregister_attention
from isobatch.models.causal_lm import chunked_cross_entropy

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    },
    "llama": {**SMALL, "num_key_value_heads": 2},
    "qwen2": {**SMALL, "num_key_value_heads": 2},
}


def made(family: str, keyed: bool = True, **more: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=53, **CONFIGS[family], **more)
    model = AutoModelForCausalLM.from_config(config).train()
    chunked_cross_entropy.make_head_bypassable(model)
    if keyed:
        noise = KeyedNoise(0)
        key_dropout(model, noise)
        noise.bind(0, np.arange(3), torch.device("cpu"))
    return model


@pytest.fixture(autouse=True)
def _unregister() -> Iterator[None]:
    yield
    unregister_attention()


def loss(model: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(53, (3, 12), generator=draw) for _ in range(2))
    return chunked_cross_entropy.next_token_loss(model, tokens, targets)


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_compiled_decoder_keeps_causal_attention_without_a_mask(family: str, keyed: bool) -> None:
    model, calls = made(family, keyed), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        for node in graph.graph.nodes:
            if "scaled_dot_product" in str(node.target):
                calls.append((node.kwargs.get("attn_mask"), node.kwargs.get("is_causal")))
        return graph.forward

    torch.compiler.reset()
    expected = float(loss(model).detach())
    model.compile(backend=backend)
    assert float(loss(model).detach()) == pytest.approx(expected, rel=1e-6)
    assert calls == [(None, True)] * 2


def test_a_window_shorter_than_the_rows_keeps_its_mask() -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    masks = []
    real = F.scaled_dot_product_attention

    def seen(*arguments: Any, **named: Any) -> Any:
        masks.append(named.get("attn_mask"))
        return real(*arguments, **named)

    model = made("qwen2", **window)
    F.scaled_dot_product_attention, kept = seen, real
    try:
        loss(model)
    finally:
        F.scaled_dot_product_attention = kept
    assert masks
    assert all(mask is not None for mask in masks)
