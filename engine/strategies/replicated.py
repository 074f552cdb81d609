"""The whole model on every process: alone, reduced explicitly, or in DDP."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isobatch.core.errors import TrainingError
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.strategies.base import MakeOptimizer, Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from isobatch.core.plan import Plan
    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
    from isobatch.engine.distributed.communicator import Communicator

SCALE_START = 2.0**16
SCALE_LEAST = 2.0**-10
SCALE_PATIENCE = 2000
"""Good steps after which an fp16 loss scale doubles."""


class ReplicatedStrategy(Strategy):
    """Gradients, update and state of a model that each process holds whole."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        plan: Plan,
        world: Communicator,
        clip: float,
        sparse: Sequence[nn.Parameter] = (),
    ) -> None:
        self.unwrapped, self.plan, self.world, self.clip = model, plan, world, clip
        self.optimizer = make_optimizer(model)
        self.named = dict(model.named_parameters())
        self.model = model
        self.sparse = [p for p in sparse if p.requires_grad]
        """Tables whose gradients and updates are of the rows that were read."""
        apart = {id(p) for p in self.sparse}
        self.trained = [p for p in model.parameters() if p.requires_grad and id(p) not in apart]
        self.overlapped = False
        """Step 0 reduces explicitly: DDP follows only if every parameter received a gradient in it."""
        self._reduces = False
        self.undecided = plan.reduction == "overlapped" and world.size > 1 and not self.sparse
        self.tables: dict[nn.Parameter, Tensor] = {}
        self._gather_rows(plan.device == "cpu" and plan.compile == "off")
        self.scale = SCALE_START if plan.precision == "fp16" else 1.0
        self.good_steps = 0

    def _gather_rows(self, yes: bool) -> None:
        """Embeddings' gradients as the rows that were read: a table for each micro-batch costs a CPU more."""
        sparse = {id(p) for p in self.sparse}
        for module in self.unwrapped.modules():
            if isinstance(module, nn.Embedding) and not module.scale_grad_by_freq:
                module.sparse = yes or id(module.weight) in sparse

    @property
    def caches_transforms(self) -> bool:
        """Not where backwards reduce, and so need each weight's gradient, nor in a compiled graph."""
        return not self.computes_dummies and self.plan.compile == "off"

    @property
    def computes_dummies(self) -> bool:
        """DDP's reduction runs in the last backward pass."""
        return self.overlapped

    def accumulate_gradients(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def forward_backward(self, last: bool) -> Iterator[None]:
        self._reduces = self.overlapped and last
        if self.overlapped and not last:
            with self.model.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def backward(self, loss: Tensor) -> None:
        scaled = loss * (self.scale * (self.world.size if self.overlapped else 1))
        with self.world.waiting_for("DDP's reduction") if self._reduces else contextlib.nullcontext():
            scaled.backward()

    def step_optimizer(self, rate: float, observe: Callable[[], None] = lambda: None) -> Tensor | None:
        norm = self.reduce()
        if self.plan.precision == "fp16" and self._overflowed(norm):
            return None
        observe()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.clip:
            nn.utils.clip_grads_with_norm_(self.trained, self.clip, norm)
            for rows in self._rows():
                rows.mul_((self.clip / (norm + 1e-6)).clamp_max(1.0))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def reduce(self) -> Tensor:
        """The whole gradient, summed over ranks and unscaled, and its norm."""
        if not self.overlapped:
            self._place_rows()
            everything_used = self.world.all_reduce_gradients(self.trained)
            for p in self.sparse:
                if p.grad is not None or self.world.size > 1:
                    p.grad = self.world.all_reduce_sparse(p)
            if self.undecided:
                self.undecided, self.overlapped = False, everything_used
                if everything_used:
                    self._gather_rows(False)
                    self.model = self.world.wrap_in_ddp(self.unwrapped)
        gradients = [p.grad for p in self.trained if p.grad is not None] + self._rows()
        if self.scale != 1:
            torch._foreach_mul_(gradients, 1 / self.scale)
        return nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self.world.device)

    def _rows(self) -> list[Tensor]:
        """The gradients of the sparse tables' rows."""
        # values() and indices() refuse uncoalesced gradients.
        return [p.grad._values() for p in self.sparse if p.grad is not None]  # noqa: SLF001

    def _place_rows(self) -> None:
        """Scatter-add rows' gradients into a reused buffer: page faults of new memory cost more."""
        for p in self.trained:
            if p.grad is not None and p.grad.is_sparse:
                if p not in self.tables:
                    self.tables[p] = torch.empty_like(p)
                rows, values = p.grad._indices()[0], p.grad._values()  # noqa: SLF001  as in _rows
                p.grad = self.tables[p].zero_().index_add_(0, rows, values)

    def _overflowed(self, norm: Tensor) -> bool:
        """fp16: void the attempt, halve the scale and redo the same step, so that the schedule stays true."""
        if math.isfinite(norm.item()):
            self.good_steps += 1
            if self.good_steps % SCALE_PATIENCE == 0:
                self.scale *= 2
            return False
        self.scale, self.good_steps = self.scale / 2, 0
        for p in (*self.trained, *self.sparse):
            p.grad = None
        if self.scale < SCALE_LEAST:
            raise TrainingError(
                "fp16 gradients overflow at every loss scale: lower --lr, or use --precision fp32"
            )
        return True

    def loss_scale(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def collect_state(self) -> portable_state.PortableState:
        return portable_state.rank_share(
            portable_state.collect_state(self.unwrapped, self.optimizer), self.world.rank, self.world.size
        )

    def restore(self, saved: SavedCheckpoint, loss_scale: dict[str, Any] | None = None) -> None:
        portable_state.load_weights(saved, self.unwrapped)
        portable_state.load_moments(saved, self.unwrapped, self.optimizer)
        self._set_loss_scale(loss_scale)

    def _set_loss_scale(self, saved: dict[str, Any] | None) -> None:
        """A saved loss scale means something only under fp16."""
        if self.plan.precision == "fp16" and saved:
            self.scale, self.good_steps = float(saved["scale"]), int(saved["good_steps"])

    def load_weights(self, saved: SavedCheckpoint, new_phase: bool = False) -> None:
        portable_state.load_weights(saved, self.unwrapped)

    def moments(self) -> portable_state.Moments:
        return {name: dict(self.optimizer.state.get(p, {})) for name, p in self.named.items()}

    def load_moments(self, moments: portable_state.Moments, loss_scale: dict[str, Any]) -> None:
        self._set_loss_scale(loss_scale)
        for name, state in moments.items():
            if state:
                self.optimizer.state[self.named[name]] = dict(state)
