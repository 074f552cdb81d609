"""One optimizer step: forward and backward of all micro-batches, reduction, clipping, update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isobatch.core.errors import TrainingError
from isobatch.engine.loading.device_copies import HostCopy, array_to_device, numbers_to_device, to_device
from isobatch.engine.loading.loader import LoadedStep, StepWork
from isobatch.engine.noise.keyed_noise import NativeNoise
from isobatch.engine.training import loss_checks
from isobatch.models.base import CachedWeightTransform, Change, Loss, StepContext, Task

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.recipe import Recipe
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.loading.microbatching import MicroBatch
    from isobatch.engine.model_setup.packing import SamplePacking
    from isobatch.engine.noise.keyed_noise import KeyedNoise
    from isobatch.engine.strategies.base import Strategy


class Votes(NamedTuple):
    """What each rank asks for and reports; summed over the ranks together with a step's losses."""

    stop: float = 0.0
    """A stop was requested."""
    save: float = 0.0
    """A checkpoint is due by rank 0's clock."""
    written: float = 0.0
    """A checkpoint's share is written."""
    failed: float = 0.0
    """It could not be written."""


NO_VOTES = Votes()


@dataclass(slots=True)
class StepResult:
    """The result of a step. Read one step later, its figures cost no wait."""

    loaded: LoadedStep
    rate: float
    """Learning rate."""
    names: list[str]
    """Names of the losses."""
    sums: HostCopy
    """1-d: losses over their global weights, what loss() recorded, the votes; summed over ranks."""
    norm: HostCopy
    """0-d: norm of the whole reduced gradient before clipping."""
    recorded: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> what loss() recorded, summed over the global batch, on the device; parts of `sums`."""
    figures: dict[str, Any] = field(default_factory=dict)
    """What the task's `observe` returned about the gradients, and what its `after_step` logged."""
    change: Change | None = None
    """What the task's `after_step` changed in its model."""
    seconds: float = 0.0
    """From the end of the previous step to the end of this one, on the host's clock."""

    def votes(self) -> Votes:
        """The votes of all ranks; waits for the device."""
        return Votes(*self.sums.read()[-len(Votes._fields) :])

    def loss_and_norm(self) -> tuple[float, float]:
        """The sum of the losses, and the norm of the gradient; waits for the device."""
        return sum(self.sums.read()[: len(self.names)]), self.norm.read()[0]


@dataclass(slots=True)
class FirstStepFindings:
    """What the first step of a phase finds out for the later ones."""

    names: list[str] | None = None
    """Names of the losses, the same on all ranks."""
    recorded_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of what loss() records, the same on all ranks."""
    foreign_noise: bool | None = None
    """Whether the model draws from torch's own generators; None before the first forward pass."""


class Stepper:
    """Runs the optimizer steps of one phase on one rank."""

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
        self.findings = FirstStepFindings()
        self._recorded: dict[str, Tensor] = {}
        self._sum_dtype = torch.float32 if world.device.type == "mps" else torch.float64

    def run(self, loaded: LoadedStep, rate: float, votes: Votes = NO_VOTES) -> StepResult:
        """One optimizer step at learning rate `rate`. `votes` are summed over ranks with the losses."""
        figures: dict[str, float] = {}

        def observe() -> None:
            figures.update(self.task.observe(self.strategy.unwrapped, self.step_context(loaded.work.step)))

        norm = None
        while norm is None:
            names, sums = self.backward(loaded)
            with self.world.recorder.part("optimizer"):
                norm = self.strategy.step_optimizer(rate, observe)
        packed = torch.cat([sums, numbers_to_device(votes, sums.dtype, sums.device)])
        recorded = self._unpack_recorded(self.world.all_reduce_sum(packed))
        copies = HostCopy(packed), HostCopy(norm)
        return StepResult(loaded, rate, names, *copies, recorded, figures)

    def backward(self, loaded: LoadedStep) -> tuple[list[str], Tensor]:
        """Compute the gradients of this rank's micro-batches.

        Returns (names of the losses, 1-d tensor of this rank's share of each loss over its global weight,
        followed by what loss() recorded).
        """
        work, recorder = loaded.work, self.world.recorder
        parts: dict[str, Tensor] = {}
        self._recorded = {}
        with self.strategy.accumulate_gradients(), self._caching_transforms():
            for number, (micro, host) in enumerate(zip(work.micro_batches, loaded.batches, strict=True)):
                dummy = len(micro.positions) == 0
                if dummy and not self.strategy.computes_dummies:
                    continue
                self.world.mark_progress(
                    f"step {work.step + 1}, micro-batch {number + 1} of {len(work.micro_batches)}"
                )
                self._bind(work.step, host, number)
                with self.strategy.forward_backward(number == len(work.micro_batches) - 1):
                    with recorder.part("forward"):
                        losses = self._losses(host, work.step, micro.positions, 0.0 if dummy else 1.0)
                        total = self._total(losses, work, parts, 0.0 if dummy else 1.0)
                    with recorder.part("backward"):
                        self.strategy.backward(total)
                if number == 0 and self.findings.names is None:
                    self._refuse_means(losses, micro, host, work.step)
        if self.packing is not None:
            self.packing.bind(None)
        return self._pack(parts)

    def hand_over(self, step: int, host: dict[str, Tensor]) -> tuple[dict[str, Tensor], StepContext]:
        """(batch on the device, context) for the loss of the samples in `host`, with the step's noise."""
        self._bind(step, host, 0)
        positions = np.arange(len(host["index"]))
        return to_device(host, self.world.device), self.step_context(step, positions=positions, host=host)

    def losses_alone(self, loaded: LoadedStep) -> list[tuple[np.ndarray, dict[str, float]]]:
        """(places in the global batch, share of each loss of the step) of this rank's samples, or
        cohorts, each computed alone. Nothing that trains changes.
        """
        work, model, cohort = loaded.work, self.strategy.unwrapped, self.task.cohort
        found = []
        with self._preserving(model):
            for number, (micro, host) in enumerate(zip(work.micro_batches, loaded.batches, strict=True)):
                for start in range(0, len(micro.positions), cohort):
                    rows = slice(start, start + cohort)
                    part = {name: column[rows] for name, column in host.items()}
                    self._bind(work.step, part, number)
                    places = micro.positions[rows]
                    losses = self._losses(part, work.step, places, model=model)
                    found.append(
                        (places, {k: float(self._share(v, work.unit_weights)) for k, v in losses.items()})
                    )
        return found

    @contextlib.contextmanager
    def _preserving(self, model: nn.Module) -> Iterator[None]:
        """Inside, other samples may be bound and computed: nothing that trains changes."""
        noise = self.noise.preserve_state() if self.noise else contextlib.nullcontext()
        packing = self.packing.preserve_state() if self.packing else contextlib.nullcontext()
        with noise, packing, loss_checks.preserve_state(model, self.world.device):
            yield

    @contextlib.contextmanager
    def _caching_transforms(self) -> Iterator[None]:
        """Compute functions of weights, such as fake quantisation, once for all micro-batches."""
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

    def _losses(
        self,
        host: dict[str, Tensor],
        step: int,
        positions: np.ndarray,
        weight: float | None = None,
        model: nn.Module | None = None,
    ) -> dict[str, Loss]:
        """The losses of a micro-batch, by `model` or the strategy's. What loss() records is added with
        `weight`, or dropped if None.
        """
        batch = to_device(host, self.world.device)
        if not len(positions):  # a dummy, which counts nothing
            positions = np.zeros(1, np.int64)

        def record(name: str, value: Tensor) -> None:
            if weight is not None:
                share = value.detach().to(self._sum_dtype)
                share = share if weight == 1 else share * weight
                self._recorded[name] = self._recorded[name] + share if name in self._recorded else share

        with self.world.accelerator.autocast(), self._watching_generators():
            context = self.step_context(step, record=record, positions=positions, host=host)
            losses = self.task.loss(model or self.strategy.model, batch, context)
        loss_checks.check_loss_form(losses)
        return losses

    def _total(
        self, losses: dict[str, Loss], work: StepWork, parts: dict[str, Tensor], weight: float
    ) -> Tensor:
        """The micro-batch's share of the step's total loss; shares of each loss are added to `parts`."""
        total = torch.zeros((), device=self.world.device)
        for name, loss in losses.items():
            share = self._share(loss, work.unit_weights) * weight
            parts[name] = parts.get(name, torch.zeros_like(share.detach())) + share.detach()
            total = total + share
        return total

    def _refuse_means(
        self, losses: dict[str, Loss], micro: MicroBatch, host: dict[str, Tensor], step: int
    ) -> None:
        """In the first step: raise TrainingError unless the losses of a micro-batch's halves add up."""
        middle = loss_checks.middle_row(micro.positions, self.task.cohort)
        # With equal counts no rank may compute more than others; unkeyed noise differs at every forward.
        if not middle or self.strategy.equal_counts or self.findings.foreign_noise:
            return

        def compute(rows: slice) -> loss_checks.LossValues:
            part = {name: column[rows] for name, column in host.items()}
            self._bind_to(step, part)
            return loss_checks.loss_values(self._losses(part, step, micro.positions[rows]))

        with self.world.accelerator.autocast():
            half_precision = torch.is_autocast_enabled(self.world.device.type)
        with self._preserving(self.strategy.model):
            loss_checks.refuse_means(
                loss_checks.loss_values(losses), compute, middle, len(micro.positions), half_precision
            )

    def _pack(self, parts: dict[str, Tensor]) -> tuple[list[str], Tensor]:
        """Pack losses, then recorded sums, into one vector, in the same order on every rank.

        What a rank without samples has not seen is zero. Raises TrainingError where losses or recorded shapes
        differ from those of the first step.
        """
        if self.findings.names is None:
            self._agree_on_names(parts)
        assert self.findings.names is not None
        if new := set(parts) - set(self.findings.names):
            raise TrainingError(
                f"loss() returned {', '.join(new)} at a later step only: return all parts always"
            )
        shapes = self.findings.recorded_shapes
        if new := {name for name, v in self._recorded.items() if tuple(v.shape) != shapes.get(name)}:
            raise TrainingError(
                f"loss() recorded {', '.join(sorted(new))} at a later step only, or in another shape: record"
                " the same always"
            )
        dtype = self._sum_dtype
        losses = [(n, (), parts.get(n)) for n in self.findings.names]
        sums = [(n, shape, self._recorded.get(n)) for n, shape in shapes.items()]
        flat = [
            torch.zeros(math.prod(shape), dtype=dtype, device=self.world.device)
            if value is None
            else value.to(dtype).reshape(-1)
            for _, shape, value in (*losses, *sums)
        ]
        return self.findings.names, torch.cat(flat)

    def _agree_on_names(self, parts: dict[str, Tensor]) -> None:
        """In the first step: gather the names of losses and the shapes of what is recorded from all ranks."""
        own = (sorted(parts), {name: tuple(value.shape) for name, value in self._recorded.items()})
        gathered = self.world.all_gather_objects(own)
        self.findings.names = sorted({name for names, _ in gathered for name in names})
        self.findings.recorded_shapes = dict(
            sorted({k: v for _, shapes in gathered for k, v in shapes.items()}.items())
        )
        loss_checks.refuse_names(self.findings.names)

    def _unpack_recorded(self, packed: Tensor) -> dict[str, Tensor]:
        assert self.findings.names is not None
        found, offset = {}, len(self.findings.names)
        for name, shape in self.findings.recorded_shapes.items():
            found[name] = packed[offset : (offset := offset + math.prod(shape))].view(shape)
        return found

    def _share(self, loss: Loss, unit_weights: dict[str, float]) -> Tensor:
        """A loss over its unit's weight in the whole global batch; zero where that weight is zero."""
        if loss.unit not in unit_weights:
            raise TrainingError(
                f"loss() counts in {loss.unit!r}, and this data weighs {', '.join(unit_weights)}"
            )
        weight = unit_weights[loss.unit]
        return loss.sum * (1 / weight if weight else 0.0)

    def step_context(self, number: int, **more: Any) -> StepContext:
        """The context of a step for the task; `more`: the fields of `loss`, or those of `after_step`."""
        return StepContext(
            number,
            self.phase,
            self.noise or NativeNoise(),
            self.total_steps,
            self.world.broadcast_object,
            to_device=partial(array_to_device, device=self.world.device),
            **more,
        )

    def _bind(self, step: int, host: Mapping[str, Tensor], number: int) -> None:
        """Bind noise and packing to micro-batch `number` of a step, and seed torch's generators."""
        self._bind_to(step, host)
        if self.noise is None or self.findings.foreign_noise is not False:
            # Native noise: a resumed run draws the same as an uninterrupted one, and each rank draws its own.
            torch.manual_seed(hash((self.recipe.seed, step, self.world.rank, number)) & 0x7FFFFFFF)

    def _bind_to(self, step: int, host: Mapping[str, Tensor]) -> None:
        """Bind noise and packing to the samples in `host`."""
        if self.noise is not None:
            self.noise.bind(step, host["index"].numpy(), self.world.device)
        if self.packing is not None:
            self.packing.bind(host["length"].numpy())

    @contextlib.contextmanager
    def _watching_generators(self) -> Iterator[None]:
        """In the first forward pass: find out whether the model draws from torch's own generators."""
        if self.findings.foreign_noise is not None:
            yield
            return
        before = _generator_states(self.world.device)
        yield
        after = _generator_states(self.world.device)
        self.findings.foreign_noise = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
