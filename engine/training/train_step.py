"""One optimizer step: micro-batches in, reduced gradients, clip, update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from isobatch.core.errors import TrainingError
from isobatch.engine.loading.loader import LoadedStep, StepWork, to_device
from isobatch.engine.loading.microbatching import MicroBatch
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.engine.training import loss_checks
from isobatch.models.base import Batch, CachedWeightTransform, Change, Loss, StepContext, Task

if TYPE_CHECKING:
    from isobatch.core.recipe import Recipe
    from isobatch.engine.checkpointing import portable_state
    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.training.packing import SamplePacking


@dataclass(slots=True)
class StepResult:
    """What a step leaves behind, still on the device: read it one step later and nothing waits."""

    loaded: LoadedStep
    rate: float
    names: list[str]
    sums: Tensor
    """(len(names) + extra,): global loss sums over their weights, then the votes."""
    norm: Tensor
    """0-d: norm of the whole reduced gradient before clipping."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What the task saw of the gradients."""
    change: Change | None = None
    """What the task did to its model afterwards."""
    seconds: float = 0.0
    """From the end of the step before to the end of this one, as the host saw it."""


class Strategy(Protocol):
    """Who holds what of the model: how gradients become one update, and state becomes portable."""

    model: nn.Module
    raw: nn.Module
    """The model itself, whatever wraps it."""
    equal_counts: bool
    """Every rank must compute the same number of micro-batches, in training and evaluation."""

    @property
    def holds(self) -> bool:
        """Whether gradients may gather in what modules hold until the last micro-batch is through."""
        ...

    @property
    def computes_dummies(self) -> bool: ...
    def accumulating(self) -> AbstractContextManager[None]: ...
    def micro_batch(self, last: bool) -> AbstractContextManager[None]: ...
    def backward(self, loss: Tensor) -> None: ...
    def update(self, rate: float, observe: Callable[[], None] = ...) -> Tensor | None: ...
    def moments(self) -> portable_state.Moments: ...
    def put_moments(self, moments: portable_state.Moments, scaling: dict[str, Any]) -> None: ...
    def scaling(self) -> dict[str, Any]: ...
    def state(self) -> portable_state.PortableState: ...
    def put(self, saved: SavedCheckpoint, scaling: dict[str, Any] | None = None) -> None: ...
    def put_weights(self, saved: SavedCheckpoint, first: bool = False) -> None: ...
    def close(self) -> bool: ...


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
        of: int = 0,
        packing: SamplePacking | None = None,
    ) -> None:
        self.task, self.recipe, self.world, self.strategy = task, recipe, world, strategy
        self.noise, self.phase, self.of, self.packing = noise, phase, of, packing
        self.names: list[str] | None = None
        """Names of the losses, on all ranks the same."""
        self.foreign_noise: bool | None = None
        """Whether the model was seen to draw from torch's own generators, once it has been looked at."""

    def run(self, loaded: LoadedStep, rate: float, votes: list[float]) -> StepResult:
        """A whole step. `votes` are added up over the ranks beside the losses."""
        figures: dict[str, float] = {}

        def observe() -> None:
            figures.update(self.task.observe(self.strategy.raw, self.step_context(loaded.work.step)))

        norm = None
        while norm is None:
            names, sums = self.backward(loaded)
            norm = self.strategy.update(rate, observe)
        pulse = torch.cat([sums, torch.tensor(votes, dtype=sums.dtype, device=sums.device)])
        return StepResult(loaded, rate, names, self.world.all_reduce_sum(pulse), norm, figures)

    def backward(self, loaded: LoadedStep) -> tuple[list[str], Tensor]:
        """Gradients of this rank's share, and its share of each loss over the global weight."""
        work = loaded.work
        parts: dict[str, Tensor] = {}
        with self.strategy.accumulating(), self._holding():
            for place, (micro, host) in enumerate(zip(work.micro_batches, loaded.batches, strict=True)):
                dummy = len(micro.positions) == 0
                if dummy and not self.strategy.computes_dummies:
                    continue
                batch = to_device(host, self.world.device)
                self.world.mark_progress(
                    f"step {work.step + 1}, micro-batch {place + 1} of {len(work.micro_batches)}"
                )
                self._bind(work.step, host, place)
                with self.strategy.micro_batch(place == len(work.micro_batches) - 1):
                    losses = self._losses(batch, work.step)
                    self.strategy.backward(self._total(losses, work, parts, 0.0 if dummy else 1.0))
                if place == 0 and self.names is None:
                    self._refuse_means(losses, micro, host, work.step)
        if self.packing is not None:
            self.packing.bind(None)
        return self._pack(parts)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        """What modules make of their weights is made once for all micro-batches."""
        held = (
            [m for m in self.strategy.raw.modules() if isinstance(m, CachedWeightTransform)]
            if self.strategy.holds
            else []
        )
        for module in held:
            module.hold()
        whole = False
        try:
            yield
            whole = True
        finally:
            for module in held:
                module.release(whole)

    def _losses(self, batch: Batch, step: int) -> dict[str, Loss]:
        with self.world.accelerator.autocast(), self._watching_generators():
            losses = self.task.loss(self.strategy.model, batch, self.step_context(step))
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
        if not middle or self.strategy.equal_counts or self.foreign_noise:
            return

        def compute(rows: slice) -> loss_checks.LossValues:
            part = {name: column[rows] for name, column in host.items()}
            self._bind_to(step, part)
            return loss_checks.loss_values(self._losses(to_device(part, self.world.device), step))

        with self.world.accelerator.autocast():
            halved = torch.is_autocast_enabled(self.world.device.type)
        aside = self.noise.preserve_state() if self.noise else contextlib.nullcontext()
        packing = self.packing.preserve_state() if self.packing else contextlib.nullcontext()
        with aside, packing, loss_checks.leaving_no_trace(self.strategy.model, self.world.device):
            loss_checks.refuse_means(
                loss_checks.loss_values(losses), compute, middle, len(micro.positions), halved
            )

    def _pack(self, parts: dict[str, Tensor]) -> tuple[list[str], Tensor]:
        """The parts in one order on every rank; a rank with nothing to do has seen none of them."""
        if self.names is None:
            self.names = sorted(
                {name for names in self.world.all_gather_objects(sorted(parts)) for name in names}
            )
            loss_checks.refuse_names(self.names)
        if odd := set(parts) - set(self.names):
            raise TrainingError(
                f"loss() returned {', '.join(odd)} at a later step only: return all parts always"
            )
        wide = torch.float32 if self.world.device.type == "mps" else torch.float64
        zero = torch.zeros((), dtype=wide, device=self.world.device)
        return self.names, torch.stack([parts[n].to(wide) if n in parts else zero for n in self.names])

    def _share(self, loss: Loss, totals: dict[str, float]) -> Tensor:
        """A part over its weight in the whole global batch; a batch that weighs nothing teaches nothing."""
        if loss.unit not in totals:
            raise TrainingError(f"loss() counts in {loss.unit!r}, and this data weighs {', '.join(totals)}")
        weight = totals[loss.unit]
        return loss.sum * (1 / weight if weight else 0.0)

    def step_context(self, number: int) -> StepContext:
        """What the task may know of a step."""
        noise = self.noise or NativeNoise(self.world.device)
        return StepContext(number, self.phase, noise, self.of, self.world.broadcast_object)

    def _bind(self, step: int, host: Mapping[str, Tensor], place: int) -> None:
        self._bind_to(step, host)
        if self.noise is None or self.foreign_noise is not False:
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
        if self.foreign_noise is not None:
            yield
            return
        before = _generator_states(self.world.device)
        yield
        after = _generator_states(self.world.device)
        self.foreign_noise = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


class NativeNoise:
    """Draws for tasks when the recipe chose native noise."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def _refuse(self, site: str, *_: Any) -> Tensor:
        raise TrainingError(f"this task draws noise ({site}) of its own: use --noise keyed")

    uniform = normal = integers = _refuse


def checkpoint_activations(model: nn.Module, keyed: bool) -> int:
    """Recompute each block of the outermost layer lists in the backward pass; returns how many blocks.

    Keyed noise needs no generator state: the same key gives the same mask again.
    """
    import functools

    from torch.utils.checkpoint import checkpoint

    inside: set[int] = set()
    wrapped = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside.update(id(m) for m in module.modules())
            for block in module:
                block.forward = functools.partial(
                    checkpoint, block.forward, use_reentrant=False, preserve_rng_state=not keyed
                )
                wrapped += 1
    return wrapped
