"""Predicted memory and time beside what was measured: `python -m benchmarks predictions`.

Every recipe trains in a process of its own. Memory is the process's peak (VmHWM) in each stage; a step's time
is the median of the steps after the first two.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.package import own_command

LONG = "--max-length 128 --batch-size 8 --micro-batch 8 --data words.txt"
WIDE = "--head mlp --dim 256 --layers 512,256 --batch-size 4096"
RECIPES: dict[str, tuple[str, str]] = {
    "lm tiny": ("causal-lm", "--model tiny"),
    "lm small": ("causal-lm", "--model small --max-length 256"),
    "lm small bf16": ("causal-lm", "--model small --max-length 256 --precision bf16"),
    "lm 124M": ("causal-lm", f"--model gpt2-124m {LONG}"),
    "lm 124M checkpointing": ("causal-lm", f"--model gpt2-124m {LONG} --activation-checkpointing on"),
    "lm 124M bf16": ("causal-lm", f"--model gpt2-124m {LONG} --precision bf16"),
    "lm 124M 8-bit AdamW": ("causal-lm", f"--model gpt2-124m {LONG} --optimizer adamw8bit"),
    "lm wide vocabulary": ("causal-lm", f"--model wide {LONG}"),
    "lm llama": ("causal-lm", f"--model llama {LONG}"),
    "lm llama adafactor": ("causal-lm", f"--model llama {LONG} --optimizer adafactor"),
    "lm gpt2 lora": ("causal-lm", f"--model gpt2-shape --adapter lora {LONG}"),
    "lm gpt2 lora bf16": ("causal-lm", f"--model gpt2-shape --adapter lora --precision bf16 {LONG}"),
    "lm gpt2 8-bit lora": ("causal-lm", f"--model gpt2-shape --adapter lora --load-bits 8 {LONG}"),
    "lm gpt2 qlora": ("causal-lm", f"--model gpt2-shape --adapter qlora {LONG}"),
    "lm llama lora": ("causal-lm", f"--model llama --adapter lora {LONG}"),
    "classifier tiny": ("classifier", "--model tiny"),
    "classifier 22M": ("classifier", "--model bert"),
    "classifier 22M bf16": ("classifier", "--model bert --precision bf16"),
    "classifier 66M": ("classifier", "--model distilbert"),
    "pruning tiny": ("pruning", "--model tiny"),
    "pruning 22M": ("pruning", "--model bert"),
    "qat tiny": ("qat", "--model tiny"),
    "qat 22M": ("qat", "--model bert"),
    "recommender ids": ("recommender", "--text off"),
    "recommender ids wide": (
        "recommender",
        "--text off --head mlp --dim 256 --layers 512,256 --batch-size 4096",
    ),
    "recommender frozen": ("recommender", "--text frozen"),
    "recommender lora": ("recommender", "--text lora"),
    "recommender full": ("recommender", "--text full --model small"),
    "vae gru": ("sequence-vae", ""),
    "vae gru wide": ("sequence-vae", "--hidden 512 --latent 64 --batch-size 64"),
    "vae transformer": ("sequence-vae", "--backbone transformer --hidden 256 --layers 2"),
    "lm small two processes": ("causal-lm", "--model small --max-length 256 --processes 2 --strategy ddp"),
}
QUICK = ("lm tiny", "classifier tiny")
STEPS = 8
TEXT_CHARACTERS = 50_000
"""Of the data of large models: their evaluation is a matter of minutes else."""


def measure(quick: bool, only: str = "") -> list[dict[str, Any]]:
    """A row per recipe: predicted and measured bytes of each stage, and seconds of a step."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        make_models(home)
        names = [n for n in (QUICK if quick else RECIPES) if only in n]
        return [_row(n, home) for n in names]


def _row(name: str, home: Path) -> dict[str, Any]:
    print(name, file=sys.stderr)
    task, words = RECIPES[name]
    folders = {"ISOBATCH_CACHE": f"{home}/cache", "ISOBATCH_STATE": f"{home}/state"}
    run = home / "runs" / name.replace(" ", "-")
    command = ["auto", "--task", task, *words.split(), "--steps", str(STEPS), "--eval-every", "5"]
    done = subprocess.run(
        own_command(*command, "--name", run.name, "--again", "--quiet"),
        cwd=home, env={**os.environ, **folders}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"recipe": name, "failed": done.stderr.strip().splitlines()[-1]}
    summary, plan = (atomic_files.read_json(run / f"{n}.json") for n in ("summary", "plan"))
    steps = [row for row in atomic_files.rows_in(run / "metrics.jsonl") if "step_seconds" in row]
    return {
        "recipe": name,
        "predicted": plan["predicted_peak_memory_bytes"],
        "measured": summary["peak_memory_bytes"],
        "by_stage": summary["peak_memory_by_stage"],
        "predicted_s": plan["predicted_step_seconds"],
        "measured_s": median(row["step_seconds"] for row in steps if row["step"] > 2),
        "parameters": summary["parameters"],
        "plan": {k: plan[k] for k in ("micro_batch_tokens", "micro_batch_samples", "precision", "strategy")},
        "tokens": steps[-1]["tokens"],
    }


def make_models(home: Path) -> None:
    """Folders of models with random weights, small enough for a CPU, of the shapes that people train."""
    import torch
    from transformers import (
        BertConfig,
        BertModel,
        DistilBertConfig,
        DistilBertModel,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    from isobatch.data import corpora, tokenizers

    tokenizer = tokenizers.train_byte_level_bpe(corpora.demo_corpus().splits["train"](), 2000)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=tokenizers.END_OF_TEXT, pad_token=tokenizers.END_OF_TEXT
    )
    texts = corpora.demo_corpus().splits["train"]()
    (home / "words.txt").write_text("\n".join(texts)[:TEXT_CHARACTERS])
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    llama = LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, **ends,
    )  # fmt: skip
    bert = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    models = {
        "gpt2-shape": lambda: GPT2LMHeadModel(GPT2Config(**ends)),
        "wide": lambda: GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=256, n_head=4, **ends)),
        "llama": lambda: LlamaForCausalLM(llama),
        "bert": lambda: BertModel(bert),
        "distilbert": lambda: DistilBertModel(DistilBertConfig()),
    }
    for name, make in models.items():
        make().save_pretrained(home / name)
        fast.save_pretrained(home / name)
