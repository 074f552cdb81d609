"""Tests of activations that are recomputed in part: the same gradients to the bit, and no product twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from isobatch.core.plan import Recompute
from isobatch.engine.model_setup.layer_blocks import KEPT, checkpoint_activations
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.engine.planning.memory_model import ExecutionChoices, activation_bytes_per_token
from isobatch.models.attention_functions import unregister_attention
from isobatch.models.causal_lm.model_sizes import size_from_config

ROWS, LENGTH, LAYERS = 2, 24, 3
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        **{"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
        "attn_pdrop": 0.0,  # else attention is written out, and what it makes is not kept
    },
    "llama": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 4, "num_key_value_heads": 2},
    },
}


class Operations(TorchDispatchMode):
    """Which were computed inside it, and the bytes that products and attention gave."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, out = func.__name__.partition(".")[0], func(*args, **(kwargs or {}))
        self.counts[name] += 1
        if name in KEPT or "dot_product" in name:
            self.bytes += (out if isinstance(out, torch.Tensor) else out[0]).nbytes
        return out


def computed(family: str, how: Recompute, half: bool) -> tuple[list[torch.Tensor], Operations, Operations]:
    """The loss and gradients of a step, and what its blocks and its backward pass computed."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=53, **CONFIGS[family])
    model: Any = AutoModelForCausalLM.from_config(config).train().base_model
    noise = KeyedNoise(0)
    key_dropout(model, noise)
    checkpoint_activations(model, how, keyed=True)
    noise.bind(0, np.arange(ROWS), torch.device("cpu"))
    forward, backward = Operations(), Operations()
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 53
    with torch.autocast("cpu", torch.bfloat16, enabled=half), forward:
        loss = model(input_ids=tokens, use_cache=False).last_hidden_state.float().square().sum()
    with backward:
        loss.backward()
    unregister_attention()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], forward, backward


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_same_is_learnt_and_no_product_is_computed_twice(family: str, half: bool) -> None:
    plain, forward, once = computed(family, "off", half)
    some, _, selective = computed(family, "selective", half)
    every, _, twice = computed(family, "on", half)
    assert all(map(torch.equal, plain, some))
    assert all(map(torch.equal, plain, every))
    products = [sum(run.counts[name] for name in KEPT) for run in (once, selective, twice)]
    assert products[0] == products[1] < products[2]
    assert selective.counts["mul"] > once.counts["mul"]
    size = size_from_config({**AutoConfig.for_model(family, vocab_size=53, **CONFIGS[family]).to_dict()})
    assert size is not None
    kept = [
        activation_bytes_per_token(
            size, ExecutionChoices(precision="bf16" if half else "fp32", activation_checkpointing=how), LENGTH
        )
        for how in ("selective", "on")
    ]
    assert kept[0] - kept[1] == pytest.approx(forward.bytes / (ROWS * LENGTH))
