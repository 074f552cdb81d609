"""One optimizer step: micro-batches in, reduced gradients, clip, update."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isobatch.core.errors import TrainingError
from isobatch.engine.loading.loader import LoadedStep, StepWork, to_device
from isobatch.engine.noise.native_noise import NativeNoise
from isobatch.engine.training import loss_checks
from isobatch.models.base import Batch, CachedWeightTransform, Change, Loss, StepContext, Task

if TYPE_CHECKING:
    from isobatch.core.recipe import Recipe
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.loading.microbatching import MicroBatch
    from isobatch.engine.model_setup.packing import SamplePacking
    from isobatch.engine.noise.keyed_noise import KeyedNoise
    from isobatch.engine.strategies.base import Strategy


@dataclass(slots=True)
class StepResult:
    """What a step leaves behind, still on the device: read it one step later and nothing waits."""

    loaded: LoadedStep
    rate: float
    names: list[str]
    sums: Tensor
    """1-d: losses over their global weights, what loss() recorded, the rank flags; summed over ranks."""
    norm: Tensor
    """0-d: norm of the whole reduced gradient before clipping."""
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> what loss() recorded, summed over the global batch; views of `sums`."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the task saw of the gradients."""
    change: Change | None = None
    """What the task did to its model afterwards."""
    seconds: float = 0.0
    """From the end of the step before to the end of this one, as the host saw it."""


@dataclass(slots=True)
class FirstStepFindings:
    """What the first step of a phase shows, for the steps after it."""

    names: list[str] | None = None
    """Names of the losses, on all ranks the same."""
    recorded_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of what loss() records, on all ranks the same."""
    foreign_noise: bool | None = None
    """Whether the model was seen to draw from torch's own generators, once it has been looked at."""


class Stepper:
    """Runs steps of one phase on one rank."""

    def __init__(
        self,
        task: Task,
        recipe: Recipe,
        world: Communicator,
        strategy: Strategy,
        noise: KeyedNoise | None,
        phase: str,
        total_steps: int = 0,
        packing: SamplePacking | None = None,
    ) -> None:
        self.task, self.recipe, self.world, self.strategy = task, recipe, world, strategy
        self.noise, self.phase, self.total_steps, self.packing = noise, phase, total_steps, packing
        self.learnt = FirstStepFindings()
        self._recorded: dict[str, Tensor] = {}

    def run(self, loaded: LoadedStep, rate: float, rank_flags: list[float]) -> StepResult:
        """A whole step. `rank_flags` are summed over the ranks in the losses' reduction."""
        figures: dict[str, float] = {}

        def observe() -> None:
            figures.update(self.task.observe(self.strategy.unwrapped, self.step_context(loaded.work.step)))

        norm = None
        while norm is None:
            names, sums = self.backward(loaded)
            norm = self.strategy.step_optimizer(rate, observe)
        flags = torch.tensor(rank_flags, dtype=sums.dtype, device=sums.device)
        packed_metrics = self.world.all_reduce_sum(torch.cat([sums, flags]))
        recorded = self._unpack_recorded(packed_metrics)
        return StepResult(loaded, rate, names, packed_metrics, norm, recorded, figures)

    def backward(self, loaded: LoadedStep) -> tuple[list[str], Tensor]:
        """Gradients of this rank's share; the names of the losses, and this rank's share of each loss over
        its global weight, followed by what loss() recorded."""
        work = loaded.work
        parts: dict[str, Tensor] = {}
        self._recorded = {}
        with self.strategy.accumulate_gradients(), self._caching_transforms():
            for place, (micro, host) in enumerate(zip(work.micro_batches, loaded.batches, strict=True)):
                dummy = len(micro.positions) == 0
                if dummy and not self.strategy.computes_dummies:
                    continue
                batch = to_device(host, self.world.device)
                self.world.mark_progress(
                    f"step {work.step + 1}, micro-batch {place + 1} of {len(work.micro_batches)}"
                )
                self._bind(work.step, host, place)
                with self.strategy.forward_backward(place == len(work.micro_batches) - 1):
                    losses = self._losses(batch, work.step, 0.0 if dummy else 1.0)
                    self.strategy.backward(self._total(losses, work, parts, 0.0 if dummy else 1.0))
                if place == 0 and self.learnt.names is None:
                    self._refuse_means(losses, micro, host, work.step)
        if self.packing is not None:
            self.packing.bind(None)
        return self._pack(parts)

    @contextlib.contextmanager
    def _caching_transforms(self) -> Iterator[None]:
        """Functions of weights, such as fake quantisation, are computed once for all micro-batches."""
        caching = (
            [m for m in self.strategy.unwrapped.modules() if isinstance(m, CachedWeightTransform)]
            if self.strategy.caches_transforms
            else []
        )
        for module in caching:
            module.hold()
        complete = False
        try:
            yield
            complete = True
        finally:
            for module in caching:
                module.release(complete)

    def _losses(self, batch: Batch, step: int, weight: float | None = None) -> dict[str, Loss]:
        """The micro-batch's losses. What is recorded counts with `weight`; without one it is forgotten."""

        def record(name: str, value: Tensor) -> None:
            share = value.detach() * weight if weight is not None else None
            if share is not None:
                self._recorded[name] = self._recorded[name] + share if name in self._recorded else share

        context = dataclasses.replace(self.step_context(step), record=record)
        with self.world.accelerator.autocast(), self._watching_generators():
            losses = self.task.loss(self.strategy.model, batch, context)
        loss_checks.refuse_other_forms(losses)
        return losses

    def _total(
        self, losses: dict[str, Loss], work: StepWork, parts: dict[str, Tensor], weight: float
    ) -> Tensor:
        """The micro-batch's share of the step's loss, added by name to `parts`."""
        total = torch.zeros((), device=self.world.device)
        for name, loss in losses.items():
            share = self._share(loss, work.unit_weights) * weight
            parts[name] = parts.get(name, torch.zeros_like(share.detach())) + share.detach()
            total = total + share
        return total

    def _refuse_means(
        self, losses: dict[str, Loss], micro: MicroBatch, host: dict[str, Tensor], step: int
    ) -> None:
        """In the first step: a micro-batch's losses must be those of its two halves together."""
        middle = loss_checks.middle_row(micro.positions, self.task.cohort)
        # Ranks of equal counts must not compute more than the others; noise unkeyed differs by itself.
        if not middle or self.strategy.equal_counts or self.learnt.foreign_noise:
            return

        def compute(rows: slice) -> loss_checks.LossValues:
            part = {name: column[rows] for name, column in host.items()}
            self._bind_to(step, part)
            return loss_checks.loss_values(self._losses(to_device(part, self.world.device), step))

        with self.world.accelerator.autocast():
            halved = torch.is_autocast_enabled(self.world.device.type)
        noise = self.noise.preserve_state() if self.noise else contextlib.nullcontext()
        packing = self.packing.preserve_state() if self.packing else contextlib.nullcontext()
        with noise, packing, loss_checks.leaving_no_trace(self.strategy.model, self.world.device):
            loss_checks.refuse_means(
                loss_checks.loss_values(losses), compute, middle, len(micro.positions), halved
            )

    def _pack(self, parts: dict[str, Tensor]) -> tuple[list[str], Tensor]:
        """Losses, then recorded sums, in one order on every rank; a rank without work has seen none."""
        if self.learnt.names is None:
            self._agree_on_names(parts)
        assert self.learnt.names is not None
        if odd := set(parts) - set(self.learnt.names):
            raise TrainingError(
                f"loss() returned {', '.join(odd)} at a later step only: return all parts always"
            )
        shapes = self.learnt.recorded_shapes
        if odd := {name for name, v in self._recorded.items() if tuple(v.shape) != shapes.get(name)}:
            raise TrainingError(
                f"loss() recorded {', '.join(sorted(odd))} at a later step only, or in another shape: record"
                " the same always"
            )
        wide = torch.float32 if self.world.device.type == "mps" else torch.float64
        losses = [(n, (), parts.get(n)) for n in self.learnt.names]
        sums = [(n, shape, self._recorded.get(n)) for n, shape in shapes.items()]
        flat = [
            torch.zeros(math.prod(shape), dtype=wide, device=self.world.device)
            if value is None
            else value.to(wide).reshape(-1)
            for _, shape, value in (*losses, *sums)
        ]
        return self.learnt.names, torch.cat(flat)

    def _agree_on_names(self, parts: dict[str, Tensor]) -> None:
        """In the first step: every rank learns the names of all, and the shapes of what is recorded."""
        mine = (sorted(parts), {name: tuple(value.shape) for name, value in self._recorded.items()})
        every = self.world.all_gather_objects(mine)
        self.learnt.names = sorted({name for names, _ in every for name in names})
        self.learnt.recorded_shapes = dict(
            sorted({k: v for _, shapes in every for k, v in shapes.items()}.items())
        )
        loss_checks.refuse_names(self.learnt.names)

    def _unpack_recorded(self, packed: Tensor) -> dict[str, Tensor]:
        assert self.learnt.names is not None
        sizes = [math.prod(shape) for shape in self.learnt.recorded_shapes.values()]
        pieces = (
            packed[len(self.learnt.names) : len(self.learnt.names) + sum(sizes)].split(sizes) if sizes else ()
        )
        return {
            name: piece.view(shape)
            for (name, shape), piece in zip(self.learnt.recorded_shapes.items(), pieces, strict=True)
        }

    def _share(self, loss: Loss, totals: dict[str, float]) -> Tensor:
        """A part over its weight in the whole global batch; a batch that weighs nothing teaches nothing."""
        if loss.unit not in totals:
            raise TrainingError(f"loss() counts in {loss.unit!r}, and this data weighs {', '.join(totals)}")
        weight = totals[loss.unit]
        return loss.sum * (1 / weight if weight else 0.0)

    def step_context(self, number: int, recorded: Mapping[str, Tensor] | None = None) -> StepContext:
        """The task's context of a step; `recorded` where it is over."""
        return StepContext(
            number,
            self.phase,
            self.noise or NativeNoise(),
            self.total_steps,
            self.world.broadcast_object,
            recorded=recorded or {},
        )

    def _bind(self, step: int, host: Mapping[str, Tensor], place: int) -> None:
        self._bind_to(step, host)
        if self.noise is None or self.learnt.foreign_noise is not False:
            # At least a resumed run draws what an undisturbed one would, and no two ranks draw alike.
            torch.manual_seed(hash((self.recipe.seed, step, self.world.rank, place)) & 0x7FFFFFFF)

    def _bind_to(self, step: int, host: Mapping[str, Tensor]) -> None:
        """Noise and packing are those of the samples in `host`."""
        if self.noise is not None:
            self.noise.bind(step, host["index"].numpy(), self.world.device)
        if self.packing is not None:
            self.packing.bind(host["length"].numpy())

    @contextlib.contextmanager
    def _watching_generators(self) -> Iterator[None]:
        """Find out, in the first forward, whether the model draws from torch's own generators."""
        if self.learnt.foreign_noise is not None:
            yield
            return
        before = _generator_states(self.world.device)
        yield
        after = _generator_states(self.world.device)
        self.learnt.foreign_noise = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
