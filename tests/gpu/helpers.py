"""What the GPU tests share: the device, small models of three shapes, data, runs and their resumption.

ISOBATCH_TEST_DEVICE=cpu rehearses, without a GPU, those tests whose question a CPU can be asked too.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from isobatch.data import corpora, tokenizers
from isobatch.tests.integration.helpers import RAGGED, launch

if TYPE_CHECKING:
    from pathlib import Path

DEVICE = os.environ.get("ISOBATCH_TEST_DEVICE", "cuda")
HAS_GPU = torch.cuda.is_available()
gpu_only = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
on_device = pytest.mark.skipif(DEVICE == "cuda" and not HAS_GPU, reason="needs a GPU")
LLAMA_LIKE = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 256}
LLAMA_LIKE |= {"max_position_embeddings": 1024}
ENDS = {"vocab_size": 600, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    "gpt2": GPT2Config(n_layer=2, n_embd=128, n_head=2, n_positions=1024, attn_pdrop=0.0, **ENDS),
    "qwen2": Qwen2Config(**LLAMA_LIKE, num_key_value_heads=2, **ENDS),
    "llama": LlamaConfig(**LLAMA_LIKE, num_key_value_heads=4, **ENDS),
}
"""Shapes: learnt positions; rotary positions with fewer heads of keys and values; rotary positions."""


def conversations(folder: Path, model_type: str = "gpt2") -> Path:
    """Questions and answers of very different lengths, and a small model of this type in `base`."""
    draw = np.random.default_rng(0)
    words = ["sun", "rain", "wind", "snow", "fog", "hail"]
    asked = [
        {"instruction": f"Say {n} words.", "output": " ".join(draw.choice(words, n).tolist())}
        for n in draw.integers(1, 60, 400).tolist()
    ]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, asked)))
    tokenizer = tokenizers.train_byte_level_bpe(corpora.demo_corpus().splits["train"](), 600)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokenizers.END_OF_TEXT).save_pretrained(
        folder / "base"
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[model_type]).save_pretrained(folder / "base")
    return folder


def asked(folder: Path, name: str, *words: str, steps: int = 24, **environment: str) -> Path:
    """A finished run on `conversations`."""
    flags = ["--task", "causal-lm", "--data", "asked.jsonl", "--model", "base", "--max-length", "768"]
    flags += ["--batch-size", "32", "--steps", str(steps), "--compile", "off", "--name", name]
    return finished(folder, name, *flags, *words, **environment)


def ragged(folder: Path, name: str, *words: str, steps: int = 60, **environment: str) -> Path:
    """A finished run of the small GPT-2 with dropout on sequences of different lengths."""
    return finished(
        folder, name, "--task", RAGGED, "--steps", str(steps), "--name", name, *words, **environment
    )


def finished(folder: Path, name: str, *words: str, **environment: str) -> Path:
    """The folder of a run by `auto` on the device under test."""
    device = [] if "--device" in words else ["--device", DEVICE]
    common = ["--processes", "1", "--quiet", "--again"]
    done = launch("auto", *words, *device, *common, cwd=folder, timeout=400, **environment)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name


def decisions(run: Path) -> list[dict[str, Any]]:
    """The rows of decisions.jsonl."""
    file = run / "decisions.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
