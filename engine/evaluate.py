"""Evaluation: every sample once, on any number of processes, in any cut."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from data.base import Source
from engine.cut import cut
from engine.feed import budget_of, tensors, to_device
from engine.plan import Plan
from models.base import Rows, Sum, Task

if TYPE_CHECKING:
    from engine.world import World

_BATCHES_AHEAD = 16


def evaluate(
    task: Task,
    model: nn.Module,
    source: Source,
    split: str,
    facts: Any,
    plan: Plan,
    world: World,
    fraction: float = 1.0,
) -> dict[str, float]:
    """Metrics over the first `fraction` of a split; the same on every rank."""
    count = max(1, math.ceil(len(source) * fraction))
    sums: dict[str, list[float]] = {}
    rows: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    training = model.training
    model.eval()
    with torch.no_grad():
        for batch in _batches(source, count, plan, world):
            with world.accelerator.autocast():
                parts = task.evaluate(model, batch)
            _add(parts, batch["index"].cpu().numpy(), sums, rows)
    model.train(training)
    return task.metrics(_reduce(sums, rows, world), split, facts)


def _batches(source: Source, count: int, plan: Plan, world: World) -> Any:
    """This rank's micro-batches, dealt by cost; no dummies, since a forward holds no collective."""
    budget = budget_of(plan)
    span = max(1, budget.samples * world.size * _BATCHES_AHEAD)
    for start in range(0, count, span):
        samples = np.arange(start, min(start + span, count))
        for micro in cut(source.lengths[samples], world.size, budget)[world.rank]:
            if len(micro.places):
                host = tensors(source.fetch(samples[micro.places], micro.width), pin=False)
                yield to_device(host, world.device)


def _add(parts: Mapping[str, Sum | Rows], index: np.ndarray, sums: dict[str, list[float]], rows: Any) -> None:
    for name, part in parts.items():
        if isinstance(part, Rows):
            rows.setdefault(name, []).append((index, part.values.float().cpu().numpy()))
        else:
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += float(part.value)
            total[1] += float(part.weight)


def _reduce(sums: dict[str, list[float]], rows: Any, world: World) -> dict[str, Any]:
    reduced: dict[str, Any] = {}
    for share in world.gather(sums):
        for name, (value, weight) in share.items():
            before = reduced.get(name, Sum(0.0, 0.0))
            reduced[name] = Sum(before.value + value, before.weight + weight)
    gathered: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for share in world.gather(rows):
        for name, pieces in share.items():
            gathered.setdefault(name, []).extend(pieces)
    for name, pieces in gathered.items():
        index = np.concatenate([i for i, _ in pieces])
        reduced[name] = np.concatenate([v for _, v in pieces])[np.argsort(index)]
    return reduced
