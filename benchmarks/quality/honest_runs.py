"""Sixty honest runs that `verify` must pass: `python -m benchmarks honest-runs`.

Every task in ten worlds: 1, 2 and 3 processes, DDP, ZeRO and FSDP2, fp32 and bf16, each verified at the
default level, most in another world than they were trained in. A task that a strategy refuses (pruning
changes its shape) trains under DDP there.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from isobatch.engine.registry import TASKS
from isobatch.tests.zygote import Zygote

WORLDS = {
    "1 fp32": [],
    "1 fp32, micro-batch 3": ["--micro-batch", "3"],
    "1 bf16": ["--precision", "bf16"],
    "2 ddp fp32": ["--processes", "2", "--strategy", "ddp"],
    "2 ddp bf16": ["--processes", "2", "--strategy", "ddp", "--precision", "bf16"],
    "3 ddp fp32": ["--processes", "3", "--strategy", "ddp"],
    "2 zero1 fp32": ["--processes", "2", "--strategy", "zero1"],
    "2 zero2 bf16": ["--processes", "2", "--strategy", "zero2", "--precision", "bf16"],
    "2 zero3 fp32": ["--processes", "2", "--strategy", "zero3"],
    "2 fsdp2 fp32": ["--processes", "2", "--strategy", "fsdp2"],
}
SAME_WORLD = {"2 ddp fp32", "2 zero2 bf16"}
"""Verified in two processes; the others in one."""


def measure(quick: bool) -> list[dict[str, Any]]:
    """A row per run: what verify said, the largest difference of a loss, and its time beside training's."""
    tasks, worlds = (["classifier"], ["1 fp32"]) if quick else (list(TASKS), list(WORLDS))
    with tempfile.TemporaryDirectory() as name:
        folders = {"ISOBATCH_CACHE": f"{name}/cache", "ISOBATCH_STATE": f"{name}/state"}
        environment = {**os.environ, **folders, "OMP_NUM_THREADS": "1"}
        warm = Zygote(environment)
        try:
            return [_measure(warm, environment, Path(name), t, w) for t in tasks for w in worlds]
        finally:
            warm.close()


def _measure(warm: Zygote, environment: dict[str, str], home: Path, task: str, world: str) -> dict[str, Any]:
    run = home / f"{task}-{world.replace(' ', '-').replace(',', '')}"
    train = ["auto", "--task", task, "--fast", "--steps", "12", "--eval-every", "5", "--quiet"]
    train += ["--out", str(home), "--name", run.name, "--again"]
    began = time.monotonic()
    done = warm.run([*train, *WORLDS[world]], home, environment, timeout=600)
    if done.returncode == 2 and "--strategy" in WORLDS[world]:
        done = warm.run([*train, "--processes", "3", "--strategy", "ddp"], home, environment, timeout=600)
    trained = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    verify = ["verify", str(run), "--json", *(["--processes", "2"] if world in SAME_WORLD else [])]
    checked = warm.run(verify, home, environment, timeout=600)
    found = json.loads(checked.stdout.splitlines()[-1])
    return {
        "task": task,
        "world": world,
        "verified": found["verified"],
        "loss_difference": found["largest_loss_difference"],
        "said": "; ".join([*found["problems"], *found["unproven"]]) or found["coverage"],
        "train_s": round(trained, 1),
        "verify_s": round(time.monotonic() - began - trained, 1),
    }
