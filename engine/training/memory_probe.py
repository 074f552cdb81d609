"""Before the first step: the largest micro-batch there can be, forward and backward, to see that it fits.

Under an explicit reduction a forward and backward hold no collective, so a rank that runs out of memory can
say so, and all of them take smaller micro-batches: the recipe's global batch stays.
"""

from __future__ import annotations

import gc
import resource
from typing import TYPE_CHECKING

import numpy as np
import torch

from isobatch.core.errors import OutOfMemoryError
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.strategies import traits_of
from isobatch.engine.loading.loader import micro_batch_budget, to_device, to_tensors
from isobatch.engine.planning.planner import with_smaller_budget
from isobatch.engine.runs.classify_errors import classify
from isobatch.engine.training.loss_checks import refuse_other_forms

_CHUNK = 1 << 20
"""Samples whose lengths are looked at together."""

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.core.plan import Plan
    from isobatch.data.base import Source
    from isobatch.engine.training.session import Session


def probe_memory(session: Session, phase: str, report: Callable[[str], None]) -> None:
    """Replan with smaller micro-batches until the largest there can be fits on every rank.

    `report` is told of each smaller budget.
    """
    world = session.world
    world.mark_progress("the rehearsal of the largest micro-batch")
    # One rank alone may have a limit: all of them probe, or none.
    while any(world.all_gather_objects(_is_telling(session.plan))) and not all(
        world.all_gather_objects(largest_micro_batch_fits(session, phase))
    ):
        session.replan(with_smaller_budget(session.plan, session.recipe, session.facts))
        report(f"{session.plan.micro_batch_samples} samples, {session.plan.micro_batch_tokens} tokens")


def _is_telling(plan: Plan) -> bool:
    """Host memory is promised freely, unless a limit was set; a strategy's forward may hold collectives."""
    if traits_of(plan.strategy).equal_counts:
        return False
    return plan.device != "cpu" or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def largest_micro_batch_fits(session: Session, phase: str) -> bool:
    """Whether this rank can compute the largest micro-batch of the plan; leaves no trace."""
    device = session.world.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            _largest(session, phase)
    except Exception as error:
        if not isinstance(classify(error), OutOfMemoryError):
            raise
        return False
    finally:
        for p in session.model.parameters():
            p.grad = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def _largest(session: Session, phase: str) -> None:
    """Longest samples, as many as fit the budget, beside memory set aside for the optimizer's state."""
    source, model, device = session.splits["train"], session.model, session.world.device
    budget = micro_batch_budget(session.plan)
    longest = longest_samples(source, session.recipe.batch_size)
    most = int(source.lengths(longest[:1])[0])
    samples = longest[: budget.rows(most)]
    batch = to_device(to_tensors(source.fetch(samples, budget.width(most)), pin=False), device)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = int(OPTIMIZERS[session.recipe.optimizer].state_bytes * trained)
    moments = torch.empty(held, dtype=torch.uint8, device=device)
    model.train()
    with session.world.accelerator.autocast():
        losses = session.task.loss(model, batch, session.context_for_probe(phase, samples))
    refuse_other_forms(losses)
    sum((loss.sum for loss in losses.values()), torch.zeros((), device=device)).backward()
    _evaluate(session, phase, batch, samples)
    del moments


def longest_samples(source: Source, count: int) -> np.ndarray:
    """The numbers of the `count` longest samples, the longest first; no array of all lengths is made."""
    kept = np.empty(0, np.int64)
    for start in range(0, len(source), _CHUNK):
        some = np.concatenate([kept, np.arange(start, min(start + _CHUNK, len(source)))])
        kept = some[np.argsort(-source.lengths(some), kind="stable")[:count]]
    return kept


def _evaluate(session: Session, phase: str, batch: dict[str, torch.Tensor], samples: np.ndarray) -> None:
    model = session.model
    model.eval()
    with torch.no_grad(), session.world.accelerator.autocast():
        session.task.evaluate(model, batch, session.context_for_probe(phase, samples))
    model.train()
