"""The training loops that the benchmark `engine` compares: a bare loop, Trainer, this engine.

`contend` runs one of them in a child process that `speed/engine.py` starts. It reads a JSON file with the
arrays, order, model and optimizer that all share, and returns seconds and loss of every step, processor time
between steps, and peak memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.benchmarks.peers import StepClock, bare_loop, trainer_loop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from isobatch.engine.train.state import Training

IGNORED = -100
Spec = dict[str, Any]
Found = dict[str, Any]


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rows_of(spec: Spec) -> list[np.ndarray]:
    """Every sample's tokens, as views of the mapped file."""
    values = np.load(spec["tokens"], mmap_mode="r")
    offsets = np.load(spec["offsets"])
    return [values[a:b] for a, b in itertools.pairwise(offsets)]


def model_and_optimizer(spec: Spec) -> tuple[Any, Any]:
    """The same initial weights and the same fused AdamW for every contender."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(spec["threads"])
    torch.manual_seed(spec["seed"])
    model = GPT2LMHeadModel(
        GPT2Config(**spec["model"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ).train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": spec["weight_decay"]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=spec["lr"], fused=True)


def padded(rows: list[np.ndarray]) -> dict[str, Any]:
    """A batch padded to its longest. The first label is never predicted, so it does not count as an item."""
    import torch

    width = max(map(len, rows))
    tokens = np.zeros((len(rows), width), np.int64)
    lengths = np.array([len(r) for r in rows])
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    inside = np.arange(width) < lengths[:, None]
    labels = np.where(inside, tokens, IGNORED)
    labels[:, 0] = IGNORED
    batch = {"input_ids": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
    if not inside.all():
        batch["attention_mask"] = torch.from_numpy(inside.astype(np.int64))
    return batch


def bare(spec: Spec, clock: StepClock) -> list[float]:
    """A plain PyTorch loop."""
    import torch

    model, optimizer = model_and_optimizer(spec)
    rows, micro = rows_of(spec), spec["micro_batch"]

    def micro_batches(samples: list[int]) -> Iterator[tuple[dict[str, Any], int]]:
        items = sum(len(rows[i]) - 1 for i in samples)
        for start in range(0, len(samples), micro):
            yield padded([rows[i] for i in samples[start : start + micro]]), items

    def loss_of(batch: tuple[dict[str, Any], int]) -> torch.Tensor:
        inputs, items = batch
        labels = inputs.pop("labels")
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        summed = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return summed / items

    return bare_loop(model, optimizer, map(micro_batches, np.load(spec["order"])), loss_of, clock)


def trainer(spec: Spec, clock: StepClock) -> list[float]:
    """Trainer with its defaults, except for the shared order, optimizer and a constant learning rate."""
    import torch

    model, optimizer = model_and_optimizer(spec)
    order = np.load(spec["order"])
    settings = {
        "output_dir": spec["folder"],
        "per_device_train_batch_size": spec["micro_batch"],
        "gradient_accumulation_steps": order.shape[1] // spec["micro_batch"],
        "max_steps": len(order),
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "use_cpu": True,
        "seed": spec["seed"],
    }
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    more: dict[str, Any] = {"data_collator": padded, "optimizers": (optimizer, schedule)}
    return trainer_loop(model, rows_of(spec), clock, settings, order.reshape(-1).tolist(), **more)


def isobatch(spec: Spec) -> Found:
    """A run as `auto` does it, with metrics log, sample hashes and checkpoint."""
    from isobatch.engine import consent
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.runs.run_options import RunOptions
    from isobatch.engine.train.hooks import Hook
    from isobatch.engine.train.own_hooks import hooks_given
    from isobatch.launch.local.worker import train_run

    class Processor(Hook):
        def around(self, state: Training, step: int) -> AbstractContextManager[Any]:  # noqa: ARG002
            processor.append(time.process_time())
            return contextlib.nullcontext()

    run = RunFolder.open(spec["run"])
    consent.allow_task_file(run.recipe.task)
    processor: list[float] = []
    with hooks_given([Processor()]) as hook:
        code = train_run(run, RunOptions(quiet=True, hook=hook))
    assert code == 0, f"the run ended with {code}"
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = [row for row in rows if "step_seconds" in row]
    return {
        "seconds": [row["step_seconds"] for row in steps],
        "losses": [row["loss"] for row in steps],
        "processor": processor,
        "peak": steps[-1]["memory_bytes"],
        "waited": [row["data_seconds"] for row in steps],
        "padding": float(np.mean([row["padding"] for row in steps])),
    }


def contend(kind: str, spec: str) -> Found:
    """One contender's figures; `spec` is the JSON file."""
    asked = json.loads(Path(spec).read_text())
    if kind == "isobatch":
        return isobatch(asked)
    clock = StepClock()
    losses = {"bare": bare, "trainer": trainer}[kind](asked, clock)
    return {"seconds": clock.seconds(), "losses": losses, "peak": peak_bytes(), "processor": clock.processor}
