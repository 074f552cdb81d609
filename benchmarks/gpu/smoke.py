"""Part 1, smoke: the noise's numbers, the demo, a stopped and resumed run, `verify`, the CPU's losses."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING

from isobatch.benchmarks.gpu import runs
from isobatch.benchmarks.gpu.runner import COMMAND_LINE, GPU, Part, Trial
from isobatch.core.errors import STOPPED
from isobatch.core.package import own_command
from isobatch.engine.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from isobatch.benchmarks.report import Row

SAME_DEVICE, OTHER_DEVICE = 1e-4, 1e-3
"""Largest differences of losses: the same run on one GPU (atomics add in any order), and in fp32 on a CPU."""


def trials(quick: bool) -> Sequence[Trial]:
    steps = "12" if quick else "200"
    return (
        Trial("noise, CPU and GPU", "gpu.smoke:noise", needs=(GPU,)),
        Trial("demo", "gpu.smoke:demo", (steps,), 180),
        Trial("stop, resume, verify", "gpu.smoke:resume", (steps,), 180),
        Trial("CPU and GPU, fp32", "gpu.smoke:devices", needs=(*COMMAND_LINE, GPU)),
    )


def headline(rows: Sequence[Row]) -> str:
    return next((f"demo: {r['tokens/s']:,} tokens/s" for r in rows if "tokens/s" in r), "")


PART = Part("smoke: noise, demo, resume, verify", trials, headline, 140)


def noise() -> Row:
    """The hash's bits, and a dropout's mask, on both devices."""
    import numpy as np
    import torch

    from isobatch.engine.noise.keyed_noise import KeyedDropout, KeyedNoise, hash_bits

    keys = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, (64, 2)).astype(np.int32))
    assert torch.equal(hash_bits(keys, 10_007), hash_bits(keys.cuda(), 10_007).cpu())
    source = KeyedNoise(3)
    layer, x = KeyedDropout(0.1, source, "here"), torch.ones(64, 128, 96)
    masks = []
    for device in ("cpu", "cuda"):
        source.bind(4, np.arange(64), torch.device(device))
        masks.append(layer(x.to(device)).cpu())
    assert torch.equal(*masks)
    return {"draws": keys.shape[0] * 10_007 + x.numel(), "different": 0}


def demo(steps: str) -> Row:
    """The command of the README, with as many steps."""
    run = runs.train("demo", "--task", "causal-lm", "--steps", steps)
    found = run.summary() or {}
    return {
        "device": run.plan.device,
        "compile": run.plan.compile,
        "loss": round(runs.losses(run)[-1], 3),
        **runs.speed(run),
        "start s": found["startup_seconds"],
    }


def resume(steps: str) -> Row:
    """A run that is asked to stop midway and resumed, against one that is not."""
    words = ("--task", "causal-lm", "--steps", steps)
    whole = runs.train("whole", *words)
    folder = runs.runs_folder()
    child = subprocess.Popen(
        own_command("auto", *words, *runs.run_flags("stopped")), stderr=subprocess.PIPE, text=True
    )
    while child.poll() is None and not _has_steps(folder / "stopped" / "metrics.jsonl", int(steps) // 4):
        time.sleep(0.005)
    child.send_signal(signal.SIGTERM)
    _, said = child.communicate()
    if child.returncode != STOPPED:
        raise RuntimeError(f"a run that was asked to stop ended with {child.returncode}: {said[-1000:]}")
    resumed_from = len(runs.step_rows(RunFolder.open(str(folder / "stopped"))))
    runs.launch("resume", str(folder / "stopped"), "--quiet")
    stopped = RunFolder.open(str(folder / "stopped"))
    difference = runs.furthest(whole, stopped, SAME_DEVICE)
    runs.launch("verify", str(folder / "stopped"))
    return {"stopped at step": resumed_from, "loss difference": difference, "verify": "passed"}


def _has_steps(metrics: Path, count: int) -> bool:
    return metrics.exists() and metrics.read_bytes().count(b'"lr"') >= count


def devices() -> Row:
    """The demo in fp32 on both devices."""
    words = ("--task", "causal-lm", "--steps", "40", "--precision", "fp32", "--compile", "off")
    ours = runs.train("in-fp32", *words)
    theirs = runs.train("on-cpu", *words, "--device", "cpu")
    return {"loss difference": runs.furthest(ours, theirs, OTHER_DEVICE), "invariance": ours.plan.invariance}
