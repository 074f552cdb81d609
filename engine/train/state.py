"""The state of training on one rank: what the loop, its step and the hooks share."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.errors import TrainingError, UserError
from isobatch.core.facts import Facts
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe
from isobatch.core.strategies import traits_of
from isobatch.data.base import Source
from isobatch.engine.checkpointing.portable_state import cut_moments
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.device_copies import array_to_device
from isobatch.engine.loading.loader import BatchLoader, LoadedStep
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.model_setup.packing import SamplePacking
from isobatch.engine.noise.keyed_noise import KeyedNoise, NativeNoise
from isobatch.engine.optimization.parameter_groups import make_optimizer
from isobatch.engine.optimization.schedule import PhaseSchedule
from isobatch.engine.runs.summary import Progress
from isobatch.engine.strategies.base import Strategy, strategy_class
from isobatch.models.base import TRAINS_A_PART, CachedWeightTransform, Change, StepContext, Task
from isobatch.models.capabilities import ChangesModel, SparseTables, TakesTurns


@dataclass(slots=True)
class Binding:
    """What in a model follows the samples of a micro-batch: its keyed noise, and how they are packed."""

    noise: KeyedNoise | None = None
    """None where the model draws torch's own noise."""
    packing: SamplePacking | None = None
    positions: np.ndarray | None = None
    """The samples' places in the global batch."""
    measured: Tensor | None = None
    """What the task measured of the whole global batch before its losses."""

    def bind(self, step: int, host: Mapping[str, Tensor], device: torch.device) -> None:
        """Let further passes draw the noise of these samples in `step`, and know their lengths."""
        if self.noise is not None:
            self.noise.bind(step, host["index"].numpy(), device)
        if self.packing is not None:
            self.packing.bind(host["length"].numpy())

    @contextlib.contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Inside, other samples may be bound."""
        noise = self.noise.preserve_state() if self.noise else contextlib.nullcontext()
        with noise, self.packing.preserve_state() if self.packing else contextlib.nullcontext():
            yield


Numbers = TypeVar("Numbers", Tensor, np.ndarray)


@dataclass(slots=True)
class StepLayout:
    """What the steps of a phase have in common; the first step finds it out, and all ranks agree on it."""

    names: list[str] = field(default_factory=list)
    """Of the losses; empty before the first step."""
    recorded_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of what loss() records."""
    foreign_noise: bool | None = None
    """Whether the model draws from torch's own generators; None before the first forward pass."""
    transforms: list[CachedWeightTransform] = field(default_factory=list)
    """Modules that compute with a function of their weights."""

    def recorded_in(self, sums: Numbers) -> dict[str, Numbers]:
        """What loss() recorded, as parts of the step's reduced sums: it stands behind the losses."""
        found, offset = {}, len(self.names)
        for name, shape in self.recorded_shapes.items():
            found[name] = sums[offset : (offset := offset + math.prod(shape))].reshape(shape)
        return found


@dataclass(slots=True)
class Training:
    """Everything that training needs, and nothing of a run: no folder, no console, no log.

    `engine.train.build` makes it, and begins its phases.
    """

    task: Task
    facts: Facts
    plan: Plan
    world: Communicator
    splits: dict[str, Source]
    sampler: Sampler
    progress: Progress
    model: nn.Module
    """The task's model itself; while a phase runs `strategy.model` computes with it."""
    binding: Binding
    schedule: PhaseSchedule
    """Of the phase that runs."""
    strategy: Strategy
    layout: StepLayout

    @property
    def recipe(self) -> Recipe:
        return self.task.recipe

    def batches(self, start: int, stop: int | None = None) -> Iterator[LoadedStep]:
        """Steps start..stop-1 of the phase with this rank's micro-batches, loaded ahead of the loop."""
        loader = BatchLoader(
            self.splits["train"],
            self.sampler.batch,
            self.plan,
            self.world.rank,
            self.task.cohort,
            self.strategy.equal_counts,
            self.schedule.left_out,
        )
        steps = loader.steps(start, self.schedule.steps if stop is None else stop)
        while True:
            with self.world.recorder.part("data wait"):
                batch = next(steps, None)
            if batch is None:
                return
            yield batch

    def context(self, step: int, **more: Any) -> StepContext:
        """The context of a step for the task; `more`: the fields of `loss`, or those of `after_step`."""
        return StepContext(
            step,
            self.schedule.name,
            self.binding.noise or NativeNoise(),
            self.schedule.steps,
            self.world.broadcast_object,
            to_device=partial(array_to_device, device=self.world.device),
            **more,
        )

    @contextlib.contextmanager
    def bound(
        self,
        step: int,
        number: int,
        host: Mapping[str, Tensor],
        positions: np.ndarray,
        record: Callable[[str, Tensor], None],
    ) -> Iterator[StepContext]:
        """Bind noise and packing to micro-batch `number` of a step; yields the context of its loss.

        Native noise is seeded: a resumed run draws what an uninterrupted one does, and each rank its own. The
        first time it is seen whether the model draws any.
        """
        layout = self.layout
        self.binding.bind(step, host, self.world.device)
        self.binding.positions = positions
        if self.binding.noise is None or layout.foreign_noise is not False:
            torch.manual_seed(hash((self.task.recipe.seed, step, self.world.rank, number)) & 0x7FFFFFFF)
        before = generator_states(self.world.device) if layout.foreign_noise is None else []
        more = {"record": record, "positions": positions, "host": host, "measured": self.binding.measured}
        yield self.context(step, **more)
        if layout.foreign_noise is None:
            layout.foreign_noise = has_drawn(before, self.world.device)

    def whole_step(self, step: int) -> contextlib.ExitStack:
        """What holds for all micro-batches of a step: functions of weights, such as fake quantisation, are
        computed once, and parameters rest while others have their turn.
        """
        stack = contextlib.ExitStack()
        if self.layout.transforms and self.strategy.caches_transforms:
            stack.enter_context(_holding(self.layout.transforms))
        if isinstance(self.task, TakesTurns):
            stack.enter_context(self._turn(self.task.turn_of(step), step))
        return stack

    def after_step(
        self, step: int, recorded: Mapping[str, Tensor], log: Callable[[str, Any], None]
    ) -> Change | None:
        """Let a task that changes its model do so, before anything computes with it again."""
        if not isinstance(self.task, ChangesModel):
            return None
        change = self.task.after_step(self.model, self.context(step, recorded=recorded, log=log))
        if change is not None and change.keep:
            self._rebuild_optimizer(change)
        return change

    @contextlib.contextmanager
    def _turn(self, begins: str | tuple[str, ...], step: int) -> Iterator[None]:
        """Inside, only parameters whose names begin so get gradients."""
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        resting = [p for name, p in trained if not name.startswith(begins)]
        if len(resting) == len(trained):
            raise TrainingError(f"turn_of({step}): no parameter's name begins with {begins!r}")
        for p in resting:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in resting:
                p.requires_grad_(True)

    def make_strategy(self) -> None:
        """Wrap or shard the model for the phase, and make its optimizer."""
        task, plan = self.task, self.plan
        if isinstance(task, TakesTurns):
            if traits_of(plan.strategy).shards or isinstance(task, SparseTables):
                raise UserError(f"{TRAINS_A_PART} (turn_of): use --strategy ddp, without sparse tables")
            # DDP waits for the gradient of every parameter.
            plan = dataclasses.replace(plan, reduction="explicit")
        sparse = list(task.sparse_parameters(self.model)) if isinstance(task, SparseTables) else []
        self.strategy = strategy_class(plan.strategy)(
            self.model,
            lambda model: make_optimizer(task, model, plan.device, sparse),
            plan,
            self.world,
            self.recipe.clip,
            sparse,
        )
        self.layout.transforms = [m for m in self.model.modules() if isinstance(m, CachedWeightTransform)]

    def _rebuild_optimizer(self, change: Change) -> None:
        """After the task has pruned its model: make a new optimizer with the moments pruned alike."""
        moments, loss_scale = self.strategy.moments(), self.strategy.loss_scale()
        del self.strategy
        if self.world.size > 1:
            gc.collect()  # frees the old strategy, and DDP's hooks with it
        self.make_strategy()
        self.strategy.load_moments(cut_moments(moments, change.keep), loss_scale)


@contextlib.contextmanager
def _holding(transforms: Sequence[CachedWeightTransform]) -> Iterator[None]:
    for module in transforms:
        module.hold()
    complete = False
    try:
        yield
        complete = True
    finally:
        for module in transforms:
            module.release(complete)


def generator_states(device: torch.device) -> list[Tensor]:
    """Of torch's own generators."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def has_drawn(before: Sequence[Tensor], device: torch.device) -> bool:
    """Whether anything has drawn from torch's generators since `before`."""
    return any(not torch.equal(a, b) for a, b in zip(before, generator_states(device), strict=True))
