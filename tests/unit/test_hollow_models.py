"""Deferred materialization: all of a model but its values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from isobatch.engine.model_setup.prepare_model import build_hollow, outline
from isobatch.launch.local.process_state import preserve_process_state

if TYPE_CHECKING:
    from pathlib import Path


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
