"""Memory and time of fine-tuning with adapters or without, in 16, 8 and 4 bits; loss in chunks; cleaning.

python -m benchmarks adapters --data WIKITEXT_FOLDER --model TOKENIZER_FOLDER

The model is GPT-2's shape (124 million parameters) with random weights; the tokenizer is GPT-2's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from isobatch.benchmarks import child_process
from isobatch.benchmarks.sessions import make_session
from isobatch.core.package import ROOT, own_command
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.models.causal_lm import chunked_cross_entropy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.benchmarks.report import Row

WAYS: dict[str, dict[str, Any]] = {
    "all of it, AdamW": {},
    "all of it, 8-bit AdamW": {"optimizer": "adamw8bit"},
    "lora": {"adapter": "lora"},
    "lora, 8-bit AdamW": {"adapter": "lora", "optimizer": "adamw8bit"},
    "lora, 8-bit weights": {"adapter": "lora", "load_bits": 8},
    "qlora": {"adapter": "qlora"},
}
CLEANING = "html,unicode,control,short=10,duplicates"


def measure(quick: bool, data: str, model: str) -> list[Row]:
    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "base"
        make_base(base, Path(model), quick)
        os.environ["ISOBATCH_CACHE"] = str(Path(place) / "cache")
        rows = [_measured("step", way, str(base), data) for way in WAYS]
        rows += [_measured("chunks", way, str(quick)) for way in ("whole", "in chunks")]
        return [*rows, *saved(base, data, Path(place)), *prepared(base, data)]


def make_base(folder: Path, tokenizer: Path, quick: bool) -> None:
    """Write a model of GPT-2's shape, or a small one if `quick`, next to its tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small: dict[str, Any] = {"n_layer": 2, "n_embd": 128, "n_head": 2} if quick else {}
    GPT2LMHeadModel(GPT2Config(**small)).save_pretrained(folder)
    for file in tokenizer.iterdir():
        if file.suffix in (".json", ".txt", ".bpe"):
            shutil.copy(file, folder)


def _measured(what: str, *words: str) -> Row:
    """A measurement in a process of its own, for its memory."""
    found: Row = child_process.call(f"speed.adapters:{what}", *words)
    return found


def step(way: str, base: str, data: str) -> Row:
    """Seconds of a step of 8 samples of 256 tokens."""
    recipe = {"data": data, "model": base, "batch_size": 8, "max_length": 256, "steps": 4, "lr": 1e-4}
    session, seconds = make_session("causal-lm", {**recipe, **WAYS[way], "dropout": 0.0}), []
    with session, session.phase(session.schedules[0]) as active:
        before = _peak()
        for loaded in active.batches(0, 4):
            began = time.perf_counter()
            active.step(loaded)
            seconds.append(time.perf_counter() - began)
    parameters = list(session.model.parameters())
    weights = sum(p.numel() * p.element_size() for p in parameters)
    return {
        "trained": way,
        "parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "weights MB": round(weights / 1e6, 1),
        "seconds a step": round(median(seconds[1:]), 2),
        "peak MB": round(_peak()),
        "predicted MB": round(session.plan.predicted_peak_memory_bytes / 1e6),
        "of that while stepping": round(_peak() - before),
    }


class HeadAlone(torch.nn.Module):
    """A language model that has only a head: its (B, T, D) states are given."""

    def __init__(self, states: torch.Tensor, head: torch.nn.Linear) -> None:
        super().__init__()
        self.states, self.head = states, head

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self.head

    def forward(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.states))


def chunks(way: str, quick: str) -> Row:
    """Forward and backward of the head and its loss alone: 4,096 tokens, GPT-2's vocabulary."""
    tokens, words, width = (512, 5000, 128) if quick == "True" else (4096, 50257, 768)
    torch.manual_seed(0)
    states = torch.randn(1, tokens, width, requires_grad=True)
    head = chunked_cross_entropy.BypassableHead(width, words, bias=False)
    head.weight = torch.nn.Parameter(torch.randn(words, width))
    model, targets = HeadAlone(states, head), torch.randint(words, (1, tokens))
    before, seconds = _peak(), []
    for _ in range(3):
        states.grad = head.weight.grad = None
        began = time.perf_counter()
        if way == "whole":
            logits = head(states).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        else:
            loss = chunked_cross_entropy.next_token_loss(model, targets, targets)
        loss.backward()
        seconds.append(time.perf_counter() - began)
    return {
        "head's loss": way,
        "seconds": round(min(seconds), 2),
        "adds MB": round(_peak() - before),
        "loss": float(loss.detach()),
    }


def _peak() -> float:
    """Peak MB so far; getrusage's peak would include the parent's before the fork."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1e3


def saved(base: Path, data: str, place: Path) -> Iterator[Row]:
    """Size of a LoRA checkpoint on c_attn and c_proj, and seconds to load it."""
    little = place / "little.txt"
    little.write_text("".join((Path(data) / "valid.txt").read_text().splitlines(keepends=True)[:300]))
    words = ["auto", "--task", "causal-lm", "--data", str(little), "--model", str(base), "--adapter", "lora"]
    words += ["--lora-targets", "c_attn,c_proj", "--max-length", "64", "--batch-size", "4", "--steps", "2"]
    words += ["--name", "lora", "--out", str(place), "--quiet"]
    subprocess.run(own_command(*words), cwd=ROOT, check=True, capture_output=True)
    run = place / "lora"
    newest = max((run / "checkpoints").iterdir(), key=lambda f: f.stat().st_mtime)
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.replay import Replay

    opened = RunFolder.open(str(run))
    began = time.perf_counter()
    session = Replay(opened, opened.plan).session
    model_seconds = time.perf_counter() - began
    began = time.perf_counter()
    with session, session.phase(session.schedules[0], SavedCheckpoint(newest)):
        checkpoint_seconds = time.perf_counter() - began
    yield {
        "checkpoint of": "lora, weights and moments",
        "MB": round(sum(f.stat().st_size for f in newest.iterdir()) / 1e6, 2),
        "model loaded in s": round(model_seconds, 2),
        "checkpoint loaded in s": round(checkpoint_seconds, 2),
    }


def prepared(base: Path, data: str) -> Iterator[Row]:
    """Seconds of `prepare` with cleaning, with an empty cache and again."""
    words = ["prepare", "--task", "causal-lm", "--data", data, "--model", str(base), "--clean", CLEANING]
    for what in ("cold", "again"):
        began = time.perf_counter()
        subprocess.run(own_command(*words), cwd=ROOT, check=True, capture_output=True)
        yield {"cleaned and tokenized": what, "seconds": round(time.perf_counter() - began, 2)}
