"""Speed of a sequence VAE: slow settings, each usual measure alone, and this engine; what the monitor costs.

python -m benchmarks sequence-vae --data FOLDER

The plain loop is the same network on a DataLoader of rows. Its slow settings are those that a user's project
began with: batch 1, every row padded to 1,000 tokens, 2 loader processes, a monitor in numpy every 20 steps.
Tokens are counted without padding. `claimed` is what that project's notes promise of each measure on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from isobatch.benchmarks.sessions import make_session, prepare_workload, train
from isobatch.models.sequence_vae import monitor as monitoring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from isobatch.benchmarks.report import Row
    from isobatch.data.base import Source

LONGEST = 1000
WARM_STEPS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """A plain loop's settings; the defaults are the slow ones."""

    batch: int = 1
    workers: int = 2
    dynamic_padding: bool = False
    longest: int = LONGEST
    bf16: bool = False
    accumulate: int = 1
    compiled: bool = False
    monitor_every: int = 20


MEASURES: dict[str, tuple[str, dict[str, Any]]] = {
    "slow settings": ("", {}),
    "batch 1 -> 4": ("30-50 %", {"batch": 4}),
    "loader processes 2 -> 8": ("20-30 %", {"workers": 8}),
    "16-bit arithmetic (no hardware for it here)": ("20-40 %", {"bf16": True}),
    "gradient accumulation 2": ("10-20 %", {"accumulate": 2}),
    "compiled": ("10-25 %", {"compiled": True}),
    "monitor every 100 steps": ("5-15 %", {"monitor_every": 100}),
    "sequences of at most 500": ("20-40 %", {"longest": 500}),
    "dynamic padding": ("", {"dynamic_padding": True}),
    "all but 16-bit and compiling": (
        "2-3 x",
        {"batch": 4, "accumulate": 2, "dynamic_padding": True, "monitor_every": 100},
    ),
}
"""Measure -> (what is claimed of it, what it changes)."""


def measure(quick: bool, data: str) -> Iterator[Row]:
    values = {"data": data, "max_length": LONGEST, **({"hidden": 64} if quick else {})}
    _, task, facts, source = prepare_workload("sequence-vae", values)
    samples = source.open(Path(facts.folder), "train")
    seconds = 4.0 if quick else 15.0
    slow = 0.0
    for name, (claimed, changes) in MEASURES.items():
        if quick and changes.get("compiled"):
            continue
        torch.manual_seed(0)
        model = task.build_model(facts)
        speed, waits = plain_loop(model, samples, dataclasses.replace(Settings(), **changes), seconds)
        slow = slow or speed
        yield {
            **{"settings": name, "claimed": claimed, "tokens/s": round(speed, 1)},
            **{"over slow": round(speed / slow, 2), "data wait": f"{waits:.1%}"},
        }
    for batch in (4, 32):
        speed, waits, padding = engine({**values, "batch_size": batch, "monitor": "fast"}, seconds)
        yield {
            **{"settings": f"isobatch, batch {batch}", "claimed": "", "tokens/s": round(speed, 1)},
            **{"over slow": round(speed / slow, 2), "data wait": f"{waits:.1%}"},
            "padding": f"{padding:.1%}",
        }
    for pace in ("full", "fast"):
        yield monitor_share({**values, "max_length": 128, "monitor": pace}, 120 if quick else 220)


class CutRows(Dataset[Any]):
    """A row at a time, cut to the longest, as tensors."""

    def __init__(self, samples: Source, longest: int) -> None:
        self.samples, self.longest = samples, longest

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        row = self.samples.fetch(np.array([number]))["tokens"][0][: self.longest]
        return torch.from_numpy(row.astype(np.int64))


def plain_loop(model: Any, samples: Source, settings: Settings, seconds: float) -> tuple[float, float]:
    """(tokens a second, share of the time that waited for data) of a usual loop."""

    def collate(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, rows)) if settings.dynamic_padding else settings.longest
        padded = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
        return padded, torch.tensor([len(row) for row in rows])

    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        CutRows(samples, settings.longest),
        batch_size=settings.batch,
        shuffle=True,
        num_workers=settings.workers,
        collate_fn=collate,
        generator=generator,
    )
    optimizer, history = torch.optim.AdamW(model.parameters(), 1e-3), deque[Any](maxlen=100)
    compute = torch.compile(model) if settings.compiled else model
    tokens, waited, began = 0, 0.0, 0.0
    rows = iter(loader)
    for step in range(1 << 30):
        asked = time.perf_counter()
        batch, length = next(rows)
        if step == WARM_STEPS * settings.accumulate * (20 if settings.compiled else 1):
            began = asked = time.perf_counter()
            tokens, waited = 0, 0.0
        waited += time.perf_counter() - asked
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.bf16):
            noise = torch.randn(len(batch), model.config.latent)
            output = compute(batch, length, noise)
            loss = (output.nll + output.posterior.kl().sum()) / len(batch) / settings.accumulate
        loss.backward()
        if (step + 1) % settings.accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
        history.append([part.detach().numpy() for part in output.posterior])
        if (step + 1) % settings.monitor_every == 0:
            numpy_monitor(history)
        tokens += int(length.sum())
        if began and time.perf_counter() - began > seconds:
            break
    took = time.perf_counter() - began
    return tokens / took, waited / took


def numpy_monitor(history: Any) -> dict[str, float]:
    """KL per dimension, active units and mutual information of the window, computed on the host."""
    mean, logvar = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*history, strict=True))
    kl = 0.5 * (mean**2 + np.exp(logvar) - 1 - logvar)
    noise = np.random.default_rng(0).standard_normal(mean.shape)
    information = monitoring.mutual_information(*map(torch.from_numpy, (mean, logvar, noise)))
    return {"kl": float(kl.sum(1).mean()), "active": float((mean.var(0) > 0.01).sum()), "mi": information}


def engine(values: dict[str, Any], seconds: float) -> tuple[float, float, float]:
    """(tokens a second, share that waited for data, share of padding) of this engine."""
    with make_session("sequence-vae", values) as session:
        schedule = session.schedules[0]
        with session.phase(schedule) as active:
            tokens, waited, padding, began = 0, 0.0, [], 0.0
            for loaded in active.batches(0, schedule.steps):
                if loaded.work.step == WARM_STEPS:
                    began, tokens, waited = time.perf_counter(), 0, 0.0
                active.step(loaded)
                tokens, waited = tokens + loaded.work.tokens, waited + loaded.wait_seconds
                padding.append(loaded.work.padding)
                if began and time.perf_counter() - began > seconds:
                    break
            took = time.perf_counter() - began
    return tokens / took, waited / took, float(np.mean(padding))


def monitor_share(values: dict[str, Any], steps: int) -> Row:
    """Time inside the monitor over the time of the steps."""
    inside, seconds = [0.0], []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                inside[0] += time.perf_counter() - began

        return call

    with make_session("sequence-vae", {**values, "steps": steps}) as session, contextlib.ExitStack() as after:
        task: Any = session.task
        methods = ((monitoring.PosteriorMonitor, name) for name in ("record", "add"))
        for owner, name in (*methods, (task, "_report")):
            own = vars(owner).get(name)
            setattr(owner, name, timed(getattr(owner, name)))
            after.callback(*((setattr, owner, name, own) if own is not None else (delattr, owner, name)))
        train(session, lambda _, took: seconds.append(took))
    return {
        "monitor": values["monitor"],
        "steps": steps,
        "ms a step": round(1e3 * median(seconds), 2),
        "ms in the monitor a step": round(1e3 * inside[0] / steps, 3),
        "share": f"{inside[0] / sum(seconds):.2%}",
    }
