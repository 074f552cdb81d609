"""A last layer that computes its first token alone gives the logits and gradients of the whole layer."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isobatch.engine.model_setup.layer_blocks import checkpoint_activations
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.models.attention_functions import unregister_attention
from isobatch.models.encoder import encoders as real
from isobatch.models.encoder import quantization, weight_surgery
from isobatch.models.encoder.last_layer import AFTER, compute_first_alone
from isobatch.tests.unit import encoders

ROWS = 6


def dropping(family: str, dropout: float) -> Any:
    model = encoders.classifier(family)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model


def inputs(pairs: bool = False) -> dict[str, Tensor]:
    found = {name: torch.from_numpy(x) for name, x in encoders.given(ROWS).items()}
    if pairs:
        found["token_type_ids"] = (torch.arange(19) > 6).long().expand(ROWS, 19) * found["attention_mask"]
    return found


def learnt(model: Any, pairs: bool = False, recomputed: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """The output, and the gradient of each parameter, of a training step with keyed noise."""
    model = copy.deepcopy(model).train()
    noise = KeyedNoise(1)
    key_dropout(model, noise)
    if recomputed:
        checkpoint_activations(model, "on", keyed=True)
    noise.bind(3, np.arange(ROWS) + 10, torch.device("cpu"))
    output = model(**inputs(pairs), output_hidden_states=True)
    loss = nn.functional.cross_entropy(output.logits, torch.arange(ROWS) % 2, reduction="sum")
    loss = loss + sum(states[:, 0].square().sum() for states in output.hidden_states)
    loss.backward()
    unregister_attention()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(first: Any, whole: Any) -> None:
    torch.testing.assert_close(first[0].logits, whole[0].logits, rtol=1e-5, atol=1e-6)
    assert first[1].keys() == whole[1].keys()
    for name, gradient in whole[1].items():
        scale = float(gradient.norm(torch.inf)) if gradient.numel() else 0.0
        torch.testing.assert_close(first[1][name], gradient, rtol=1e-4, atol=2e-6 * scale + 1e-6, msg=name)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", AFTER)
def test_logits_and_gradients_are_those_of_the_whole_layer(
    family: str, dropout: float, recomputed: bool
) -> None:
    pairs = family in ("bert", "electra")
    model = dropping(family, dropout)
    whole = learnt(model, pairs)
    assert compute_first_alone(model)
    first = learnt(model, pairs, recomputed)
    assert first[0].hidden_states[-1].shape[1] == 1
    assert first[0].hidden_states[-2].shape[1] == 19
    assert_same(first, whole)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("family", AFTER)
def test_every_kernel_answers_the_same(family: str, kernel: str) -> None:
    model = encoders.classifier(family)
    whole = encoders.logits(model)
    model.set_attn_implementation(kernel)
    compute_first_alone(model)
    torch.testing.assert_close(encoders.logits(model), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", encoders.FAMILIES)
def test_a_pruned_and_rounded_model_computes_it_too(family: str) -> None:
    """Masks, removed heads and neurons, and quantizers whose ranges were chosen with all tokens."""
    model = dropping(family, 0.1)
    weight_surgery.set_masks(real.layers(model), encoders.some_masks())
    first = copy.deepcopy(model)
    compute_first_alone(first)
    assert_same(learnt(first), learnt(model))
    for one in (model, first):
        weight_surgery.remove_masked(real.layers(one))
    assert_same(learnt(first), learnt(model))
    for one in (model, first):
        quantization.quantize_model(one, 8, 8)
    quantization.calibrate(model, (encoders.logits(model) for _ in range(1)))
    first.load_state_dict(model.state_dict())
    for quantizer in quantization.quantizers(first):
        quantizer.collected = None
    torch.testing.assert_close(encoders.logits(first.eval()), encoders.logits(model.eval()))


def test_models_that_read_other_tokens_are_left_alone() -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification, ModernBertForSequenceClassification

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = AutoConfig.for_model("bert", vocab_size=50, **sizes)
    assert not compute_first_alone(AutoModelForTokenClassification.from_config(config))
    modern = AutoConfig.for_model("modernbert", vocab_size=50, pad_token_id=0, **sizes)
    assert not compute_first_alone(ModernBertForSequenceClassification(modern))
