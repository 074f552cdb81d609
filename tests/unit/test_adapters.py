"""Tests of models/causal_lm/adapters.py: targets, training, merging and saving in every model family."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from isobatch.core.errors import ExportError, UserError
from isobatch.models import lora, saving
from isobatch.models.causal_lm import adapter_sizes, adapters, chunked_cross_entropy, model_sizes
from isobatch.models.causal_lm.task import CausalLMOptions

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}, {"c_attn": 2}),
    "llama": (SMALL, {"q_proj": 2, "v_proj": 2}),
    "mistral": ({**SMALL, "num_key_value_heads": 2}, {"q_proj": 2, "v_proj": 2}),
    "qwen2": ({**SMALL, "num_key_value_heads": 2}, {"q_proj": 2, "v_proj": 2}),
    "qwen3": ({**SMALL, "num_key_value_heads": 2, "head_dim": 16}, {"q_proj": 2, "v_proj": 2}),
    "opt": ({**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64}, {"q_proj": 2, "v_proj": 2}),
    "bloom": ({"hidden_size": 64, "n_layer": 2, "n_head": 4}, {"query_key_value": 2}),
    "gpt_neox": (SMALL, {"query_key_value": 2}),
    "mixtral": ({**SMALL, "num_key_value_heads": 2, "num_local_experts": 2}, {"q_proj": 2, "v_proj": 2}),
    "qwen2_moe": (
        {**SMALL, "num_key_value_heads": 4, "num_experts": 4, "moe_intermediate_size": 16},
        {"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": 2},
    ),
}
"""model_type -> (sizes, default targets with their counts). Pythia is a GPT-NeoX, DistilGPT-2 a GPT-2."""


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, vocab_size=67, **FAMILIES[family][0])


def adapted(family: str, **asked: Any) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config_of(family))
    options = CausalLMOptions(**{"adapter": "lora", **asked})
    adapters.add_adapter(model, options, "base", None)
    chunked_cross_entropy.make_head_bypassable(model)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(67, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_train_and_merging_keeps_the_logits(family: str) -> None:
    model = adapted(family)
    before = copy.deepcopy(model.state_dict())
    trained = [p for p in model.parameters() if p.requires_grad]
    found = counts(family)
    assert found.targets == FAMILIES[family][1]
    assert found.trainable == sum(p.numel() for p in trained)
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    model.train()
    for _ in range(8):
        loss = chunked_cross_entropy.next_token_loss(model, tokens()[:, :-1], tokens()[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    moved = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert moved
    assert all("lora_" in name for name in moved)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=tokens()).logits
        merge(model)
        assert float((model(input_ids=tokens()).logits - logits).abs().max()) < 1e-4


def merge(model: Any) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()


def test_lora_on_gpt2_has_its_known_number_of_parameters() -> None:
    """811,008, not the 524,288 that is often quoted for rank 8 on c_attn and c_proj of GPT-2."""
    options = CausalLMOptions(adapter="lora", lora_targets="c_attn,c_proj")
    shapes = model_sizes.shape_by_building(AutoConfig.for_model("gpt2"))
    found = adapter_sizes.adapter_counts(shapes, options)
    assert (found.trainable, found.targets) == (811_008, {"c_attn": 12, "c_proj": 24})


def counts(family: str, **asked: Any) -> adapter_sizes.AdapterCounts:
    shapes = model_sizes.shape_by_building(config_of(family))
    return adapter_sizes.adapter_counts(shapes, CausalLMOptions(**{"adapter": "lora", **asked}))


ASKED: list[dict[str, Any]] = [
    {},
    {"lora_targets": "all-linear", "lora_bias": "all"},
    {"adapter": "dora", "lora_r": 3, "lora_bias": "lora_only"},
    {"also_train": ("embeddings",)},
    {"also_train": ("head",)},
    {"also_train": ("embeddings", "head")},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("asked", ASKED)
def test_the_arithmetic_is_what_peft_builds(family: str, asked: dict[str, Any]) -> None:
    model = adapted(family, **asked)
    found = counts(family, **asked)
    parameters = dict(model.named_parameters())
    assert found.trainable == sum(p.numel() for p in parameters.values() if p.requires_grad)
    assert found.added == sum(p.numel() for name, p in parameters.items() if "lora_" in name)
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "lora_A")}
    assert found.inputs == sum(m.in_features for m in layers.values())
    assert found.targets == Counter(name.rpartition(".")[2] for name in layers)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "biased"])
def test_the_shapes_of_a_config_are_those_of_its_model(family: str) -> None:
    more = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    biased = AutoConfig.for_model("llama", vocab_size=67, **FAMILIES["llama"][0], **more)
    config = biased if family == "biased" else config_of(family)
    found, built = model_sizes.shape_from_config(config.to_dict()), model_sizes.shape_by_building(config)
    assert found is not None
    assert found.size.parameters == built.size.parameters
    assert dataclasses.replace(found, size=built.size) == built


def test_what_auto_adapts_is_what_peft_adapts() -> None:
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL

    usual = adapter_sizes.USUAL_TARGETS
    assert {kind: list(names) for kind, names in usual.items()} == {kind: USUAL[kind] for kind in usual}


def test_a_merge_that_changes_the_model_is_refused() -> None:
    one, other = adapted("gpt2").eval(), adapted("gpt2").eval()
    trained = adapters.first_logits(one, [{"tokens": tokens()}])
    assert adapters.check_same_logits(trained, other)["max_logit_difference"] == 0
    with torch.no_grad():
        other.transformer.h[0].mlp.c_fc.weight.mul_(1.01)
    with pytest.raises(ExportError, match="merged logits differ"):
        adapters.check_same_logits(trained, other)


@pytest.mark.parametrize(
    ("options", "pretrained", "message"),
    [
        ({"load_bits": 4}, True, "rounded weights cannot train"),
        ({"adapter": "qlora", "load_bits": 8}, True, "qlora means 4"),
        ({"adapter": "dora", "load_bits": 8}, True, "use --load-bits 4"),
        ({"adapter": "qlora", "load_bits": 4, "lora_bias": "all"}, True, "4-bit layers round their biases"),
        ({"lora_r": 4}, True, "--lora-r: means nothing without an adapter"),
        ({"adapter": "lora"}, False, "a model from scratch has nothing to adapt"),
        ({"also_train": ("head",)}, True, "--also-train: means nothing"),
    ],
)
def test_contradicting_flags_are_refused(options: dict[str, Any], pretrained: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        adapters.check_options(CausalLMOptions(**options), pretrained)


@pytest.mark.parametrize("target", ["c_attn,nonexistent", "wte", "lm_head"])
def test_only_matrices_of_the_blocks_are_adapted(target: str) -> None:
    with pytest.raises(UserError, match="is no matrix of the blocks"):
        adapted("gpt2", lora_targets=target)


@pytest.mark.parametrize("tied", [True, False])
def test_tables_that_train_whole_open_in_plain_peft(tied: bool, tmp_path: Path) -> None:
    from peft import PeftModel

    base, final = tmp_path / "base", tmp_path / "final"
    config = AutoConfig.for_model("llama", vocab_size=70, tie_word_embeddings=tied, **SMALL)
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    final.mkdir()
    options = CausalLMOptions(adapter="lora", frozen_dtype="bf16", also_train=("embeddings", "head"))
    model: Any = adapters.load_base_model(str(base), config, None, as_stored=True)
    adapters.add_adapter(model, options, str(base), None)
    tables = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    assert all(table.requires_grad and table.dtype == torch.float32 for table in tables)
    with torch.no_grad():
        for table in tables:
            table.add_(0.1 * torch.randn(table.shape))
    names = lora.modules_named(model, options.also_train or ())
    lora.save_adapter(model, final, names)
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(final)).eval()
    ours = adapters.open_adapted_model(final).eval()
    new = torch.tensor([[1, 68, 69, 5]])
    with torch.no_grad():
        wanted = opened(input_ids=new).logits
        assert torch.equal(ours(input_ids=new).logits, wanted)
        assert torch.equal(opened.get_input_embeddings()(new[0]), tables[0][new[0]])
        merged = ours.merge_and_unload()
        assert float((merged(input_ids=new).logits - wanted).abs().max()) < 1e-5
    assert merged.config.tie_word_embeddings is tied


@pytest.mark.parametrize(("bits", "frozen"), [(8, "fp32"), (4, "fp32"), (4, "bf16")])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_evaluation_changes_nothing_of_rounded_weights(
    family: str, bits: int, frozen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # accelerate sets it, once and for all
    torch.manual_seed(0)
    config = config_of(family)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model: Any = adapters.load_base_model(str(tmp_path), config, None, bits)
    options = CausalLMOptions(adapter="lora", lora_dropout=0.0, frozen_dtype=frozen)
    adapters.add_adapter(model, options, "base", None)

    def gradients() -> list[torch.Tensor]:
        model.train().zero_grad()
        chunked_cross_entropy.next_token_loss(model, tokens()[:, :-1], tokens()[:, 1:]).backward()  # type: ignore[no-untyped-call]
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for name in vars(config):
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    before = gradients()
    with torch.no_grad():
        model.eval()(input_ids=tokens())
    after = gradients()
    assert any(g.any() for g in before)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_merged_model_has_its_bases_format_in_files_of_limited_size(
    stored: torch.dtype, tmp_path: Path, tiny_facts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "SHARD_SIZE", "50KB")
    (base := tmp_path / "base").mkdir()
    (final := tmp_path / "final").mkdir()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama")).to(stored)
    model.save_pretrained(base)
    adapters.add_adapter(model, CausalLMOptions(adapter="lora"), str(base), None)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    lora.save_adapter(model, final)
    opened = adapters.open_adapted_model(final, as_stored=True).eval()
    trained = adapters.first_logits(opened, [{"tokens": tokens()}])
    saving.save(opened.merge_and_unload(), tiny_facts, tmp_path, whole=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in merged.parameters()} == {stored}
    assert adapters.check_same_logits(trained, merged)["samples"] == 3
    with pytest.raises(ExportError, match="merged logits differ"):
        adapters.check_same_logits(trained, AutoModelForCausalLM.from_pretrained(base))
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
