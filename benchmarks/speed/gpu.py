"""On a GPU: model FLOP utilisation, QLoRA of a 7B in 12 GB, packing, and measured against predicted memory.

python -m benchmarks gpu

Utilisation is tokens/s x FLOPs a token / the card's dense bf16 peak: a token takes 6 FLOPs for each parameter
that multiplies it (attention, MLP, head) and 12 x layers x width x length for attention (Chowdhery et al.
2022, "PaLM", appendix B); what activation checkpointing recomputes does not count. `--quick` runs on any
machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from isobatch.benchmarks.speed.engine import WORKLOAD
from isobatch.core.package import ROOT, own_command
from isobatch.engine.planning.detect import detect
from isobatch.engine.planning.memory_model import flops_per_token
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.models.causal_lm import model_sizes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from isobatch.benchmarks.report import Row

WARM = 10
"""First steps that are not counted: kernels are compiled and chosen in them."""


def measure(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        return [scratch(folder, quick), *packing(folder, quick), seven_billion(folder, quick)]


def scratch(folder: Path, quick: bool) -> Row:
    """GPT-2 124M from random weights, blocks of 1,024 tokens, bf16, compiled."""
    words = ["--model", "gpt2-124m", "--batch-size", "64", "--max-length", "1024", "--steps", "40"]
    words += ["--precision", "bf16", "--compile", "on", "--dropout", "0"]
    if quick:
        words = ["--model", "tiny", "--batch-size", "8", "--max-length", "64", "--steps", "14"]
    run = trained(folder, "BlockLM", "scratch", words, {"BENCHMARK_VOCABULARY": "512" if quick else "50257"})
    length = 64 if quick else 1024
    config = model_sizes.PRESETS["tiny" if quick else "gpt2-124m"].config(512 if quick else 50257, length)
    shape, hardware = model_sizes.size_from_config(config), detect()
    assert shape is not None
    speed = tokens_per_second(run)
    peak = hardware.gpu.peak_flops["bf16"] if hardware.gpus else None
    used = round(speed * flops_per_token(shape, length) / peak, 3) if peak else "-"
    return {"what": "GPT-2 124M from scratch", "tokens/s": round(speed), "MFU": used, **memory(run)}


def packing(folder: Path, quick: bool) -> list[Row]:
    """Samples of instructions' lengths, in micro-batches cut by length and packed end to end."""
    rows: list[Row] = []
    for batch in (8, 32, 128):
        speeds = {}
        for pack in ("off", "on"):
            words = [
                "--model",
                "tiny" if quick else "gpt2-124m",
                "--batch-size",
                str(batch),
                "--dropout",
                "0",
            ]
            words += ["--max-length", "1536" if quick else "1024", "--steps", "14" if quick else "60"]
            words += ["--compile", "off", "--pack", pack, *([] if quick else ["--precision", "bf16"])]
            more = {"BENCHMARK_VOCABULARY": "512" if quick else "50257", "BENCHMARK_ROWS": str(batch * 70)}
            run = trained(folder, "InstructionsLM", f"{batch}-{pack}", words, more)
            speeds[pack] = tokens_per_second(run)
            padding = read(run, "padding")
            faster = round(speeds[pack] / speeds["off"], 2)
            row = {"batch": batch, "pack": pack, "tokens/s": round(speeds[pack]), "padding": padding}
            rows.append({**row, "times as fast": faster})
    return rows


def seven_billion(folder: Path, quick: bool) -> Row:
    """QLoRA of Llama 7B's shape, random weights, under a limit of 12 GB."""
    base = make_llama(folder / "base", quick)
    words = ["--model", str(base), "--adapter", "qlora", "--batch-size", "16", "--steps", "16"]
    words += ["--max-length", "64"] if quick else ["--max-length", "512", "--memory-limit", "12GB"]
    run = trained(folder, "BlockLM", "qlora", words, {"BENCHMARK_VOCABULARY": "512" if quick else "32000"})
    return {"what": "QLoRA of 7B", "tokens/s": round(tokens_per_second(run)), **memory(run)}


def make_llama(folder: Path, quick: bool) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes: dict[str, Any] = {"max_position_embeddings": 2048}
    if quick:
        sizes |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"intermediate_size": 128, "vocab_size": 512}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")  # never opened: the samples are tokens
    return folder


def trained(folder: Path, task: str, name: str, words: list[str], more: Mapping[str, str]) -> RunFolder:
    flags = ["--task", f"{WORKLOAD}:{task}", "--name", name, "--out", str(folder), "--quiet", *words]
    flags += ["--processes", "1", "--schedule", "constant"]
    ended = subprocess.run(
        own_command("auto", *flags),
        cwd=ROOT,
        env={**os.environ, "ISOBATCH_CACHE": str(folder / "cache"), **more},
        capture_output=True,
        text=True,
    )
    if ended.returncode:
        raise RuntimeError(f"{name} failed:\n{ended.stderr[-3000:]}")
    return RunFolder.open(str(folder / name))


def steps(run: RunFolder) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [row for row in rows if "step_seconds" in row][WARM:]


def tokens_per_second(run: RunFolder) -> float:
    """Speed of the median step."""
    counted = steps(run)
    tokens = (counted[-1]["tokens"] - counted[0]["tokens"]) / (len(counted) - 1)
    return tokens / median(row["step_seconds"] for row in counted)


def read(run: RunFolder, name: str) -> float:
    return round(median(row[name] for row in steps(run)), 3)


def memory(run: RunFolder) -> Row:
    summary = run.summary() or {}
    measured, predicted = summary["peak_memory_bytes"], summary["predicted_peak_memory_bytes"]
    return {"peak GB": round(measured / 1e9, 2), "predicted GB": round(predicted / 1e9, 2)}
