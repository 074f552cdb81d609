"""Deferred materialization: models that are read block by block, and all of a model but its values."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from isobatch.engine.model_setup.deferred_materialization import build_hollow, build_late, outline, read_late
from isobatch.engine.strategies import deepspeed_engine
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.models.causal_lm.adapters import load_base_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES: dict[str, Any] = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN: dict[str, Any] = {**SIZES, "hidden_size": 8, "intermediate_size": 16, "num_key_value_heads": 1}


def config_of(kind: str) -> Any:
    from transformers import GPT2Config, Qwen2Config

    if kind == "gpt2":
        return GPT2Config(vocab_size=50, n_embd=8, n_layer=2, n_head=2, n_positions=16)
    return Qwen2Config(**QWEN, tie_word_embeddings=kind == "tied")


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Callable[[], Any]:
    """Save a model; a function that opens it as a causal-lm does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with preserve_process_state():  # it imports DeepSpeed, which sets variables
        AutoModelForCausalLM.from_config(config_of(kind)).to(dtype).save_pretrained(folder, **how)
    return lambda: load_base_model(str(folder), AutoConfig.from_pretrained(folder), None)


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    buffers = {name: b for name, b in model.named_buffers() if b is not None}
    return {**dict(model.named_parameters(remove_duplicate=False)), **buffers}


def require_same(found: nn.Module, wanted: nn.Module) -> None:
    ours, theirs = state(found), state(wanted)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name
    assert found.training == wanted.training


@pytest.mark.parametrize(
    ("kind", "dtype", "how"),
    [
        ("gpt2", torch.float32, {}),
        ("tied", torch.bfloat16, {}),
        ("untied", torch.float32, {"max_shard_size": "2KB"}),
    ],
)
def test_the_values_are_those_of_from_pretrained(
    kind: str, dtype: torch.dtype, how: dict[str, Any], tmp_path: Path
) -> None:
    build = save(kind, tmp_path, dtype, **how)
    torch.manual_seed(1)
    late = build_late(build)
    noise = torch.get_rng_state()
    assert late is not None
    assert all(p.untyped_storage().nbytes() == 4 for p in late.parameters()), "nothing is read yet"
    torch.manual_seed(1)
    whole = build()
    assert torch.equal(noise, torch.get_rng_state())
    read_late(late.parameters())
    require_same(late, whole)


def test_a_base_without_a_head_is_found(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build = save("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t.clone() for name, t in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    late = build_late(build)
    assert late is not None
    read_late(late.parameters())
    require_same(late, build())


def _scaled(model: Any) -> None:
    model.get_input_embeddings().weight.data.mul_(2)


def _new_head(model: Any) -> None:
    nn.init.normal_(model.lm_head.weight)


def _looked_at(model: Any) -> None:
    model.largest = float(model.lm_head.weight.abs().max())


def _resized(model: Any) -> None:
    model.resize_token_embeddings(60)


def _in_half(model: Any) -> None:
    model.half()


@pytest.mark.parametrize("change", [_scaled, _new_head, _looked_at, _resized, _in_half])
def test_what_looks_at_values_or_changes_them_is_built_whole(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    """An operation on a parameter without values would do nothing, and nobody would see it."""
    build = save("untied", tmp_path)

    def changed() -> Any:
        model = build()
        with torch.no_grad():
            change(model)
        return model

    assert build_late(changed) is None


def test_what_is_not_in_the_files_is_read_as_it_was(tmp_path: Path) -> None:
    """A new head, drawn by transformers."""
    from transformers import AutoModelForSequenceClassification

    save("gpt2", tmp_path)
    config = config_of("gpt2")
    config.pad_token_id = 0
    load = partial(AutoModelForSequenceClassification.from_pretrained, tmp_path, config=config)
    torch.manual_seed(3)
    found = build_late(partial(load, dtype=torch.float32))
    torch.manual_seed(3)
    wanted = load(dtype=torch.float32)
    assert found is not None
    read_late(found.parameters())
    require_same(found, wanted)


def test_rank_0_holds_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with preserve_process_state():
        zero = pytest.importorskip("deepspeed").zero
    late = build_late(save("untied", tmp_path))
    assert late is not None
    sizes = {id(p): p.numel() * 4 for p in late.parameters()}
    most, block = sum(sizes.values()), sum(sizes[id(p)] for p in late.model.layers[0].parameters())
    held: list[int] = []

    def shard(module: Any, **_: Any) -> None:
        held.append(sum(p.untyped_storage().nbytes() for p in late.parameters()))
        for p in module.parameters():
            p.data = torch.zeros(0)
            p.ds_id = 0  # by which DeepSpeed knows its own

    monkeypatch.setattr(zero, "Init", shard)
    world: Any = SimpleNamespace(
        is_main=True, broadcast_onto_device=lambda _: None, waiting_for=lambda _: preserve_process_state()
    )
    deepspeed_engine._shard(late, {}, world)  # noqa: SLF001  what an engine of stage 3 begins with
    assert len(held) == 3
    assert max(held[:2]) <= block + 4 * len(sizes)
    assert held[2] == most - 2 * block, "what is in no block"


class Net(nn.Module):
    """A tied matrix, a frozen one, and buffers that are saved and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(500, 200), nn.Linear(200, 500, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(200, 200).requires_grad_(False)
        self.register_buffer("saved", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def test_it_has_the_outline_and_next_to_no_memory() -> None:
    hollow, whole = build_hollow(Net), Net()
    assert hollow is not None
    assert outline(hollow) == outline(whole)
    assert [name for name, *_ in outline(hollow)][:2] == ["embedding.weight", "head.weight"]
    assert hollow.head.weight is hollow.embedding.weight
    assert hollow.state_dict().keys() == whole.state_dict().keys()
    assert all(p.device.type == "cpu" and p.untyped_storage().nbytes() == 4 for p in hollow.parameters())
    torch.optim.AdamW(hollow.parameters(), fused=True)  # refuses the meta device


def test_a_model_that_needs_values_is_not_built_hollow() -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))
            self.largest = self.weight.abs().max().item()

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(3)  # no buffer, so no rank could send it

    assert build_hollow(Measured) is None
    assert build_hollow(Keeps) is None


@pytest.mark.parametrize("adapter", [False, True])
def test_a_pretrained_model_is_made_of_its_config_alone(adapter: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    with preserve_process_state():  # it imports DeepSpeed, which sets variables
        Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(tmp_path)

    def build() -> Any:
        config = Qwen2Config.from_pretrained(tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
        if not adapter:
            return model
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))

    before = PreTrainedModel.__dict__["from_pretrained"]
    hollow = build_hollow(build)
    assert PreTrainedModel.__dict__["from_pretrained"] is before
    assert hollow is not None
    assert outline(hollow) == outline(build())
    assert all(p.untyped_storage().nbytes() == 4 for p in hollow.parameters())


def test_a_hollow_parameter_in_half_precision_stays_hollow_in_fp32() -> None:
    from isobatch.engine.model_setup import prepare_model

    model = nn.Linear(64, 64, bias=False)
    model.weight = nn.Parameter(torch.zeros((), dtype=torch.bfloat16).expand(64, 64), requires_grad=False)
    prepare_model._hold_in_fp32(model)  # noqa: SLF001
    assert model.weight.dtype == torch.float32
    assert model.weight.untyped_storage().nbytes() == 4
