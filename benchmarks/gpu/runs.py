"""Runs of the command line for the GPU benchmarks, their figures, and the models that they share."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from isobatch.benchmarks.gpu.runner import FOLDER, RUNS
from isobatch.core.package import ROOT, own_command
from isobatch.engine.machine.gpu_table import find_gpu_model
from isobatch.engine.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.benchmarks.report import Row

TOKENS = f"{ROOT / 'benchmarks' / 'speed' / 'random_tokens.py'}:BlockLM"
"""The task: a causal language model on blocks of random tokens."""
WARM = 10
"""First steps that are not counted: kernels are compiled and chosen in them."""


def shared_folder() -> Path:
    """The folder of one `make gpu`."""
    return Path(os.environ[FOLDER])


def runs_folder() -> Path:
    """The folder of this trial's runs."""
    return Path(os.environ[RUNS])


def launch(*words: str) -> str:
    """What `isobatch WORDS` printed. Raises RuntimeError with the end of its stderr where it failed."""
    ended = subprocess.run(
        own_command(*words), cwd=shared_folder(), capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{words[0]} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return ended.stdout


def run_flags(name: str) -> tuple[str, ...]:
    """The flags of a run in one process, by its name."""
    return ("--name", name, "--out", str(runs_folder()), "--quiet", "--again", "--processes", "1")


def train(name: str, *words: str) -> RunFolder:
    """A finished run of these flags in one process."""
    launch("auto", *words, *run_flags(name))
    return RunFolder.open(str(runs_folder() / name))


def token_flags(*words: str) -> tuple[str, ...]:
    """The flags of training on blocks of random tokens, at a constant learning rate."""
    return ("--task", TOKENS, "--schedule", "constant", "--warmup", "0", "--dropout", "0", *words)


def train_on_tokens(name: str, *words: str, vocabulary: int, rows: int = 2048) -> RunFolder:
    """A finished run on blocks of random tokens, whose settings then stand in this process's environment."""
    os.environ |= {"BENCHMARK_VOCABULARY": str(vocabulary), "BENCHMARK_ROWS": str(rows)}
    return train(name, *token_flags(*words))


def plan_on_tokens(*words: str, vocabulary: int, rows: int) -> str:
    """What `plan --json` says of a run of `train_on_tokens`."""
    os.environ |= {"BENCHMARK_VOCABULARY": str(vocabulary), "BENCHMARK_ROWS": str(rows)}
    return launch("plan", *token_flags(*words), "--processes", "1", "--json")


def step_rows(run: RunFolder) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that are steps."""
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [row for row in rows if "step_seconds" in row]


def losses(run: RunFolder) -> list[float]:
    return [row["loss"] for row in step_rows(run)]


def furthest(run: RunFolder, other: RunFolder, limit: float) -> float:
    """The largest difference of two runs' losses. Raises RuntimeError above `limit`."""
    found = max(abs(a - b) for a, b in zip(losses(run), losses(other), strict=True))
    if found > limit:
        raise RuntimeError(f"losses of {run.folder.name} and {other.folder.name} differ by {found:.2g}")
    return found


def speed(run: RunFolder) -> Row:
    """tokens/s, MFU and energy after the first steps."""
    counted = step_rows(run)
    counted = counted[WARM:] or counted[-1:]
    seconds = sum(row["step_seconds"] for row in counted)
    tokens = sum(row["tokens_per_second"] * row["step_seconds"] for row in counted)
    used = [row["mfu"] * row["step_seconds"] for row in counted if "mfu" in row]
    watts = [row["power_watts"] for row in counted if "power_watts" in row]
    found = {"tokens/s": round(tokens / seconds), "MFU": round(sum(used) / seconds, 3) if used else "-"}
    return {**found, **energy(tokens / seconds, watts)}


def energy(speed: float, watts: Sequence[float]) -> Row:
    """The GPU's mean power and the tokens of a joule; nothing where its driver does not say."""
    return {"W": round(fmean(watts)), "tokens/J": round(speed / fmean(watts), 1)} if watts else {}


def memory(run: RunFolder) -> Row:
    """Peak memory as measured (reserved on a GPU), as the plan predicted it, and their ratio."""
    found = run.summary() or {}
    measured, predicted = found["peak_memory_bytes"], found["predicted_peak_memory_bytes"]
    return {
        "reserved GB": round(measured / 1e9, 2),
        "predicted GB": round(predicted / 1e9, 2),
        "predicted/reserved": round(predicted / measured, 2),
    }


def dense_peak(precision: str) -> float | None:
    """FLOP/s of the GPU table for this machine's GPU; None where it is not in the table."""
    import torch

    known = find_gpu_model(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return known.gpu.peak_flops[precision] if known else None


def model_folder(name: str, config: Mapping[str, Any]) -> Path:
    """A folder with a model of random bf16 weights and no usable tokenizer; made once in a `make gpu`.

    `config`: `model_type`, and the fields in which it differs from the type's own defaults.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = shared_folder() / name
    if not (folder / "tokenizer.json").exists():
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
        made.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")  # never opened: the samples are tokens
    return folder


def train_here(name: str, *words: str) -> None:
    """A run on blocks of random tokens in this process. Raises RuntimeError where it fails."""
    from isobatch.launch.cli import main

    os.environ |= {"BENCHMARK_VOCABULARY": "50257", "BENCHMARK_ROWS": "1024"}
    if code := main(["auto", *token_flags(*words), *run_flags(name)]):
        raise RuntimeError(f"{name} ended with {code}")
