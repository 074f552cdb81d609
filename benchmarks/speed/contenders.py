"""The training loops that the benchmark `engine` compares: a bare loop, Trainer, this engine.

`contend` runs one of them in a child process that `speed/engine.py` starts. It reads a JSON file with the
arrays, order, model and optimizer that all share, and returns seconds and loss of every step, processor time
between steps, and peak memory.
"""

from __future__ import annotations

import itertools
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

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


def bare(spec: Spec) -> Found:
    """A plain PyTorch loop."""
    import torch

    model, optimizer = model_and_optimizer(spec)
    rows, order = rows_of(spec), np.load(spec["order"])
    seconds, losses = [], []
    processor = [time.process_time()]
    began = time.perf_counter()
    for samples in order:
        items = sum(len(rows[i]) - 1 for i in samples)
        total = 0.0
        for start in range(0, len(samples), spec["micro_batch"]):
            batch = padded([rows[i] for i in samples[start : start + spec["micro_batch"]]])
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
            )
            (loss / items).backward()
            total += loss.item() / items
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        processor.append(time.process_time())
    return {"seconds": seconds, "losses": losses, "peak": peak_bytes(), "processor": processor}


def trainer(spec: Spec) -> Found:
    """Trainer with its defaults, except for the shared order, optimizer and a constant learning rate."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, optimizer = model_and_optimizer(spec)
    order = np.load(spec["order"])
    seconds: list[float] = []
    losses: list[float] = []
    parts: list[Any] = []
    began = [time.perf_counter()]
    processor: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            began[0] = time.perf_counter()
            processor.append(time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            losses.append(float(sum(parts)))
            parts.clear()
            seconds.append(time.perf_counter() - began[0])
            began[0] = time.perf_counter()
            processor.append(time.process_time())

    class Ordered(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return order.reshape(-1).tolist()

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss: Any = super().compute_loss(*arguments, **named)
            parts.append(loss.detach())
            return loss

    settings = TrainingArguments(
        output_dir=spec["folder"],
        per_device_train_batch_size=spec["micro_batch"],
        gradient_accumulation_steps=order.shape[1] // spec["micro_batch"],
        max_steps=len(order),
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=spec["seed"],
    )
    Ordered(
        model,
        settings,
        train_dataset=rows_of(spec),
        data_collator=padded,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
        callbacks=[Clock()],
    ).train()
    return {"seconds": seconds, "losses": losses, "peak": peak_bytes(), "processor": processor}


def isobatch(spec: Spec) -> Found:
    """A run as `auto` does it, with metrics log, sample hashes and checkpoint."""
    from isobatch.engine import consent
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.runs.run_options import RunOptions
    from isobatch.engine.training.train_step import Stepper
    from isobatch.launch.local.worker import train_run

    run = RunFolder.open(spec["run"])
    consent.allow_task_file(run.recipe.task)
    processor: list[float] = []
    step = Stepper.run

    def clocked(self: Stepper, *arguments: Any) -> Any:
        processor.append(time.process_time())
        return step(self, *arguments)

    with mock.patch.object(Stepper, "run", clocked):
        code = train_run(run, RunOptions(quiet=True))
    assert code == 0, f"the run ended with {code}"
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    steps = [row for row in rows if "step_seconds" in row]
    return {
        "seconds": [row["step_seconds"] for row in steps],
        "losses": [row["loss"] for row in steps],
        "processor": processor,
        "peak": steps[-1]["memory_bytes"],
        "peak_with_checkpoint": peak_bytes(),
        "waited": [row["data_seconds"] for row in steps],
        "padding": float(np.mean([row["padding"] for row in steps])),
    }


def contend(kind: str, spec: str) -> Found:
    """One contender's figures; `spec` is the JSON file."""
    return {"bare": bare, "trainer": trainer, "isobatch": isobatch}[kind](json.loads(Path(spec).read_text()))
