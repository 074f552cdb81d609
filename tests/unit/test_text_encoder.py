"""Tests of models/recommendation/text_encoder.py: its three savings change neither vectors nor gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from isobatch.core.errors import UserError
from isobatch.models.recommendation.catalogue import Catalogue
from isobatch.models.recommendation.text_encoder import TextEncoder, add_lora, load_text_model

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS, WIDTH, WORDS = 4, 32, 50
SIZES = {"num_hidden_layers": BLOCKS, "hidden_size": WIDTH, "num_attention_heads": 4, "intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": BLOCKS, "n_embd": WIDTH, "n_head": 4, "n_positions": 32},
    "distilbert": {"n_layers": BLOCKS, "dim": WIDTH, "n_heads": 4, "hidden_dim": 64},
    **dict.fromkeys(("bert", "roberta", "llama"), SIZES),
}


def texts(count: int = 23, longest: int = 14) -> Catalogue:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, longest, size=count)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    none = np.zeros(1, np.int64)
    return Catalogue(draw.integers(3, WORDS, size=offsets[-1]), offsets, *[none] * 8)


def encoder(family: str = "gpt2", lora: int = 2) -> TextEncoder:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=WORDS, **CONFIGS[family])
    made = TextEncoder(load_text_model(config, None, None), texts())
    if lora:
        made.lowest = add_lora(made, lora, 4, 8)  # type: ignore[assignment]
        for name, p in made.net.named_parameters():
            p.requires_grad_("lora_" in name)
            if "lora_B" in name:
                nn.init.normal_(p, std=0.2)
    return made.eval()


def loss_and_gradients(made: TextEncoder, numbers: Tensor) -> tuple[float, dict[str, Tensor]]:
    """A loss over these texts' vectors, and the gradients of all trained parameters."""
    made.zero_grad()
    direction = torch.linspace(-1, 1, len(numbers) * made.hidden).view(len(numbers), -1)
    loss = (made(numbers) * direction).sum() + made(numbers).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), {
        n: p.grad.clone() for n, p in made.net.named_parameters() if p.grad is not None
    }


LossAndGradients = tuple[float, dict[str, Tensor]]


def assert_close(one: LossAndGradients, other: LossAndGradients) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1].keys() == other[1].keys()
    assert one[1]
    for name, gradient in one[1].items():
        assert (gradient - other[1][name]).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("family", CONFIGS)
def test_a_cached_prefix_gives_the_same_loss_and_gradients(family: str, tmp_path: Path) -> None:
    made, numbers = encoder(family), torch.tensor([3, 0, 17, 22, 9])
    whole = loss_and_gradients(made, numbers)
    made.cache_prefix(2, tmp_path)
    assert made.prefix is not None
    assert_close(whole, loss_and_gradients(made, numbers))
    assert len(made.blocks[2]) == BLOCKS, "the model is whole again"


@pytest.mark.parametrize("family", ["gpt2", "bert"])
@pytest.mark.parametrize("prefix", [False, True])
def test_a_backward_in_chunks_gives_the_same_gradients(family: str, prefix: bool, tmp_path: Path) -> None:
    made, numbers = encoder(family), torch.arange(23)
    if prefix:
        made.cache_prefix(2, tmp_path)
    whole = loss_and_gradients(made, numbers)
    made.chunk_tokens = 30
    assert len(made.split_into_chunks(numbers)) > 4
    assert_close(whole, loss_and_gradients(made, numbers))


def test_memory_of_the_graph_does_not_grow_with_the_texts() -> None:
    made = encoder()
    made.chunk_tokens = 40

    def kept(count: int) -> int:
        """Numbers that the forward keeps for the backward, weights aside."""
        found: list[int] = []
        weights = {p.data_ptr() for p in made.net.parameters()}

        def keep(tensor: Tensor) -> Tensor:
            found.append(0 if tensor.data_ptr() in weights else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            made(torch.arange(count))
        return sum(found)

    assert kept(23) <= 2 * 23  # numbers and places of the texts
    made.chunk_tokens = 4096
    assert kept(23) > 1.5 * kept(11)


def test_pooling_ignores_padding() -> None:
    made = encoder(lora=0)
    rows = texts()
    for number in (1, 4):
        ids = torch.from_numpy(rows.tokens[rows.offsets[number] : rows.offsets[number + 1]])[None]
        with torch.no_grad():
            states = made.net(input_ids=ids).last_hidden_state[0]
        torch.testing.assert_close(made(torch.tensor([number]))[0], states.mean(0), rtol=1e-5, atol=1e-6)


def test_a_prefix_is_cached_per_texts_and_weights(tmp_path: Path) -> None:
    first = encoder()
    first.cache_prefix(2, tmp_path)
    (kept,) = tmp_path.glob("*.bin")
    when = kept.stat().st_mtime_ns
    again = encoder()
    again.cache_prefix(2, tmp_path)
    assert kept.stat().st_mtime_ns == when
    assert again.prefix is not None
    assert first.prefix is not None
    assert torch.equal(again.prefix, first.prefix)
    first.cache_prefix(3, tmp_path)
    other = encoder()
    with torch.no_grad():
        other.net.get_parameter("wte.weight").add_(1)
    other.cache_prefix(2, tmp_path)
    assert len(list(tmp_path.glob("*.bin"))) == 3


def test_lora_sits_in_the_top_blocks_only() -> None:
    made = encoder(lora=1)
    places = {n.split(".")[1] for n, p in made.net.named_parameters() if p.requires_grad}
    assert places == {"3"}
    assert made.lowest == 3


def test_a_model_without_blocks_or_projections_is_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = AutoConfig.for_model("gpt2", **CONFIGS["gpt2"])
            self.linear = nn.Linear(WIDTH, WIDTH)

    with pytest.raises(UserError, match="no list of blocks"):
        _ = TextEncoder(Flat(), texts()).blocks
