"""Tiny models of several families, each with a tokenizer and as people publish it.

Built in a process that has the libraries: `from isobatch.tests.tiny_models import build; build("folder")`.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

WORDS = (
    "the a cat dog bird sat ran flew on under over mat tree roof why does it what is blue red green sky "
    "water fire answer question good bad film story user assistant system"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3's: what an earlier answer thought is left out."""
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
TYPED = ["input_ids", "token_type_ids", "attention_mask"]
"""What BERT's own tokenizer makes; the others leave out the types."""


def build(folder: str) -> None:
    """bert, distilbert, modernbert, gpt2 (without a pad token), qwen2 (ChatML), qwen3 (as it thinks)."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    pieces = _word_pieces()
    encoder = {"vocab_size": len(pieces), **SHAPE, "num_attention_heads": 2, "max_position_embeddings": 64}
    ends = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    small = {"vocab_size": len(pieces), "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2}
    made: dict[str, tuple[Any, Any]] = {
        "bert": (hf.BertForMaskedLM(hf.BertConfig(**encoder)), _word_pieces(model_input_names=TYPED)),
        "distilbert": (
            hf.DistilBertForMaskedLM(hf.DistilBertConfig(max_position_embeddings=64, **small)),
            pieces,
        ),
        "modernbert": (hf.ModernBertForMaskedLM(hf.ModernBertConfig(**encoder, **ends)), pieces),
        "gpt2": _gpt2(),
        "qwen2": _qwen(hf.Qwen2Config, hf.Qwen2ForCausalLM, CHATML),
        "qwen3": _qwen(hf.Qwen3Config, hf.Qwen3ForCausalLM, THINKS, head_dim=8),
    }
    for name, (model, tokenizer) in made.items():
        model.save_pretrained(Path(folder) / name)
        tokenizer.save_pretrained(Path(folder) / name)


def save_gpt2(folder: Path, vocabulary: int, seed: int = 0, **sizes: int) -> Any:
    """A GPT-2 and a tokenizer of bytes that the demo's texts trained, in one folder; returns the model."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from isobatch.data import corpora, tokenizers

    trained = tokenizers.train_byte_level_bpe(corpora.demo_corpus().splits["train"](), vocabulary)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=tokenizers.END_OF_TEXT)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=trained.get_vocab_size(), **{**shape, **sizes}))
    model.save_pretrained(folder)
    return model


def write_stories(file: Path) -> None:
    """Some of the demo's texts: an evaluation of all takes longer than tiny models train."""
    from isobatch.data import corpora

    file.write_text("\n".join(itertools.islice(corpora.demo_corpus().splits["train"](), 60)), "utf-8")


def _corpus() -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS.split(), k=12)) for _ in range(300)]


def _word_pieces(**more: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(_corpus(), trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = dict(
        zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **names, **more)


def _bytes(special: list[str], **names: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def _gpt2() -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    end = "<|endoftext|>"
    tokenizer = _bytes([end], eos_token=end, bos_token=end, unk_token=end)
    sizes = {"vocab_size": len(tokenizer), "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)), tokenizer


def _qwen(config: Any, model: Any, template: str, **more: int) -> tuple[Any, Any]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = _bytes(special, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    sizes = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ends = {"bos_token_id": 0, "eos_token_id": 2}
    made = config(vocab_size=len(tokenizer) + 40, tie_word_embeddings=True, **sizes, **ends, **more)
    return model(made), tokenizer
