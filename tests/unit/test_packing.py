"""Tests of engine/model_setup/packing.py: packed samples learn as in padded rows, with the same noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from isobatch.core.errors import UserError
from isobatch.engine.loading.microbatching import MicroBatchBudget, cut_batch
from isobatch.engine.model_setup.layer_blocks import checkpoint_activations
from isobatch.engine.model_setup.packing import SamplePacking
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.models.causal_lm import chunked_cross_entropy
from isobatch.tests.unit.test_planner import GPT2, planned

PACKS = dataclasses.replace(GPT2, packs=True)
CPU = torch.device("cpu")
LENGTHS = np.array([3, 12, 7, 1])
VOCABULARY = 53
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "llama": {**SMALL, "num_key_value_heads": 2, "attention_dropout": 0.1},
    "qwen2": {**SMALL, "num_key_value_heads": 2},
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 16, "dropout": 0.0},
    "gpt_neox": {**SMALL, "hidden_dropout": 0.1, "attention_dropout": 0.1},
}


def made(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **CONFIGS[family])
    return AutoModelForCausalLM.from_config(config)


def batch() -> tuple[Tensor, Tensor]:
    """(B, T) tokens and targets; padding is full of tokens, so that seeing it would show."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (4, 12), generator=draw)
    targets = torch.randint(VOCABULARY, (4, 12), generator=draw)
    inside = torch.arange(12) < torch.from_numpy(LENGTHS)[:, None] - 1
    return tokens, targets.masked_fill(~inside, chunked_cross_entropy.IGNORE_INDEX)


def learnt(family: str, packed: bool, checkpointed: bool = False) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step with keyed dropout."""
    model = made(family)
    chunked_cross_entropy.make_head_bypassable(model)
    noise = KeyedNoise(3)
    key_dropout(model, noise)
    if checkpointed:
        checkpoint_activations(model, "on", keyed=True)
    packing = SamplePacking(model, noise) if packed else None
    model.train()
    noise.bind(5, np.array([8, 2, 31, 4]), CPU)
    if packing:
        packing.bind(LENGTHS)
    loss = chunked_cross_entropy.next_token_loss(model, *batch())
    loss.backward()  # type: ignore[no-untyped-call]
    if packing:
        assert packing.layout is not None
        packing.bind(None)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), gradients


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
def test_every_family_learns_the_same(family: str, checkpointed: bool) -> None:
    padded, packed = learnt(family, False), learnt(family, True, checkpointed)
    assert packed[0] == pytest.approx(padded[0], rel=1e-6)
    assert packed[1].keys() == padded[1].keys()
    for name, gradient in padded[1].items():
        assert (packed[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


def test_only_real_tokens_are_computed() -> None:
    model = made("gpt2").eval()
    seen: list[torch.Size] = []
    model.transformer.h[0].mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
    packing = SamplePacking(model, None)
    packing.bind(LENGTHS)
    out = model(input_ids=batch()[0]).logits
    packing.bind(None)
    whole = model(input_ids=batch()[0]).logits
    assert [tuple(shape[:2]) for shape in seen] == [(1, LENGTHS.sum()), (4, 12)]
    assert out.shape == whole.shape
    assert torch.allclose(out[1], whole[1], atol=1e-5)
    assert not out[0, 3:].any()


def test_a_forward_that_fails_leaves_no_trace() -> None:
    model = made("gpt2").eval()
    packing = SamplePacking(model, None)
    packing.bind(LENGTHS)
    with pytest.raises(IndexError):
        model(input_ids=batch()[0] + 1000)
    assert SamplePacking.forwarding == 0
    with pytest.raises(UserError, match="more than tokens"):
        model(input_ids=batch()[0], attention_mask=torch.ones(4, 12))
    assert SamplePacking.forwarding == 0


def test_packed_rows_are_cut_by_their_tokens() -> None:
    lengths = np.array([100, 10, 10, 10, 50, 40, 30, 30, 20])
    budget = MicroBatchBudget(samples=100, tokens=150, packed=True)
    for world in (1, 2):
        cut = cut_batch(lengths, world, budget)
        micros = [m for rank in range(world) for m in cut.of_rank(rank)]
        assert sorted(np.concatenate([m.positions for m in micros])) == list(range(9))
        assert all(lengths[m.positions].sum() <= 150 for m in micros)
    assert len(cut_batch(lengths, 1, budget).of_rank(0)) == 2  # 300 tokens; padded rows of 150 take more
    assert len(cut_batch(lengths, 1, MicroBatchBudget(samples=100, tokens=150)).of_rank(0)) > 2
    few = cut_batch(lengths, 1, MicroBatchBudget(samples=2, tokens=1000, packed=True)).of_rank(0)
    assert max(len(m.positions) for m in few) == 2


@pytest.mark.parametrize(
    ("machine", "asked", "said"),
    [
        ("t4", {}, "compute capability 8.0"),
        ("rtx4090", {"precision": "fp32"}, "compute capability 8.0"),
        ("rtx4090", {"compile": "on"}, "--compile on never ends"),
    ],
)
def test_packing_is_refused_in_a_line(machine: str, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        planned(machine, shape=PACKS, pack="on", **asked)
