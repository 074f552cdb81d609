"""GPT-2's GELU is one kernel wherever a model of transformers is built, and computes the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, activations

from isobatch.core.facts import Facts
from isobatch.core.recipe import Recipe
from isobatch.data import corpora, tokenizers
from isobatch.engine.model_setup.prepare_model import prepare_model
from isobatch.models.activations import fuse_gelu
from isobatch.models.causal_lm.generation import open_for_generation
from isobatch.models.encoder import encoders
from isobatch.models.recommendation.text_encoder import load_text_model
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
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
