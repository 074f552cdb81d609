"""Planted bottlenecks: what `profile` promises for its first advice, and what following it gains.

    python -m benchmarks advice

Each step count is a process of its own: the recipe as planted and as advised, in turn. The last rows are what
the timers cost, and the sum of the parts beside the step.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from isobatch.benchmarks import child_process
from isobatch.benchmarks.report import Row, middle, paired_ratio
from isobatch.core.optimizers import OPTIMIZERS, OptimizerTraits
from isobatch.engine.distributed.communicator import Communicator
from isobatch.launch.measuring.measures import usable_cores
from isobatch.launch.measuring.profile import ProfileOptions, profile
from isobatch.launch.measuring.setup import read_setup
from isobatch.launch.measuring.trial import TrialSession

TOKENS = Path(__file__).with_name("random_tokens.py")
BLOCKS = ["--task", f"{TOKENS}:BlockLM", "--model", "tiny", "--max-length", "128", "--batch-size", "16"]
LONG = [*BLOCKS[:4], "--max-length", "512", "--batch-size", "4"]
VARIED = ["--task", f"{TOKENS}:VariedLM", "--model", "tiny", "--max-length", "512", "--batch-size", "64"]
BF16 = ["--precision", "bf16"]
"""So that the planted bottleneck is the first advice, and not the number format."""
CASES: dict[str, list[str]] = {
    "slow reader": ["--task", f"{TOKENS}:SlowLM", *BLOCKS[2:], *BF16],
    "tiny micro-batches": [*BLOCKS, *BF16, "--micro-batch", "1"],
    "padding": [*VARIED, *BF16, "--micro-batch", "64"],
    "eager attention": [*LONG, *BF16, "--attention", "eager"],
    "unfused optimizer": [*BLOCKS[:6], "--batch-size", "1", *BF16, "--optimizer", "plain-adamw"],
    "one thread": [*BLOCKS[:6], "--batch-size", "64", *BF16],
    "activations twice": [*BLOCKS, *BF16, "--activation-checkpointing", "on"],
    "fp32": BLOCKS,
}
ONE_CORE = "SLURM_CPUS_PER_TASK"
STEPS, WARM = 24, 8
SHARE = 0.8
"""Least part of the promise that following the advice must gain."""


def _plain_adamw(groups: Any, lr: float, _: str) -> Any:
    import torch

    return torch.optim.AdamW(groups, lr=lr, foreach=False)


def measure(quick: bool, only: str = "") -> list[Row]:
    """A row for each planted bottleneck, then the cost of the timers. `only`: their names, with commas."""
    names = ["tiny micro-batches"] if quick else only.split(",") if only else [*CASES]
    rows = [_case(name, 1 if quick else 3) for name in names]
    return [*rows, *(_call(f"{__name__}:timers", task) for task in ("causal-lm", "sequence-vae"))]


def _case(name: str, rounds: int) -> Row:
    environment = {**os.environ, ONE_CORE: "1"} if name == "one thread" else dict(os.environ)
    advised = _call("advise", name, environment=environment)
    if not advised:
        return {"planted": name, "first advice": "none", "promised": 0.0, "gained": 0.0, "kept": 0.0}
    freed = {k: v for k, v in environment.items() if k != ONE_CORE}
    after = freed if advised["measure"] == "threads" else environment
    words = followed(CASES[name], advised["flags"])
    planted, better = [], []
    for _ in range(rounds):
        planted.append(_call("steps", json.dumps(CASES[name]), environment=environment))
        better.append(_call("steps", json.dumps(words), environment=after))
    gained = paired_ratio(planted, better, "seconds")
    promised = float(advised["ratio"])
    return {
        "planted": name,
        "first advice": f"{advised['measure']}: {advised['flags']}",
        "promised": round(promised, 3),
        "gained": round(gained, 3),
        "kept": round((1 - 1 / gained) / (1 - 1 / promised), 3),
        "step ms": round(1e3 * middle(planted, "step"), 1),
    }


def followed(words: list[str], flags: str) -> list[str]:
    """The words of a command with an advice followed."""
    if removed := re.fullmatch(r"no (--\S+)", flags):
        place = words.index(removed[1])
        return words[:place] + words[place + 2 :]
    if not flags.startswith("--"):
        return words
    name, value = flags.split()
    kept = list(words)
    if name in kept:
        place = kept.index(name)
        kept = kept[:place] + kept[place + 2 :]
    return [*kept, name, value]


def _call(function: str, *words: str, environment: Any = None) -> Any:
    place = function if ":" in function else f"speed.advice:{function}"
    return child_process.call(place.removeprefix("isobatch.benchmarks."), *words, environment=environment)


def advise(name: str) -> dict[str, Any]:
    """In a child: the first advice of `profile`; empty where none helps."""
    _register()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        profile([*CASES[name], "--out", folder, "--trial-seconds", "15", "--json", "--quiet"])
    helping = [row for row in json.loads(out.getvalue())["advice"] if row["helps"]]
    return helping[0] if helping else {}


def steps(words: str) -> Row:
    """In a child: seconds for a thousand tokens under a command's words, and those of a step."""
    _register()
    setup = read_setup([*json.loads(words), "--quiet"], "profile", ProfileOptions)
    tokens = 0
    with TrialSession(setup.base, Communicator(setup.plan)) as trial:
        for number, loaded in enumerate(trial.batches(STEPS + WARM)):
            trial.active.step(loaded)
            if number == WARM - 1:
                began = time.perf_counter()
            tokens += loaded.work.tokens if number >= WARM else 0
        seconds = time.perf_counter() - began
    return {"seconds": 1e3 * seconds / tokens, "step": seconds / STEPS}


def timers(task: str) -> Row:
    """In a child: rounds with the recorder on and off, in turn, and what the parts add up to."""
    setup = read_setup(["--task", task, "--quiet"], "profile", ProfileOptions)
    ratios, sums = [], []
    with TrialSession(setup.base, Communicator(setup.plan)) as trial:
        trial.warm_up()
        for _ in range(15):
            off = trial.round(5).seconds / 5
            trial.world.recorder.start(trial.world.device)
            began = time.perf_counter()
            for loaded in trial.batches(6):
                trial.active.step(loaded)
                trial.world.recorder.end_step()
                wall = time.perf_counter() - began
            trial.world.recorder.stop()
            found = [sum(step.values()) for step in trial.world.recorder.steps()]
            sums.append(sum(found) / wall)
            ratios.append(sum(found[1:]) / 5 / off)
    return {
        "task": task,
        "timers on / off": round(median(ratios), 4),
        "sum of parts / step": round(median(sums), 4),
        "cores": usable_cores(),
    }


def _register() -> None:
    OPTIMIZERS["plain-adamw"] = OptimizerTraits(make=_plain_adamw, state_bytes=8.0, elementwise=True)
