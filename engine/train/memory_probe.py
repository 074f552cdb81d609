"""The memory probe: before the first step, compute the largest possible micro-batch, forward and backward.

Its passes run no collective, so a rank that runs out of memory can report it, and all ranks then use smaller
micro-batches. The recipe's global batch stays.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable

import numpy as np
import torch

from isobatch.core.errors import OutOfMemoryError
from isobatch.core.plan import Plan
from isobatch.core.strategies import traits_of
from isobatch.core.terminal import doing
from isobatch.data.base import Source
from isobatch.engine.loading.device_copies import to_device, to_tensors
from isobatch.engine.loading.loader import micro_batch_budget
from isobatch.engine.planning.memory_model import mean_state_bytes
from isobatch.engine.planning.planner import with_smaller_budget
from isobatch.engine.runs.classify_errors import classify
from isobatch.engine.runs.peak_memory import reset_peak
from isobatch.engine.train.build import Builder
from isobatch.engine.train.first_step import check_loss_form
from isobatch.engine.train.state import Training
from isobatch.models.base import Batch

_CHUNK = 1 << 20
"""Samples whose lengths are read at a time."""


def probe_memory(builder: Builder, report: Callable[[str], None]) -> None:
    """Replan with smaller micro-batches until the largest possible one fits on every rank.

    `report` is called with each smaller budget. Raises TrainingError where even one sample does not fit.
    """
    state, world = builder.state, builder.state.world
    doing("rehearsing the largest micro-batch")
    world.mark_progress("the rehearsal of the largest micro-batch")
    # One rank alone may have a memory limit: all ranks probe, or none.
    while any(world.all_gather_objects(_can_detect(state.plan))) and not all(
        world.all_gather_objects(largest_micro_batch_fits(state))
    ):
        builder.replan(with_smaller_budget(state.plan, state.recipe, state.facts))
        report(f"{state.plan.micro_batch_samples} samples, {state.plan.micro_batch_tokens} tokens")


def _can_detect(plan: Plan) -> bool:
    """Whether a probe can show a lack of memory.

    Not on a host without a limit, which overcommits memory, and not where forward passes run collectives.
    """
    if traits_of(plan.strategy).equal_counts:
        return False
    return plan.device != "cpu" or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def largest_micro_batch_fits(state: Training) -> bool:
    """Whether this rank can compute the largest micro-batch of the plan; changes no state."""
    device = state.world.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _run_largest(state)
    except Exception as error:
        if not isinstance(classify(error), OutOfMemoryError):
            raise
        return False
    finally:
        for p in state.model.parameters():
            p.grad = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        reset_peak(device)  # else the rehearsal's counts as the run's
    return True


def _run_largest(state: Training) -> None:
    """Forward, backward and evaluation of the longest samples, beside memory for the optimizer's state."""
    model, device = state.model, state.world.device
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    average = 4.0 if state.recipe.ema is not None else 0.0
    state_bytes = average + mean_state_bytes(state.recipe, state.task.model_size(state.facts))
    moments = torch.empty(int(state_bytes * trained), dtype=torch.uint8, device=device)
    context = state.context(0)  # of a step that is never taken
    model.train()
    batch = _largest_batch(state, "train")
    with state.world.autocast():
        losses = state.task.loss(model, batch, context)
    check_loss_form(losses)
    sum((loss.sum for loss in losses.values()), torch.zeros((), device=device)).backward()
    model.eval()
    for split in [name for name in state.splits if name != "train"][:1]:  # its samples have other columns
        with torch.no_grad(), state.world.autocast():
            state.task.evaluate(model, _largest_batch(state, split), context)
    model.train()
    del moments


def _largest_batch(state: Training, split: str) -> Batch:
    """The longest samples of a split that the plan puts into one micro-batch; noise is bound to them."""
    source, budget = state.splits[split], micro_batch_budget(state.plan)
    longest = longest_samples(source, state.recipe.batch_size)
    widths = budget.widths(source.lengths(longest[:1]))
    samples = longest[: int(budget.rows(widths)[0])]
    if (noise := state.binding.noise) is not None:
        noise.bind(0, samples, state.world.device)
    return to_device(to_tensors(source.fetch(samples, int(widths[0])), pin=False), state.world.device)


def longest_samples(source: Source, count: int) -> np.ndarray:
    """Numbers of the `count` longest samples, longest first. Lengths are read in chunks, to save memory."""
    longest = np.empty(0, np.int64)
    for start in range(0, len(source), _CHUNK):
        candidates = np.concatenate([longest, np.arange(start, min(start + _CHUNK, len(source)))])
        most = min(count, len(candidates))
        longest = candidates[np.argpartition(-source.lengths(candidates), most - 1)[:most]]
    return longest[np.argsort(-source.lengths(longest), kind="stable")]
