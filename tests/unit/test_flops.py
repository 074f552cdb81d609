"""Tests of models/flops.py: 6 N + 12 L T d, N counted by hand for four known models."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from isobatch.models.base import ModelSize
from isobatch.models.causal_lm.model_sizes import size_from_config
from isobatch.models.flops import flops_per_token, matmul_parameters

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_2 = {**LLAMA, "intermediate_size": 11008, "vocab_size": 32000}
LLAMA_3 = {**LLAMA, "intermediate_size": 14336, "vocab_size": 128256, "num_key_value_heads": 8}
QWEN_25 = {
    **{"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28},
    **{"intermediate_size": 18944, "vocab_size": 152064, "num_key_value_heads": 4},
}
QWEN_3 = {  # heads of 128, so that they are wider together than the model
    **{"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16},
    **{"intermediate_size": 3072, "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128},
    "tie_word_embeddings": True,
}
KNOWN = [
    # config, N, L, d of the scores
    (GPT2, 12 * 12 * 768**2 + 50257 * 768, 12, 768),  # the tied head multiplies, the table is looked up
    (LLAMA_2, 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096, 32, 4096),
    (LLAMA_3, 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096, 32, 4096),
    (QWEN_25, 28 * (2 * 3584**2 + 2 * 3584 * 512 + 3 * 3584 * 18944) + 152064 * 3584, 28, 3584),
    (QWEN_3, 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072) + 151936 * 1024, 28, 2048),
]


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: row[0]["model_type"])
def test_a_token_costs_6_n_and_12_l_t_d(row: tuple[dict[str, Any], int, int, int]) -> None:
    config, n, layers, width = row
    size = size_from_config(config)
    assert size is not None
    assert matmul_parameters(size) == n
    assert flops_per_token(size, 1024) == 6 * n + 12 * layers * 1024 * width
    assert flops_per_token(size, 1024, True) == 8 * n + 16 * layers * 1024 * width


def test_frozen_weights_need_no_weight_gradient_but_scores_need_theirs() -> None:
    size = size_from_config(LLAMA_2)
    assert size is not None
    frozen = dataclasses.replace(size, trainable=0)
    n = matmul_parameters(size)
    assert flops_per_token(frozen, 128) == 4 * n + 12 * 32 * 128 * 4096
    assert flops_per_token(frozen, 128, True) == 6 * n + 16 * 32 * 128 * 4096


def test_a_model_that_says_nothing_of_itself_counts_all_its_parameters() -> None:
    unknown = ModelSize(parameters=144_000_000, trainable=144_000_000)
    assert flops_per_token(unknown, 1) == 6 * 144_000_000
