"""Tests of models/causal_lm/resize_embeddings.py: tokens keep their vectors under another tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from isobatch.models.causal_lm import resize_embeddings

if TYPE_CHECKING:
    from pathlib import Path

WORDS = ["a", "b", "c", "d", "e", "f"]


def tokenizer(words: list[str]) -> Tokenizer:
    return Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="a"))


@pytest.fixture(params=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> Any:
    """One model with a head of its own, one whose head is tied to the embeddings."""
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2}
    if request.param == "llama":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        sizes["tie_word_embeddings"] = False
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, vocab_size=6, **sizes))


def test_vectors_go_with_their_tokens(model: Any, tmp_path: Path) -> None:
    tokenizer(WORDS).save(str(tmp_path / resize_embeddings.TOKENIZER_FILE))
    other = ["x", "f", "b", "y", "a", "z", "c", "w"]
    rows = resize_embeddings.match_token_ids(str(tmp_path), tokenizer(other))
    assert rows == {1: 5, 2: 1, 4: 0, 6: 2}
    tables = (model.get_input_embeddings, model.get_output_embeddings)
    before = [table().weight.detach().clone() for table in tables]
    resize_embeddings.resize_model_embeddings(model, len(other), rows)
    for table, old in zip(tables, before, strict=True):
        new = table().weight
        assert new.shape == (8, 16)
        for number, token in enumerate(other):
            expected = old[WORDS.index(token)] if token in WORDS else old.mean(0)
            assert torch.allclose(new[number], expected), token
    ids = torch.tensor([[1, 4, 7]])
    assert model(input_ids=ids).logits.shape == (1, 3, 8)


def test_ids_keep_their_vectors_without_a_tokenizer_file(model: Any, tmp_path: Path) -> None:
    assert resize_embeddings.match_token_ids(str(tmp_path), tokenizer(WORDS)) is None
    old = model.get_input_embeddings().weight.detach().clone()
    resize_embeddings.resize_model_embeddings(model, 4, None)
    assert torch.equal(model.get_input_embeddings().weight, old[:4])
