"""Tests of engine/noise/keyed_attention.py: the plain kernel without dropout, a mask that ignores padding."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from isobatch.core.errors import UserError
from isobatch.engine.noise.keyed_attention import (
    MAX_KEYED_LENGTH,
    dropout_mask,
    key_attention,
    keyed_attention,
)
from isobatch.engine.noise.keyed_noise import KeyedNoise

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = torch.device("cpu")
HEADS, WIDTH = 4, 8


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("the plain kernel draws its own noise")


def attention(samples: Sequence[int], plain: Any = refused) -> tuple[Any, nn.Module]:
    noise, module = KeyedNoise(0), nn.Module()
    module.noise_site = noise.register("layer.attention")  # type: ignore[assignment]
    noise.bind(3, np.array(samples), CPU)
    return partial(keyed_attention, plain), module.train()


def rows(samples: Sequence[int], length: int, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value (B, H, T, D) that depend on the sample alone."""

    def one(sample: int, salt: int, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(sample * 10 + salt)
        return torch.randn(64, count, WIDTH, generator=generator)[:length].transpose(0, 1)

    parts = [torch.stack([one(s, salt, h) for s in samples]) for salt, h in enumerate((HEADS, heads, heads))]
    return parts[0], parts[1], parts[2]


def run(samples: Sequence[int], length: int, dropout: float = 0.3, heads: int = HEADS, **more: Any) -> Tensor:
    keyed, module = attention(samples)
    out, _ = keyed(module, *rows(samples, length, heads), more.pop("mask", None), dropout=dropout, **more)
    assert out.shape == (len(samples), length, HEADS, WIDTH)
    return out


@pytest.mark.parametrize("heads", [HEADS, 2, 1])
def test_at_almost_no_dropout_it_is_the_plain_kernel(heads: int) -> None:
    # 1e-6 * 65536 rounds to no dropout at all, so that only the arithmetic is compared.
    query, key, value = rows([1, 2], 9, heads)
    grouped = {"enable_gqa": True} if heads != HEADS else {}
    plain = scaled_dot_product_attention(query, key, value, is_causal=True, **grouped).transpose(1, 2)
    assert torch.allclose(run([1, 2], 9, 1e-6, heads), plain, atol=1e-6)


def test_a_mask_and_a_scale_of_the_caller_are_used() -> None:
    query, key, value = rows([1, 2], 9)
    allowed = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    allowed |= torch.eye(9, dtype=torch.bool)
    plain = scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=0.1).transpose(1, 2)
    assert torch.allclose(run([1, 2], 9, 1e-6, mask=allowed, scaling=0.1), plain, atol=1e-6)
    added = torch.zeros(2, 1, 9, 9).masked_fill(~allowed, -torch.inf)
    assert torch.allclose(run([1, 2], 9, 1e-6, mask=added, scaling=0.1), plain, atol=1e-6)
    both_ways = scaled_dot_product_attention(query, key, value).transpose(1, 2)
    assert torch.allclose(run([1, 2], 9, 1e-6, is_causal=False), both_ways, atol=1e-6)


@pytest.mark.parametrize("length", [1, 5, 6, 17])
def test_padding_on_the_right_moves_nothing(length: int) -> None:
    short, long = run([1, 2, 3], length), run([1, 2, 3], length + 7)
    # The causal mask keeps padding out of real positions; the dropout mask must not shift either.
    assert torch.allclose(long[:, :length], short, atol=1e-6)


def masks(samples: Sequence[int], length: int, probability: float = 0.3) -> Tensor:
    noise = KeyedNoise(0)
    site = noise.register("a")
    noise.bind(0, np.array(samples), CPU)
    return dropout_mask(site.draw(), torch.Size((len(samples), HEADS, length, length)), probability)


def test_the_mask_is_a_corner_of_the_largest_one() -> None:
    whole = masks([1], MAX_KEYED_LENGTH)
    for length in (1, 2, 7, 100):
        assert torch.equal(masks([1], length), whole[:, :, :length, :length])


def test_without_dropout_the_plain_kernel_is_asked() -> None:
    asked: list[dict[str, Any]] = []

    def plain(*_: Any, **given: Any) -> tuple[Tensor, None]:
        asked.append(given)
        return torch.zeros(1), None

    keyed, module = attention([1], plain)
    keyed(module, *rows([1], 4), None, dropout=0.0, scaling=0.5)
    keyed(module.eval(), *rows([1], 4), None, dropout=0.3, is_causal=True)
    assert asked == [{"dropout": 0.0, "scaling": 0.5}, {"dropout": 0.0, "is_causal": True}]


def test_lengths_beyond_the_square_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=f"keyed up to {MAX_KEYED_LENGTH} tokens, and this batch has {MAX_KEYED_LENGTH + 1}",
    ):
        masks([1], MAX_KEYED_LENGTH + 1)


def gpt2(layers: int = 2) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "n_embd": 16, "n_layer": layers, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.4)).train()


def test_a_whole_model_is_the_same_for_a_sample_in_any_batch_and_padding() -> None:
    model, noise = gpt2(), KeyedNoise(0)
    key_attention(model, noise)
    assert list(noise.sites) == ["transformer.h.0.attn.attention", "transformer.h.1.attn.attention"]
    tokens = torch.randint(31, (3, 11), generator=torch.Generator().manual_seed(1))

    def logits(rows: list[int], width: int, padding: int = 0) -> Tensor:
        noise.bind(0, np.array([100, 200, 300])[rows], CPU)
        padded = nn.functional.pad(tokens[rows, :width], (0, padding), value=5)
        return model(input_ids=padded, use_cache=False).logits[:, :width]

    whole = logits([0, 1, 2], 11)
    assert torch.allclose(logits([2, 0], 7, padding=9), whole[[2, 0], :7], atol=1e-5)
    noise.bind(1, np.array([100, 200, 300]), CPU)  # the next step has other noise
    assert not torch.allclose(model(input_ids=tokens, use_cache=False).logits, whole, atol=1e-3)
