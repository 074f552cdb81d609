"""Tests of models/causal_lm/known_models.py: shapes against published counts, and what a name may be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.models.causal_lm import known_models, model_sizes

if TYPE_CHECKING:
    from pathlib import Path

PUBLISHED = {
    # Billions of parameters of the model's page or paper.
    "openai-community/gpt2": 0.124,
    "openai-community/gpt2-xl": 1.558,
    "meta-llama/Llama-2-7b-hf": 6.74,
    "meta-llama/Llama-3.1-405B": 406,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1.10,
    "mistralai/Mistral-7B-v0.3": 7.25,
    "Qwen/Qwen2.5-72B": 72.7,
    "Qwen/Qwen3-32B": 32.8,
}
BUILT = {"google/gemma-2-9b": 9.24, "EleutherAI/pythia-12b": 11.85}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_by_formula(name: str) -> None:
    size = model_sizes.size_from_config(known_models.KNOWN_MODELS[name])
    assert size is not None
    assert size.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", BUILT)
def test_counts_of_models_built_without_storage(name: str) -> None:
    size = model_sizes.shape_by_building(known_models.transformers_config(name, None, False)).size
    assert size.parameters / 1e9 == pytest.approx(BUILT[name], rel=0.01)
    assert size.gated == ("gemma" in name)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "Qwen/Qwen2-0.5B", "HuggingFaceTB/SmolLM2-135M"])
def test_the_formula_and_the_built_model_agree(name: str) -> None:
    by_formula = model_sizes.size_from_config(known_models.KNOWN_MODELS[name])
    assert (
        by_formula == model_sizes.shape_by_building(known_models.transformers_config(name, None, False)).size
    )


@pytest.mark.parametrize("name", known_models.KNOWN_MODELS)
def test_every_row_is_found_by_its_short_name_and_knows_its_context(name: str) -> None:
    short = name.partition("/")[2].upper()
    assert known_models.find(short) == known_models.find(name) == name
    assert model_sizes.context_length(known_models.load_config(name, None))


def test_a_folder_needs_its_config_alone(tmp_path: Path) -> None:
    config = {**known_models.KNOWN_MODELS["Qwen/Qwen2.5-7B"], "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert known_models.load_config(str(tmp_path), None)["vocab_size"] == 1000
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        known_models.load_config(str(empty), None)


@pytest.mark.parametrize("name", known_models.KNOWN_MODELS)
@pytest.mark.parametrize("form", ["{}-Instruct", "someone/{}-chat", "unsloth/{}-Instruct-bnb-4bit", "{}-it"])
def test_copies_and_further_training_have_the_shape_of_their_model(name: str, form: str) -> None:
    assert known_models.find(form.format(name.partition("/")[2])) == name


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf"),
        ("llama3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B"),
    ],
)
def test_names_as_they_are_typed(name: str, known: str) -> None:
    assert known_models.find(name) == known


@pytest.mark.parametrize(
    ("name", "near"), [("mistral-7b", "mistralai/Mistral-7B-v0.3"), ("Qwen/Qwen2.5-8B", "Qwen/Qwen2.5-7B")]
)
def test_an_unknown_name_is_answered_with_near_ones(
    name: str, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_cache, "is_reachable", lambda: False)
    with pytest.raises(UserError, match=f"give .*{near}") as caught:
        known_models.load_config(name, None)
    assert "\n" not in str(caught.value)
