"""A phase while it trains: its strategy, its new optimizer, its stepper and its batch loader."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, Protocol

import torch

from isobatch.engine.loading.loader import BatchLoader, LoadedStep
from isobatch.engine.model_setup.compile_model import compile_model
from isobatch.engine.optimization.parameter_groups import make_optimizer
from isobatch.engine.optimization.schedule import learning_rate
from isobatch.engine.strategies.base import strategy_class
from isobatch.engine.training.train_step import Stepper, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.data.base import Source
    from isobatch.engine.checkpointing import portable_state
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.loading.sampler import Sampler
    from isobatch.engine.model_setup.packing import SamplePacking
    from isobatch.engine.noise.keyed_noise import KeyedNoise
    from isobatch.engine.optimization.left_out import LeftOut
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.strategies.base import Strategy
    from isobatch.models.base import Change, Task


class SessionParts(Protocol):
    """The attributes of a session that a phase uses."""

    recipe: Recipe
    task: Task
    model: nn.Module
    noise: KeyedNoise | None
    packing: SamplePacking | None
    world: Communicator
    splits: dict[str, Source]
    sampler: Sampler
    left_out: LeftOut

    @property
    def plan(self) -> Plan: ...


class ActivePhase:
    """Runs the steps of a phase. Made and closed by `Session.phase`."""

    def __init__(self, session: SessionParts, schedule: PhaseSchedule) -> None:
        self.session, self.schedule = session, schedule
        self.strategy = self._make_strategy()
        self.stepper = self._make_stepper()

    def batches(self, start: int, stop: int) -> Iterator[LoadedStep]:
        """Steps start..stop-1, but those left out, with this rank's micro-batches, loaded ahead."""
        session = self.session
        loader = BatchLoader(
            session.splits["train"],
            session.sampler.batch,
            session.plan,
            session.world.rank,
            session.task.cohort,
            self.strategy.equal_counts,
            session.left_out.get(self.schedule.name, ()),
        )
        return session.world.recorder.waiting_for_data(loader.steps(start, stop))

    def learning_rate(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 0) of this phase."""
        schedule = self.schedule
        return learning_rate(self.session.recipe, schedule.lr, step, schedule.steps, schedule.steps_per_epoch)

    def step(self, loaded: LoadedStep, rank_flags: Sequence[float] = ()) -> StepResult:
        """One optimizer step and then the task's `after_step`. `rank_flags`: see `Stepper.run`."""
        number = loaded.work.step
        result = self.stepper.run(loaded, self.learning_rate(number), list(rank_flags))
        context = self.stepper.step_context(number, recorded=result.recorded, log=result.figures.__setitem__)
        result.change = self.session.task.after_step(self.session.model, context)
        if result.change is not None and result.change.keep:
            self._rebuild_optimizer(result.change)
        return result

    def _make_strategy(self) -> Strategy:
        session = self.session
        sparse = list(session.task.sparse_parameters(session.model))
        compile_model(session.model, session.plan)
        return strategy_class(session.plan.strategy)(
            session.model,
            lambda model: make_optimizer(model, session.recipe, session.plan.device, sparse),
            session.plan,
            session.world,
            session.recipe.clip,
            sparse,
        )

    def _make_stepper(self) -> Stepper:
        session = self.session
        return Stepper(
            session.task,
            session.recipe,
            session.world,
            self.strategy,
            session.noise,
            self.schedule.name,
            self.schedule.steps,
            session.packing,
        )

    def _rebuild_optimizer(self, change: Change) -> None:
        """After the task has pruned its model: make a new optimizer with the moments pruned alike."""
        moments, loss_scale = self.strategy.moments(), self.strategy.loss_scale()
        findings = self.stepper.findings
        del self.strategy, self.stepper
        if self.session.world.size > 1:
            gc.collect()  # frees the old strategy, and DDP's hooks with it
        self.strategy = self._make_strategy()
        self.strategy.load_moments(cut_moments(moments, change.keep), loss_scale)
        self.stepper = self._make_stepper()
        self.stepper.findings = findings


def cut_moments(
    moments: portable_state.Moments, keep: Mapping[str, Sequence[tuple[int, torch.Tensor]]]
) -> portable_state.Moments:
    """The moments with only the indices that `keep` lists of each pruned parameter.

    `keep`: parameter -> (dimension, indices that stay). 0-d state, such as a step count, stays as it is.
    """
    cut: dict[str, dict[str, Any]] = {}
    for name, state in moments.items():
        cut[name] = dict(state)
        for kind, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                for dimension, indices in keep.get(name, ()):
                    value = value.index_select(dimension, indices.to(value.device))
                cut[name][kind] = value
    return cut
