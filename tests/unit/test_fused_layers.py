"""Tests of models/fused_layers.py: fewer kernels compute the same, in every family.

GPT-2's GELU is one kernel wherever a model of transformers is built.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch._dynamo.utils import counters
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    activations,
)

from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.data import corpora, tokenizers
from isobatch.engine.model_setup.prepare_model import prepare_model
from isobatch.models import fused_kernels
from isobatch.models.activations import fuse_gelu
from isobatch.models.causal_lm.generation import open_for_generation
from isobatch.models.encoder import encoders
from isobatch.models.fused_layers import fuse_layers
from isobatch.models.recommendation.text_encoder import load_text_model
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KINDS = (activations.NewGELUActivation, activations.FastGELUActivation)
WRITTEN_OUT = {kind: kind.forward for kind in KINDS}
CONFIG = GPT2Config(
    n_layer=1, n_embd=16, n_head=2, n_positions=8, vocab_size=300, bos_token_id=0, eos_token_id=0
)


@pytest.fixture(autouse=True)
def _written_out() -> None:
    """The classes as transformers has them; another test may have changed them."""
    for kind, forward in WRITTEN_OUT.items():
        kind.forward = forward


def kept(module: Any, x: torch.Tensor) -> int:
    found: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        module(x)
    return len({t.data_ptr() for t in found})


@pytest.mark.parametrize("kind", KINDS)
def test_one_kernel_computes_the_same_and_keeps_its_input_alone(kind: Any) -> None:
    x = torch.linspace(-8, 8, 4001, requires_grad=True)
    module = kind()
    before, tensors = module(x), kept(module, x)
    fuse_gelu()
    assert float((module(x) - before).detach().abs().max()) < 5e-7
    assert (kept(module, x), tensors > 3) == (1, True)


class Own:
    """What `prepare_model` asks of a task."""

    rows_per_sample, recipe = 1, Recipe(task="x")

    def build_model(self, facts: Facts) -> Any:
        return GPT2LMHeadModel(CONFIG)


def generation_folder(folder: Path) -> Path:
    GPT2LMHeadModel(CONFIG).save_pretrained(folder)
    tokenizer = tokenizers.train_byte_level_bpe(corpora.demo_corpus().splits["train"](), 300)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


DOORS = {
    "training": lambda _: prepare_model(
        Own(),  # type: ignore[arg-type]
        Facts(fingerprint="", folder="", samples={}, lengths=()),
        plan(),
        torch.device("cpu"),
        Own().build_model,
    ),
    "generation": lambda folder: open_for_generation(generation_folder(folder)),
    "encoders": lambda _: encoders.classifier_class(BertConfig()),
    "texts": lambda _: load_text_model(CONFIG, None, None),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_to_a_model_fuses(door: str, tmp_path: Path) -> None:
    DOORS[door](tmp_path)
    assert all(kind.forward is not WRITTEN_OUT[kind] for kind in KINDS)


FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "olmo2",
    "phi3",
    "gpt_neox",
    "glm",
    "mixtral",
)
WIDTHS = {
    **{"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "pad_token_id": 0},
    **{"num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.fixture
def _as_before() -> Iterator[None]:
    """Classes and functions that a test fuses are as they were after it."""
    kept: list[tuple[Any, str, Any]] = []
    for module in [
        m for name, m in sys.modules.items() if name.startswith(("transformers.models.", "peft."))
    ]:
        classes = [v for v in vars(module).values() if isinstance(v, type) and "forward" in vars(v)]
        kept += [(kind, "forward", vars(kind)["forward"]) for kind in classes if "fused" not in vars(kind)]
        if "apply_rotary_pos_emb" in vars(module):
            kept.append((module, "apply_rotary_pos_emb", module.apply_rotary_pos_emb))
    yield
    for owner, name, value in kept:
        setattr(owner, name, value)
        if name == "forward" and "fused" in vars(owner):
            del owner.fused


def adapted(family: str) -> Any:
    torch.manual_seed(0)
    known = set(AutoConfig.for_model(family).to_dict())
    config = AutoConfig.for_model(family, **{k: v for k, v in WIDTHS.items() if k in known})
    model = AutoModelForCausalLM.from_config(config).train()
    names = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m) is torch.nn.Linear} - {
        "lm_head"
    }
    inject_adapter_in_model(LoraConfig(target_modules=sorted(names), init_lora_weights=False), model)
    return model


def computed(model: Any, rows: int, length: int, half: bool) -> list[torch.Tensor]:
    """The loss and every gradient."""
    tokens = torch.arange(rows * length).view(rows, length) % 67
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = model(input_ids=tokens, use_cache=False).logits.float().logsumexp(-1).sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same(family: str) -> None:
    """On a CPU in fp32 to the bit, with an adapter on every matrix.

    Under autocast the loss is the same to the bit, and gradients of what is cast once are added up in bf16.
    """
    model = adapted(family)
    before = [computed(model, 2, 9, half) for half in (False, True)]
    fuse_layers(model)
    plain, half = (
        [computed(model, 2, 9, half), old] for half, old in zip((False, True), before, strict=True)
    )
    assert all(map(torch.equal, *plain))
    assert torch.equal(half[0][0], half[1][0])
    for ours, theirs in zip(*half, strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()
    kinds = {type(m) for m in model.modules() if "fused" in vars(type(m))}
    assert any(kind.forward.__module__ == "isobatch.models.fused_layers" for kind in kinds)


@pytest.mark.usefixtures("_as_before")
def test_a_kind_of_layer_is_compiled_once_for_all_layers_and_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted("qwen3")
    shapes = ((2, 9), (3, 5), (4, 7))
    plain = [computed(model, *shape, False) for shape in shapes]
    monkeypatch.setattr(fused_kernels, "has_triton", lambda _: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    fuse_layers(model)
    for function in [o for o in gc.get_objects() if type(o) is fused_kernels.fused_on_gpu]:
        monkeypatch.setattr(function, "_chosen", None)  # what a CPU chose before
    torch.compiler.reset()
    counters.clear()
    counts = []
    for shape, expected in zip(shapes, plain, strict=True):
        for ours, theirs in zip(computed(model, *shape, False), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        counts.append(counters["stats"]["unique_graphs"])
    assert 4 <= counts[1] == counts[-1] <= 10, counts
    assert not fused_kernels.take_failure()
