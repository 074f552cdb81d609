"""Steady steps: no wait of the host for the GPU, and GPU figures without failures."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from isobatch.tests.gpu.helpers import DEVICE, asked, conversations, gpu_only
from isobatch.tests.integration.helpers import RAGGED, rows
from isobatch.tests.paths import REGISTER

if TYPE_CHECKING:
    from pathlib import Path

WATCHED = f"""{REGISTER}
import sys
import torch
from isobatch.engine.train import loop
from isobatch.launch.cli import main

step = loop.train_step

def watched(state, batch, hooks):
    if {DEVICE == "cuda"}:
        steady = 8 <= batch.work.step < 28
        torch.cuda.set_sync_debug_mode("error" if steady else "default")
    return step(state, batch, hooks)

loop.train_step = watched
sys.exit(main(sys.argv[1:]))
"""
"""The command line, in which a steady step that waits for the GPU raises an error."""
STEADY = ["--steps", "32", "--processes", "1", "--eval-every", "32", "--quiet", "--device", DEVICE]


def watched(folder: Path, *words: str) -> None:
    script = [sys.executable, "-P", "-c", WATCHED, "auto", *words, *STEADY]
    done = subprocess.run(script, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr


@gpu_only
@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_no_step_waits_for_the_gpu(precision: str, compiled: str, tmp_path: Path) -> None:
    """Dropout, learnt positions, uneven lengths and several micro-batches; losses are read a step later."""
    watched(tmp_path, "--task", RAGGED, "--precision", precision, "--compile", compiled, "--micro-batch", "8")


@gpu_only
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("pack", ["on", "off"])
def test_no_step_of_fine_tuning_waits(pack: str, model_type: str, tmp_path: Path) -> None:
    """The loss of some tokens alone, in chunks."""
    conversations(tmp_path, model_type)
    words = ["--task", "causal-lm", "--data", "asked.jsonl", "--model", "base", "--max-length", "256"]
    words += ["--batch-size", "32", "--precision", "bf16", "--compile", "off", "--pack", pack, "--lr", "1e-4"]
    watched(tmp_path, *words)


@gpu_only
def test_metrics_have_the_gpus_figures(tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    conversations(tmp_path)
    run = asked(tmp_path, "run", "--lr", "1e-4", "--precision", "bf16", steps=100)
    last = [row for row in rows(run) if "lr" in row][-1]
    if "MFU" in (run / "log.txt").read_text():  # the card is in the table of GPUs
        assert 0 < last["mfu"] < 1
    figures = {"gpu_utilisation", "power_watts", "gpu_memory_bytes", "gpu_temperature"}
    assert last.keys() & figures, "a bare card reports at least one"
