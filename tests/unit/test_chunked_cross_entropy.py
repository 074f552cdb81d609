"""Tests of models/causal_lm/chunked_cross_entropy.py: against the loss with the full table of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from isobatch.models import head_chunks
from isobatch.models.causal_lm import chunked_cross_entropy

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16},
    "llama": SMALL,
    "opt": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 16},
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4},
    "gpt_neox": SMALL,
}
VOCABULARY = 67


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **CONFIGS[family])
    for name in vars(config):
        if ("drop" in name or "pdrop" in name) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    return AutoModelForCausalLM.from_config(config).train()


def loss_and_gradients(
    model: Any, tokens: Tensor, targets: Tensor, smoothing: float = 0.0
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    found = chunked_cross_entropy.next_token_loss(model, tokens, targets, smoothing=smoothing)
    (found * 0.37).backward()
    return float(found.detach()), {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (3, 12), generator=draw)
    targets = torch.randint(VOCABULARY, (3, 12), generator=draw)
    targets[0, 5:], targets[1, :3] = chunked_cross_entropy.IGNORE_INDEX, chunked_cross_entropy.IGNORE_INDEX
    return tokens, targets


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("family", "smoothing"), [*((f, 0.0) for f in CONFIGS), ("gpt2", 0.2)])
def test_loss_and_gradients_are_those_of_the_full_logits(
    family: str,
    smoothing: float,
    sharded: bool,
    batch: tuple[Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a head whose weights are whole while it runs (ZeRO-3, FSDP) too, which then computes the loss."""
    monkeypatch.setattr(head_chunks, "CHUNK_BYTES", 4 * VOCABULARY * 5)  # five tokens at a time
    model = make_model(family)
    whole = loss_and_gradients(model, *batch, smoothing)
    chunked_cross_entropy.make_head_bypassable(model)
    assert isinstance(model.get_output_embeddings(), chunked_cross_entropy.BypassableHead)
    if sharded:
        model.get_output_embeddings().weight.ds_id = 0
        whole_logits = "isobatch.models.causal_lm.chunked_cross_entropy.linear"
        monkeypatch.setattr(whole_logits, lambda *_: pytest.fail("whole logits were computed"))
    chunked = loss_and_gradients(model, *batch, smoothing)
    with torch.no_grad():
        seen = chunked_cross_entropy.next_token_loss(model, *batch, smoothing=smoothing)
    assert float(seen) == pytest.approx(chunked[0], rel=1e-6)
    assert chunked[0] == pytest.approx(whole[0], rel=1e-6)
    assert chunked[1].keys() == whole[1].keys()
    for name, gradient in whole[1].items():
        assert (chunked[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-9, name


def test_a_frozen_head_gets_no_gradient(batch: tuple[Tensor, Tensor]) -> None:
    model = make_model("llama")
    chunked_cross_entropy.make_head_bypassable(model)
    model.get_output_embeddings().weight.requires_grad_(False)
    _, gradients = loss_and_gradients(model, *batch)
    assert "lm_head.weight" not in gradients
    assert gradients


def test_heads_that_transform_their_logits_are_left_alone() -> None:
    config = AutoConfig.for_model("gemma2", vocab_size=VOCABULARY, head_dim=8, num_key_value_heads=4, **SMALL)
    model = AutoModelForCausalLM.from_config(config)
    chunked_cross_entropy.make_head_bypassable(model)
    assert not isinstance(
        model.get_output_embeddings(), chunked_cross_entropy.BypassableHead
    )  # it caps its logits


def test_memory_is_that_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,000 tokens and 20,000 words the logits would be 320 MB."""
    largest = 0
    plain = torch.Tensor.float

    def watched(self: Tensor, *given: Any, **named: Any) -> Tensor:
        nonlocal largest
        largest = max(largest, self.numel())
        return plain(self, *given, **named)

    monkeypatch.setattr(torch.Tensor, "float", watched)
    monkeypatch.setattr(head_chunks, "CHUNK_BYTES", 4 << 20)
    states = torch.randn(4000, 8, requires_grad=True)
    weight = torch.randn(20_000, 8, requires_grad=True)
    targets = torch.zeros(4000, dtype=torch.long)
    found = chunked_cross_entropy.ChunkedCrossEntropy.apply(states, weight, None, targets, 0.0)
    found.backward()
    assert 0 < largest <= 1 << 20
    assert float(found.detach()) == pytest.approx(
        float(cross_entropy(states @ weight.T, targets, reduction="sum").detach()), rel=1e-4
    )


def test_a_known_count_chooses_the_same_rows(batch: tuple[Tensor, Tensor]) -> None:
    """Without asking the device how many targets there are."""
    count = int((batch[1] != chunked_cross_entropy.IGNORE_INDEX).sum())
    model = make_model("gpt2")
    chunked_cross_entropy.make_head_bypassable(model)
    losses = [chunked_cross_entropy.next_token_loss(model, *batch, n).detach() for n in (None, count)]
    assert torch.equal(*losses)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_on_tensor_cores_the_vocabulary_is_padded_and_sums_are_fp32(
    family: str, batch: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    products = []

    def product(one: Tensor, other: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert one.dtype == other.dtype == torch.bfloat16
        products.append((one.shape[0], other.shape[1], out_dtype))
        return torch.matmul(one.float(), other.float()).to(out_dtype)

    plain = torch.addmm

    def added(total: Tensor, one: Tensor, other: Tensor, **named: Any) -> Tensor:
        if "out_dtype" not in named:  # a layer of the model
            return plain(total, one, other, **named)
        found: Tensor = named["out"].copy_(total + product(one, other, out_dtype=named["out_dtype"]))
        return found

    model = make_model(family)
    chunked_cross_entropy.make_head_bypassable(model)
    whole = loss_and_gradients(model, *batch)
    monkeypatch.setattr(chunked_cross_entropy, "on_tensor_cores", lambda _, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "addmm", added)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = loss_and_gradients(model, *batch)
    count = int((batch[1] != chunked_cross_entropy.IGNORE_INDEX).sum())
    width, padded = model.config.hidden_size, -(-VOCABULARY // 64) * 64
    assert products == [(count, padded, torch.bfloat16), (padded, width, torch.float32)]
    assert found[0] == pytest.approx(whole[0], rel=2e-3)
    head = "lm_head.weight" if "lm_head.weight" in whole[1] else "transformer.wte.weight"
    assert (found[1][head] - whole[1][head]).norm() < 2e-2 * whole[1][head].norm()


def test_chunks_grow_with_the_memory_of_the_gpu() -> None:
    gigabyte = 10**9
    assert head_chunks.chunk_bytes(None) == head_chunks.chunk_bytes(2 * gigabyte) == 64 << 20
    assert head_chunks.chunk_bytes(24 * gigabyte) == 24 * gigabyte // 128
    assert head_chunks.chunk_bytes(80 * gigabyte) == 512 << 20
