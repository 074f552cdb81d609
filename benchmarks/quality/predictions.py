"""Predicted memory and time beside what was measured: `python -m benchmarks predictions`.

Every recipe trains in a process of its own. Memory is the process's peak (VmHWM) over all stages.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.package import own_command
from isobatch.core.plan import PlanOptions
from isobatch.engine.machine.detect import detect
from isobatch.engine.planning.estimate import Target, run_time
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder

LONG = "--max-length 128 --batch-size 8 --micro-batch 8 --data words.txt"
WIDE = "--head mlp --dim 256 --layers 512,256 --batch-size 4096"
RECIPES: dict[str, tuple[str, str]] = {
    "lm tiny": ("causal-lm", "--model tiny"),
    "lm small": ("causal-lm", "--model small --max-length 256"),
    "lm small bf16": ("causal-lm", "--model small --max-length 256 --precision bf16"),
    "lm 124M": ("causal-lm", f"--model gpt2-124m {LONG}"),
    "lm llama checkpointing": ("causal-lm", f"--model llama {LONG} --activation-checkpointing on"),
    "lm llama bf16": ("causal-lm", f"--model llama {LONG} --precision bf16"),
    "lm wide vocabulary": ("causal-lm", f"--model wide {LONG}"),
    "lm llama": ("causal-lm", f"--model llama {LONG}"),
    "lm llama 8-bit AdamW": ("causal-lm", f"--model llama {LONG} --optimizer adamw8bit"),
    "lm llama 8-bit lora": ("causal-lm", f"--model llama --adapter lora --load-bits 8 {LONG}"),
    "lm llama qlora": ("causal-lm", f"--model llama --adapter qlora {LONG}"),
    "lm llama lora": ("causal-lm", f"--model llama --adapter lora {LONG}"),
    "classifier tiny": ("classifier", "--model tiny"),
    "classifier 22M": ("classifier", "--model bert"),
    "classifier 22M bf16": ("classifier", "--model bert --precision bf16"),
    "pruning tiny": ("pruning", "--model tiny"),
    "qat tiny": ("qat", "--model tiny"),
    "qat 22M": ("qat", "--model bert"),
    "recommender ids": ("recommender", "--text off"),
    "recommender ids wide": ("recommender", f"--text off {WIDE}"),
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
    """A row per recipe, then the errors over all."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        make_models(home)
        names = [n for n in (QUICK if quick else RECIPES) if only in n]
        with contextlib.chdir(home):  # the models' folders are named as seen from there
            rows = [_row(n, home) for n in names]
    found = [row for row in rows if "failed" not in row]
    return [*rows, _errors(found)]


def _row(name: str, home: Path) -> dict[str, Any]:
    """A run of a recipe, predicted from this processor's rates alone."""
    print(name, file=sys.stderr)
    for file in (home / "cache").glob("ceilings-*"):
        file.unlink()  # measured anew, under the load that the run will have
    began, run = time.monotonic(), name.replace(" ", "-")
    done = train(name, run, home, "--steps", str(STEPS), "--eval-every", "5")
    if done.returncode:
        return {"recipe": name, "failed": done.stderr.strip().splitlines()[-1]}
    return {"recipe": name, **_figures(home / "runs" / run, time.monotonic() - began)}


def train(recipe: str, run: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A run of a recipe, under this name in the folder's runs, with the folder's own cache."""
    task, flags = RECIPES[recipe]
    return subprocess.run(
        own_command("auto", "--task", task, *flags.split(), *words, "--quiet", "--name", run, "--again"),
        cwd=home,
        env={**os.environ, "ISOBATCH_CACHE": f"{home}/cache", "ISOBATCH_STATE": f"{home}/state"},
        capture_output=True,
        text=True,
        check=False,
    )


def step_seconds(run: RunFolder, warm: int) -> float:
    """The median of the steps after the first `warm`."""
    steps = [row["step_seconds"] for row in atomic_files.rows_in(run.metrics) if "step_seconds" in row]
    return median(steps[warm:])


def _figures(folder: Path, wall: float) -> dict[str, Any]:
    """The figures of a run: MB, seconds of a step (the median after two), seconds from command to end."""
    run = RunFolder.open(folder)
    summary, plan = atomic_files.read_json(folder / "summary.json"), run.plan
    worst = max(plan.predicted_memory_by_stage.items(), key=lambda stage: stage[1])[0]
    target = Target("here", workload_of(run.recipe), run.recipe, run.facts, detect(), PlanOptions())
    whole = sum(run_time(target, plan, target.task.model_size(run.facts))[1].values())
    return {
        "predicted MB": round(plan.predicted_peak_memory_bytes / 1e6),
        "bound MB": round(plan.memory_bound_bytes / 1e6),
        "measured MB": round(summary["peak_memory_bytes"] / 1e6),
        "stage": worst,
        "predicted step": round(plan.predicted_step_seconds, 4),
        "measured step": round(step_seconds(run, 2), 4),
        "predicted run": round(whole, 1),
        "measured run": round(wall, 1),
    }


def _errors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and worst error of memory and of time over all recipes; recipes above their bound."""
    names = {"memory": "MB", "step": "step", "run": "run"}
    found = {
        name: [abs(row[f"predicted {what}"] / row[f"measured {what}"] - 1) for row in rows]
        for name, what in names.items()
    }
    above = [row["recipe"] for row in rows if row["measured MB"] > row["bound MB"]]
    return {
        "recipes": len(rows),
        **{f"{name} median": round(median(each), 3) for name, each in found.items()},
        **{f"{name} worst": round(max(each), 3) for name, each in found.items()},
        "above their bound": ", ".join(above) or "none",
    }


def make_models(home: Path) -> None:
    """Folders of models with random weights, small enough for a CPU, of the shapes that people train."""
    import torch
    import transformers as hf

    from isobatch.data import corpora, tokenizers

    tokenizer = tokenizers.train_byte_level_bpe(corpora.demo_corpus().splits["train"](), 2000)
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=tokenizers.END_OF_TEXT, pad_token=tokenizers.END_OF_TEXT
    )
    texts = corpora.demo_corpus().splits["train"]()
    (home / "words.txt").write_text("\n".join(texts)[:TEXT_CHARACTERS])
    torch.manual_seed(0)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    llama = hf.LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=2, **ends,
    )  # fmt: skip
    bert = hf.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    models = {
        "wide": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=4, n_embd=256, n_head=4, **ends)),
        "llama": lambda: hf.LlamaForCausalLM(llama),
        "bert": lambda: hf.BertModel(bert),
    }
    for name, make in models.items():
        make().save_pretrained(home / name)
        fast.save_pretrained(home / name)
