"""Tests that a saved model stops where `chat` does, in plain transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from isobatch.data import tokenizers
from isobatch.data.text import chat_templates
from isobatch.models import saving
from isobatch.models.causal_lm import generation
from isobatch.tests.unit.test_row_fields import SMALL, make_tokenizer

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "0a1b2c"}]


def save_trained(folder: Path, source: str) -> tuple[Any, str]:
    """(the template, the chat as it was written in training) of a model that is saved in `folder`."""
    before = make_tokenizer(folder / "before", source, in_file=False)
    opened = tokenizers.open_tokenizer(before)
    special = tokenizers.special_token_ids(opened, before)
    template = chat_templates.choose_template("auto", "plain", opened, special, before)
    opened.save(str(folder / "tokenizer.json"))
    facts: Any = SimpleNamespace(
        folder=str(folder),
        extra={"tokenizer": "tokenizer.json", "template": dataclasses.asdict(template), **special},
    )
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=tokenizers.vocabulary_size(opened), bos_token_id=None, eos_token_id=special["eos"], **sizes
    )
    model = AutoModelForCausalLM.from_config(config)
    saving.save(model, facts, folder)
    generation.save_config(model, facts, folder)
    return template, template.render(CHAT)


@pytest.mark.parametrize("name", SMALL)
def test_plain_transformers_stops_where_chat_does(name: str, tmp_path: Path) -> None:
    template, written = save_trained(tmp_path, SMALL[name])
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == template.end_id
    after = [
        text.partition("0a1b2c")[2] for text in (tokenizer.apply_chat_template(CHAT, tokenize=False), written)
    ]
    assert after[0] == after[1]
    letter = 65
    for likeliest, count in ((template.end_id, 1), (letter, 3)):
        logits = torch.nn.functional.one_hot(torch.tensor([[likeliest]]), model.config.vocab_size).float()
        hook = model.lm_head.register_forward_hook(lambda *_, found=logits: found)
        asked = torch.tensor([[letter, letter]])
        found = model.generate(asked, attention_mask=asked, do_sample=False, max_new_tokens=3)
        assert found.shape[1] == 2 + count
        hook.remove()


def test_texts_are_encoded_as_transformers_does(tmp_path: Path) -> None:
    """AutoTokenizer opens some types of models as a class of their own, whatever tokenizer.json says."""
    folder = make_tokenizer(tmp_path / "qwen2", None, in_file=False)
    text = "Total cost: \u006f\u0308 $109"
    for kind, same in (("llama", True), ("qwen2", False)):
        AutoConfig.for_model(kind).save_pretrained(folder)
        source = tokenizers.locate(None, str(folder), None)
        ids = tokenizers.open_as_transformers(folder, source.model).encode(text).ids
        assert ids == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
        assert (ids == tokenizers.open_tokenizer(folder).encode(text).ids) is same
        assert source.identity()["model_type"] == kind


def test_files_that_autotokenizer_does_not_know_are_read_all_the_same(tmp_path: Path) -> None:
    """Beside a GPT-2's config.json it opens a vocabulary of nothing, and every text would be empty."""
    trained = tokenizers.train_byte_level_bpe(["a few words to learn"] * 20, 300)
    vocabulary, merges = trained.model.save(str(tmp_path))
    Path(vocabulary).rename(tmp_path / "encoder.json")
    Path(merges).rename(tmp_path / "vocab.bpe")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    ids = tokenizers.open_as_transformers(tmp_path, tmp_path).encode("a few words").ids
    assert ids == tokenizers.open_tokenizer(tmp_path).encode("a few words").ids != []
