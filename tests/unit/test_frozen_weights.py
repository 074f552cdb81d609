"""Tests of models/causal_lm/frozen_weights.py: half the memory, and the products of fp32 weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import isobatch
from isobatch.core.errors import UserError
from isobatch.models.causal_lm import adapters, chunked_cross_entropy, frozen_weights
from isobatch.models.causal_lm.task import CausalLMOptions
from isobatch.tests.unit.test_adapters import config_of, tokens

if TYPE_CHECKING:
    from pathlib import Path

BF16, FP32 = torch.bfloat16, torch.float32


def saved(family: str, folder: Path, dtype: torch.dtype = FP32) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family)).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # accelerate sets it, once and for all


def opened(family: str, folder: Path, adapter: str = "lora", frozen_dtype: str = "bf16") -> Any:
    config = config_of(family)
    for name in [n for n in config.to_dict() if n.endswith(("dropout", "pdrop"))]:
        setattr(config, name, 0.0)
    model: Any = adapters.load_base_model(str(folder), config, None, as_stored=frozen_dtype == "bf16")
    torch.manual_seed(1)
    options = CausalLMOptions(adapter=adapter, lora_dropout=0.0, frozen_dtype=frozen_dtype)
    adapters.add_adapter(model, options, "base", None)
    chunked_cross_entropy.make_head_bypassable(model)
    return model.train()


def learnt(model: Any) -> tuple[float, list[torch.Tensor]]:
    loss = chunked_cross_entropy.next_token_loss(model, tokens()[:, :-1], tokens()[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach()), [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_held_in_half_it_learns_what_rounded_fp32_weights_learn(
    family: str, adapter: str, tmp_path: Path
) -> None:
    """In fp32, bit for bit; the rounding is part of the recipe, how the weights are held is not."""
    half = opened(family, saved(family, tmp_path), adapter)
    kinds = {n: p.dtype for n, p in half.named_parameters()}
    assert all(kind == FP32 for n, kind in kinds.items() if "lora" in n or "norm" in n or "bias" in n)
    matrices = {
        n: kind for n, kind in kinds.items() if "proj" in n or "c_" in n or "wte" in n or "tokens" in n
    }
    assert {k for n, k in matrices.items() if "lora" not in n and "bias" not in n} == {BF16}
    whole = opened(family, saved(family, tmp_path), adapter)
    whole.float()
    (loss, gradients), (expected, others) = learnt(half), learnt(whole)
    assert loss == pytest.approx(expected, rel=1e-6)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_bf16_checkpoint_is_held_as_it_is(family: str, tmp_path: Path) -> None:
    model = opened(family, saved(family, tmp_path, BF16))
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).state_dict()
    for name, p in model.named_parameters():
        if "lora" not in name:
            assert torch.equal(p, stored[name.replace(".base_layer", "")].to(p.dtype)), name


def test_no_copy_of_a_weight_waits_for_the_backward_pass() -> None:
    layer = frozen_weights.FrozenLinear(64, 64)
    layer.weight = nn.Parameter(layer.weight.data.to(BF16), requires_grad=False)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = layer(torch.randn(2, 64, requires_grad=True))
    assert [(t.dtype, t.data_ptr()) for t in kept] == [(BF16, layer.weight.data_ptr())]
    y.sum().backward()
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.full((64,), 2.0))


def test_new_recipes_hold_frozen_weights_in_bf16() -> None:
    new = isobatch.Recipe("causal-lm", adapter="lora", model="openai-community/gpt2")
    assert new.options["frozen_dtype"] == "bf16"
    assert isobatch.Recipe("causal-lm").options["frozen_dtype"] == "fp32"
    asked = isobatch.Recipe("causal-lm", adapter="lora", model="openai-community/gpt2", frozen_dtype="fp32")
    assert asked.hash() != new.hash()
    with pytest.raises(UserError, match="as all weights train"):
        adapters.check_options(CausalLMOptions(frozen_dtype="bf16"), pretrained=True)
