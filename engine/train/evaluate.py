"""Evaluation: every sample once; the result does not depend on processes or micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobatch.core.errors import TrainingError, UserError
from isobatch.core.plan import Plan
from isobatch.core.terminal import doing
from isobatch.data.base import Source
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.device_copies import array_to_device, to_device, to_tensors
from isobatch.engine.loading.loader import micro_batch_budget
from isobatch.engine.loading.microbatching import cut_batch
from isobatch.engine.loading.permutation import shuffle
from isobatch.engine.model_setup.compile_model import uncompiled
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.engine.train.state import Training
from isobatch.models.base import Rows, StepContext, Sum
from isobatch.models.capabilities import Answers

FEW_SAMPLES = 200
"""Held-out samples of which no part is measured: an accuracy of 200 is known to 7 points already."""
HOST_BATCH = 32
"""Samples per batch of `host_batches`."""
_BATCHES_AHEAD = 16
"""Micro-batches per rank that are formed together from samples in order."""
EVALUATION_STEP = 2**63
"""The step number that keys noise in evaluations; no training step reaches it."""
EVALUATION_PHASE = "evaluate"
_EVALUATION_SEED = 0xE7A1


def evaluate(
    state: Training,
    split: str,
    fraction: float = 1.0,
    keep: Callable[[list[dict[str, Any]]], None] = lambda _: None,
    beside: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
) -> dict[str, float]:
    """Metrics over a `fraction` of a split (of each set, if it has several); the same on every rank.

    Where passes are collectives, ranks without samples compute dummies. The task's own noise is keyed by seed
    and sample, not by the training step. `keep` gets what the model answers to prompts that the task asks.
    `beside`: weights that hooks hold, by name, whose metrics are NAME_METRIC.
    """
    task, model, world, seed = state.task, state.model, state.world, state.recipe.seed
    equal_counts = state.strategy is not None and state.strategy.equal_counts
    source = state.splits[split]
    chosen = held_out_samples(source, fraction, task.cohort, seed)
    sums: dict[str, list[float]] = {}
    rows: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    noise, onto = KeyedNoise(seed), partial(array_to_device, device=world.device)
    training, seen = model.training, 0
    model.eval()
    with torch.no_grad():
        for host, counts in _batches(source, chosen, state.plan, world, task.cohort, equal_counts):
            samples = host["index"].numpy()
            doing(f"evaluating {split}", min(seen * world.size, len(chosen)), len(chosen))
            seen += len(samples) * counts
            world.mark_progress(f"evaluation of {split}")
            with world.autocast():
                noise.bind(EVALUATION_STEP, samples, world.device)
                context = StepContext(0, EVALUATION_PHASE, noise, host=host, to_device=onto)
                with world.waiting_for("evaluation's forward") if equal_counts else nullcontext():
                    parts = task.evaluate(model, to_device(host, world.device), context)
                    if counts:  # which reads sums on the host
                        _add(parts, samples, sums, rows)
        answers = _answer(state, split)
    model.train(training)
    keep(answers)
    parts = _reduce(sums, rows, world)
    metrics = task.metrics(parts, split, state.facts) if world.is_main else {}
    if answers and isinstance(task, Answers):
        metrics |= task.answer_figures(answers)
    metrics = world.broadcast_object(metrics)
    for name, weights in beside.items():
        with state.strategy.holding(weights):
            metrics |= {f"{name}_{metric}": v for metric, v in evaluate(state, split, fraction).items()}
    return metrics


def _answer(state: Training, split: str) -> list[dict[str, Any]]:
    """What the model answers to prompts of a split, in order, the same on every rank; [] if none are asked.

    Ranks take the prompts in turn. Which they are follows from the seed alone, as `held_out_samples` do.
    """
    task, world, source = state.task, state.world, state.splits[split]
    if not isinstance(task, Answers) or not task.answers:
        return []
    order = shuffle(np.arange(len(source)), len(source), state.recipe.seed + _EVALUATION_SEED, 0)
    spans = (order[start : start + HOST_BATCH] for start in range(0, len(order), HOST_BATCH))
    prompts = task.prompts((to_tensors(source.fetch(numbers), pin=False) for numbers in spans), state.facts)
    own = []
    with uncompiled(state.model), world.autocast():  # a text grows by a token at a time
        for number in range(world.rank, len(prompts), world.size):
            doing(f"answering prompts of {split}", number, len(prompts))
            world.mark_progress(f"answers to prompts of {split}")
            own.append((number, dict(task.answer(state.model, prompts[number], state.facts))))
    found = dict(itertools.chain(*world.all_gather_objects(own)))
    return [found[number] for number in range(len(prompts))]


def refuse_nonfinite_metrics(metrics: Mapping[str, Any], split: str) -> None:
    """Raise TrainingError where a metric is NaN or infinite: training has diverged."""
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise TrainingError(
                f"{name} of the {split} split is {value}: training has diverged; lower --lr or lengthen"
                " --warmup"
            )


def monitored(metrics: Mapping[str, float], name: str) -> float:
    """The metric that a task monitors. Raises UserError where it measured no such one."""
    if name not in metrics:
        raise UserError(f"monitor {name}: is no metric of the task, which has {', '.join(metrics)}")
    return metrics[name]


def at_least_few(fraction: float, source: Source) -> float:
    """The share of held-out samples that is measured where a fraction is asked for: FEW_SAMPLES at least."""
    return max(fraction, min(1.0, FEW_SAMPLES / len(source)))


def held_out_samples(source: Source, fraction: float, cohort: int, seed: int) -> np.ndarray:
    """Numbers of a `fraction` of the samples of each set, ascending, in whole cohorts.

    A prefix of a permutation that the seed names, so that a file in any order gives a fair share.
    """
    sizes = [size for size, _ in source.parts] or [len(source)]
    starts, chosen = np.cumsum([0, *sizes[:-1]]), []
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        count = min(size, _round_up(max(1, math.ceil(size * fraction)), cohort))
        chosen.append(start + np.sort(shuffle(np.arange(count), size, seed + _EVALUATION_SEED, number)))
    return np.concatenate(chosen)


def _batches(
    source: Source, chosen: np.ndarray, plan: Plan, world: Communicator, cohort: int, equal_counts: bool
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """This rank's micro-batches of the `chosen` samples: (batch in host memory, whether it is no dummy)."""
    budget = micro_batch_budget(plan)
    span = _round_up(max(1, budget.samples * world.size * _BATCHES_AHEAD), cohort)
    for start in range(0, len(chosen), span):
        samples = chosen[start : start + span]
        cut = cut_batch(source.lengths(samples), world.size, budget, cohort)
        for micro in cut.of_rank(world.rank, at_least=cut.most if equal_counts else 1):
            counts = len(micro.positions) > 0
            if counts or equal_counts:
                numbers = samples[micro.positions] if counts else samples[:1]
                yield to_tensors(source.fetch(numbers, micro.width), plan.pin_memory), counts


def host_batches(source: Source) -> Iterator[dict[str, Tensor]]:
    """Every sample of a source once, in order, in batches of HOST_BATCH in host memory."""
    for start in range(0, len(source), HOST_BATCH):
        rows = np.arange(start, min(start + HOST_BATCH, len(source)))
        yield to_device(to_tensors(source.fetch(rows), pin=False), torch.device("cpu"))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _add(parts: Mapping[str, Sum | Rows], index: np.ndarray, sums: dict[str, list[float]], rows: Any) -> None:
    for name, part in parts.items():
        if not isinstance(part, Rows | Sum):
            raise UserError(
                f"evaluate() returned a {type(part).__name__} as {name}: return {{name: Sum(total, count)}},"
                " or Rows(values)"
            )
        if isinstance(part, Rows):
            rows.setdefault(name, []).append((index, part.values.float().cpu().numpy()))
        else:
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += float(part.value)
            total[1] += float(part.weight)


def _reduce(sums: dict[str, list[float]], rows: Any, world: Communicator) -> dict[str, Any]:
    """On rank 0: name -> Sum over all ranks, or the array of all rows in the order of samples."""
    own = {n: [np.concatenate(arrays) for arrays in zip(*of, strict=True)] for n, of in rows.items()}
    shares = world.gather_objects((sums, own))
    reduced: dict[str, Any] = {}
    for share, _ in shares:
        for name, (value, weight) in share.items():
            before = reduced.get(name, Sum(0.0, 0.0))
            reduced[name] = Sum(before.value + value, before.weight + weight)
    for name in dict.fromkeys(name for _, share in shares for name in share):
        parts = zip(*(share[name] for _, share in shares if name in share), strict=True)
        index, values = map(np.concatenate, parts)
        reduced[name] = values[np.argsort(index)]
    return reduced
