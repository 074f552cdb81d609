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
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from isobatch.core.strategies import traits_of
from isobatch.engine.checkpointing import portable_state

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from isobatch.core.plan import Plan
    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
    from isobatch.engine.distributed.communicator import Communicator

MakeOptimizer = Callable[["nn.Module"], "Optimizer"]


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

    def loaded_names(
        self, saved: SavedCheckpoint, new_phase: bool, shapes: dict[str, tuple[int, ...]]
    ) -> set[str]:
        """Those that `load_weights` reads; raises TrainingError where their shapes are not `shapes`."""
        known = portable_state.saved_weight_names(saved) if new_phase else set(shapes)
        portable_state.check_shapes(saved, {name: shape for name, shape in shapes.items() if name in known})
        return known

    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a checkpoint holds."""
        changing = portable_state.changing_tensors(self.unwrapped)
        return {name: t for name, t in changing if not isinstance(t, nn.Parameter)}

    def local_weights(self) -> Iterable[Tensor]:
        """What this rank holds of the weights."""
        return self.unwrapped.parameters()

    @property
    def equal_counts(self) -> bool:
        """Every rank must compute the same number of micro-batches, in training and evaluation."""
        return traits_of(self.plan.strategy).equal_counts

    @property
    def computes_dummies(self) -> bool:
        """A micro-batch of weight zero must be computed, for the collectives in its passes."""
        return self.equal_counts

    @property
    def why_not_overlapped(self) -> str:
        """After the first step: why gradients are reduced after the backward pass all the same."""
        return ""

    @property
    def caches_transforms(self) -> bool:
        """Gradients may gather on outputs of `CachedWeightTransform` modules until the last micro-batch."""
        return False

    def accumulate_gradients(self) -> AbstractContextManager[None]:
        """Around all micro-batches of a step. Leaving it by an error must start no collective."""
        return contextlib.nullcontext()

    def forward_backward(self, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch; `last` says that no other follows in this step."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this micro-batch's share: over ranks and micro-batches shares are SUMMED."""
        loss.backward()

    @abstractmethod
    def step_optimizer(self, rate: float, observe: Callable[[], None] = lambda: None) -> Tensor | None:
        """Reduce, clip and update at learning rate `rate`; gradients are then gone.

        Returns the norm of the whole gradient before clipping (0-d, on the device), or None where fp16
        overflowed and the step must be computed again. `observe` is called when gradients are whole, before
        they are clipped; strategies that shard gradients do not call it.
        """

    @abstractmethod
    def collect_state(self) -> portable_state.PortableState:
        """This rank's share of all that training changes: weights, buffers, moments. No collectives."""

    @abstractmethod
    def restore(self, saved: SavedCheckpoint, loss_scale: dict[str, Any] | None = None) -> None:
        """Load weights, buffers and moments from a checkpoint that any strategy and world wrote.

        Raises TrainingError where names or shapes are not this model's.
        """

    @abstractmethod
    def load_weights(self, saved: SavedCheckpoint, new_phase: bool = False) -> None:
        """Load weights and buffers alone.

        `new_phase`: the checkpoint is the phase before's; parameters that train only now are not in it and
        stay as they were built.
        """

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

    def close(self) -> None:
        """Let go of the model. Traits say whether it is destroyed by that (`ends_model`)."""
        return


def strategy_class(name: str) -> type[Strategy]:
    """The class behind a strategy's name."""
    module, _, found = traits_of(name).implementation.partition(":")
    return cast("type[Strategy]", getattr(importlib.import_module(f"isobatch.{module}"), found))


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
    return nn.utils.get_total_norm([block for g in gradients for block in g.reshape(-1).split(BLOCK)])
