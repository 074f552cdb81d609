"""The Strategy contract: how the processes hold the model, and how gradients become one update.

A strategy is made for one phase by all ranks alike and closed at the phase's end. It is a subclass of
`Strategy` in a file of its own, and an entry of `core.strategies.STRATEGIES`, whose traits everything else
asks. One optimizer step calls, in this order:

    with strategy.accumulate_gradients():
        for every micro-batch:
            with strategy.forward_backward(last):
                loss = ...                     # through strategy.model
                strategy.backward(loss)
    norm = strategy.step_optimizer(rate)
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isobatch.core.errors import TrainingError
from isobatch.core.package import load
from isobatch.core.plan import Plan
from isobatch.core.strategies import traits_of
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, SharedReader
from isobatch.engine.checkpointing.portable_state import HOOK, WEIGHT, Held, TensorEntry, TensorPiece
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.optimization.parameter_groups import SHARE

MakeOptimizer = Callable[["nn.Module"], "Optimizer"]
HookTensors = Mapping[str, Mapping[str, Tensor]]
"""Hook's name -> parameter's name -> a tensor of the shape that `Strategy.held` gives."""


class Strategy(ABC):
    """How one rank holds a model while a phase trains it."""

    model: nn.Module
    """The module that computes a loss: the task's model, or a wrapper of it."""
    unwrapped: nn.Module
    """The task's model itself."""
    plan: Plan
    """The plan when the phase began."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        plan: Plan,
        world: Communicator,
        clip: float,
        sparse: Sequence[nn.Parameter] = (),
    ) -> None:
        """Take hold of `model`.

        `make_optimizer` is called with the model whose parameters are to be stepped. `clip`: largest norm of
        the whole gradient, 0 for none. `sparse`: embedding tables whose gradients and updates are of the rows
        that were read; the planner gives them to strategies that shard nothing.
        """
        self.model = self.unwrapped = model
        self.plan, self.world, self.clip = plan, world, clip
        self.sparse = [p for p in sparse if p.requires_grad]
        self.begin(make_optimizer)

    @abstractmethod
    def begin(self, make_optimizer: MakeOptimizer) -> None:
        """Wrap or shard `self.model`, and make the optimizer; the end of `__init__`."""

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that train, by name."""
        return ((name, p) for name, p in self.unwrapped.named_parameters() if p.requires_grad)

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a checkpoint holds."""
        changing = portable_state.changing_tensors(self.unwrapped)
        return {name: t for name, t in changing if not isinstance(t, nn.Parameter)}

    def buffer_state(self) -> tuple[dict[str, TensorEntry], list[TensorPiece]]:
        """The entries of the buffers, and on rank 0 their pieces, for strategies that shard weights."""
        buffers = {WEIGHT + name: buffer for name, buffer in self.buffers().items()}
        pieces = [TensorPiece(n, 0, b.reshape(-1)) for n, b in buffers.items() if self.world.is_main]
        return {name: portable_state.tensor_entry(b) for name, b in buffers.items()}, pieces

    def parts(self) -> Iterator[Held]:
        """What this rank holds of each parameter that trains; all of it, where weights are not sharded."""
        return (Held(name, tuple(p.shape), 0, p.detach()) for name, p in self.trained())

    def held(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter's name, values) of `parts`, to be read: the shapes that a hook's tensors have."""
        return ((part.name, part.values) for part in self.parts())

    def set_held(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Write into what this rank holds of these parameters. No collectives."""
        mine = dict(self.held())
        for name, tensor in values:
            mine[name].copy_(tensor)

    @contextlib.contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within it the model has these as its weights, for an evaluation; then its own again, bit for bit.

        A copy of the weights is kept meanwhile, where gradients have their memory in a step. On all ranks.
        """
        own = [(name, values.clone()) for name, values in self.held() if name in tensors]
        try:
            self.set_held(tensors.items())
            yield
        finally:
            self.set_held(own)

    @property
    def equal_counts(self) -> bool:
        """Every rank must compute the same number of micro-batches, in training and evaluation."""
        return traits_of(self.plan.strategy).equal_counts

    @property
    def computes_dummies(self) -> bool:
        """A micro-batch of weight zero must be computed, for the collectives in its passes."""
        return self.equal_counts

    @property
    def caches_transforms(self) -> bool:
        """Gradients may gather on outputs of `CachedWeightTransform` modules until the last micro-batch."""
        return False

    def accumulate_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Around all micro-batches of a step. Leaving it by an error must start no collective."""
        return contextlib.nullcontext()

    def forward_backward(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Around one micro-batch; `last` says that no other follows in this step."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this micro-batch's share: over ranks and micro-batches shares are SUMMED."""
        loss.backward()

    @abstractmethod
    def step_optimizer(self, rate: float, observe: Callable[[], None] | None = None) -> Tensor | None:
        """Reduce, clip and update at learning rate `rate`; gradients are then gone.

        Returns the norm of the whole gradient before clipping (0-d, on the device), or None where fp16
        overflowed and the step must be computed again. `observe` is called when gradients are whole, before
        they are clipped; strategies that shard gradients do not call it.
        """

    def collect_state(self, extra: HookTensors = MappingProxyType({})) -> portable_state.PortableState:
        """This rank's share of all that training changes: weights, buffers, moments. No collectives.

        `extra`: what hooks want saved beside them, dealt as weights are; what every rank has whole each
        writes an equal part of. Raises TrainingError where those have other shapes.
        """
        found = self.own_state()
        parts = {part.name: part for part in self.parts()} if extra else {}
        for hook, name, tensor in ((h, n, t) for h, tensors in extra.items() for n, t in tensors.items()):
            part, key = parts.get(name), f"{HOOK}{hook}/{name}"
            if part is None or tensor.shape != part.values.shape:
                wanted = f"held as {tuple(part.values.shape)}" if part else "no parameter that trains"
                raise TrainingError(f"hook {hook}: has {tuple(tensor.shape)} for {name}, which is {wanted}")
            found.entries[key] = dataclasses.replace(portable_state.tensor_entry(tensor), shape=part.shape)
            found.pieces.extend(self.saved_share(key, part.start, tensor))
        return found

    def saved_share(self, key: str, start: int, values: Tensor) -> list[TensorPiece]:
        """What this rank saves of values that it holds from element `start` on: all, or an equal part where
        other ranks hold the same.
        """
        rank, size, copies = self.world.rank, self.world.size, self.plan.mesh[0]
        shards = traits_of(self.plan.strategy).shards_weights
        number, holders = (rank * copies // size, copies) if shards else (rank, size)
        flat = values.detach().reshape(-1)
        first, stop = (flat.numel() * n // holders for n in (number, number + 1))
        return [TensorPiece(key, start + first, flat[first:stop])] if first < stop else []

    @abstractmethod
    def own_state(self) -> portable_state.PortableState:
        """As `collect_state`, without hooks: made anew, as what hooks hold is added to it."""

    def read_held(self, saved: SavedCheckpoint, hook: str) -> dict[str, Tensor]:
        """This rank's part of what a hook had saved, under any strategy and world; on all ranks.

        Raises TrainingError where shapes are not this model's.
        """
        return dict(self._read_parts(saved, f"{HOOK}{hook}/"))

    def _read_parts(self, saved: SavedCheckpoint, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """(parameter's name, this rank's part) of the saved tensors PREFIX + NAME that there are."""
        there = ((part, prefix + part.name) for part in self.parts())
        return ((part.name, self.read_part(saved, k, part)) for part, k in there if k in saved.entries)

    def read_part(self, saved: SavedCheckpoint, key: str, part: Held) -> Tensor:
        """The elements of a saved tensor that this rank holds of a parameter, on its device."""
        if (shape := saved.entries[key].shape) != part.shape:
            raise TrainingError(f"the checkpoint's {key} has shape {shape}, and this model's {part.shape}")
        if traits_of(self.plan.strategy).shards_weights:
            stop = part.start + part.values.numel()
            found = saved.read_slice(key, part.start, stop).view(part.values.shape)
        else:
            found = SharedReader(saved, self.world).read(key)
        return found.to(part.values.device)

    @abstractmethod
    def restore(self, saved: SavedCheckpoint, loss_scale: dict[str, Any] | None = None) -> None:
        """Load weights, buffers and moments from a checkpoint that any strategy and world wrote.

        Raises TrainingError where names or shapes are not this model's.
        """

    @torch.no_grad()
    def load_weights(self, saved: SavedCheckpoint, new_phase: bool = False) -> None:
        """Load weights and buffers alone.

        `new_phase`: the checkpoint is the phase before's; parameters that train only now are not in it and
        stay as they were built.
        """
        buffers = self.buffers()
        shapes = {part.name: part.shape for part in self.parts()}
        shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
        known = portable_state.saved_weight_names(saved) if new_phase else set(shapes)
        portable_state.check_shapes(saved, {name: shape for name, shape in shapes.items() if name in known})
        whole = SharedReader(saved, self.world)
        for name, buffer in buffers.items():
            buffer.copy_(whole.read(WEIGHT + name))
        self.set_held(self._read_parts(saved, WEIGHT))

    def loss_scale(self) -> dict[str, Any]:
        """fp16's loss scale as JSON; nothing where there is none."""
        return {}

    def moments(self) -> portable_state.Moments:
        """The optimizer's state by the names that parameters had when the phase began.

        Only for strategies that shard nothing: a task that changes its model's shape needs them.
        """
        raise NotImplementedError

    def load_moments(self, moments: portable_state.Moments, loss_scale: dict[str, Any]) -> None:
        """Go on from another optimizer's `moments()` and `loss_scale()`."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  for those that need it
        """Let go of the model. Traits say whether it is destroyed by that (`ends_model`)."""


def strategy_class(name: str) -> type[Strategy]:
    """The class behind a strategy's name."""
    return cast("type[Strategy]", load(traits_of(name).implementation))


def set_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of a step: of groups with a rate of their own in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(SHARE, 1.0)


BLOCK = 1 << 16
"""Values of which torch takes a norm at a time on a CPU."""


def gradient_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-d: 2-norm of all gradients together, on `device`; zero where there are none.

    On a CPU torch adds the squares of a tensor one after another in fp32: the norm of 10 million values was
    off by 4e-4, that of 50 million by 4e-3. From blocks it is off by 2e-7, in the same time.
    """
    if not gradients:
        return torch.zeros((), device=device)
    if device.type != "cpu":
        return nn.utils.get_total_norm(gradients)
    return nn.utils.get_total_norm([block for g in gradients for block in _blocks(g)])


def _blocks(gradient: Tensor) -> Sequence[Tensor]:
    """Splitting costs a small one more than its norm."""
    if gradient.numel() <= BLOCK and gradient.is_contiguous():
        return (gradient,)
    return gradient.reshape(-1).split(BLOCK)
