"""Strategies `single` and `ddp`: the whole model on every process.

Gradients of several processes are reduced explicitly after the last backward pass, or by DDP during it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isobatch.core.errors import TrainingError
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, SharedReader
from isobatch.engine.strategies.base import MakeOptimizer, Strategy, gradient_norm, set_rate

SCALE_START = 2.0**16
"""The first fp16 loss scale."""
SCALE_LEAST = 2.0**-10
"""Training fails where gradients overflow even below this loss scale."""
SCALE_PATIENCE = 2000
"""Steps without overflow after which the loss scale doubles."""


class ReplicatedStrategy(Strategy):
    """Every process holds the whole model, its gradients and its moments."""

    def begin(self, make_optimizer: MakeOptimizer) -> None:
        model, plan, world = self.model, self.plan, self.world
        self.optimizer = make_optimizer(model)
        self._update_clips = plan.device == "cuda" and hasattr(self.optimizer, "_step_supports_amp_scaling")
        """Whether the update divides the gradients as it reads them, as torch's fused ones can."""
        self.named = dict(model.named_parameters())
        sparse_ids = {id(p) for p in self.sparse}
        self.dense = [p for p in model.parameters() if p.requires_grad and id(p) not in sparse_ids]
        self.overlapped = False
        """Whether DDP reduces. Step 0 reduces explicitly: DDP is enabled after it only if every parameter
        received a gradient in it."""
        self._reduces = False
        """Whether DDP reduces in the current backward pass."""
        self._graphs = plan.compile == "reduce-overhead"
        """Whether the model runs as CUDA graphs, whose outputs and gradients the next replay overwrites."""
        self._decide_overlap = plan.reduction == "overlapped" and world.size > 1 and not self.sparse
        self._copied: set[int] = set()
        """In a step so far: parameters whose gradient has memory of its own."""
        self.tables: dict[nn.Parameter, Tensor] = {}
        """Buffers of dense embedding gradients, reused in every step."""
        self._use_sparse_gradients(plan.device == "cpu" and plan.compile == "off")
        self.scale = SCALE_START if plan.precision == "fp16" else 1.0
        self.good_steps = 0

    def _use_sparse_gradients(self, yes: bool) -> None:
        """Whether embeddings get sparse gradients: a dense one per micro-batch costs a CPU more time.

        The tables in `self.sparse` always do.
        """
        self._embeds_sparsely = False
        sparse_ids = {id(p) for p in self.sparse}
        for module in self.unwrapped.modules():
            if isinstance(module, nn.Embedding) and not module.scale_grad_by_freq:
                module.sparse = yes or id(module.weight) in sparse_ids
                self._embeds_sparsely |= module.sparse

    @property
    def caches_transforms(self) -> bool:
        """Not under DDP, whose backward pass needs each weight's gradient, nor in a compiled graph."""
        return not self.computes_dummies and self.plan.compile == "off"

    @property
    def computes_dummies(self) -> bool:
        """DDP's reduction runs in the last backward pass."""
        return self.overlapped

    @contextlib.contextmanager
    def forward_backward(self, last: bool) -> Iterator[None]:
        self._reduces = self.overlapped and last
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()
        if self.overlapped and not last:
            with self.model.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def backward(self, loss: Tensor) -> None:
        scaled = loss * (self.scale * (self.world.size if self.overlapped else 1))
        with self.world.waiting_for("DDP's reduction") if self._reduces else contextlib.nullcontext():
            scaled.backward()
        if self._graphs:  # the next replay of a CUDA graph overwrites the memory of new gradients
            for p in self.dense:
                if p.grad is not None and id(p) not in self._copied:
                    self._copied.add(id(p))
                    p.grad = p.grad.clone()

    def step_optimizer(self, rate: float, observe: Callable[[], None] | None = None) -> Tensor | None:
        norm = self.reduce()
        if self.plan.precision == "fp16" and self._overflowed(norm):
            return None
        if observe is not None:
            observe()
        set_rate(self.optimizer, rate)
        if self.clip and self._update_clips:
            self.optimizer.grad_scale = ((norm + 1e-6) / self.clip).clamp_min(1.0)  # type: ignore[attr-defined]
        elif self.clip:
            nn.utils.clip_grads_with_norm_(self.dense, self.clip, norm)
            for values in self._sparse_values() if self.sparse else ():
                values.mul_((self.clip / (norm + 1e-6)).clamp_max(1.0))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._copied.clear()
        return norm

    def reduce(self) -> Tensor:
        """Sum the gradients over ranks and divide them by the loss scale; returns their norm (0-d)."""
        if not self.overlapped:
            # Sparse gradients go into dense buffers that are kept: page faults of new memory cost more.
            for p in self.dense if self._embeds_sparsely else ():
                if p.grad is not None and p.grad.is_sparse:
                    if p not in self.tables:
                        self.tables[p] = torch.empty_like(p)
                    rows, values = p.grad._indices()[0], p.grad._values()  # noqa: SLF001  as in _sparse_values
                    p.grad = self.tables[p].zero_().index_add_(0, rows, values)
            everything_used = self.world.size == 1 or self.world.all_reduce_gradients(self.dense)
            for p in self.sparse:
                if p.grad is not None or self.world.size > 1:
                    p.grad = self.world.all_reduce_sparse(p)
            if self._decide_overlap:
                self._decide_overlap, self.overlapped = False, everything_used
                if everything_used:
                    self._use_sparse_gradients(False)
                    self.model = self.world.wrap_in_ddp(self.unwrapped)
                    if self.unwrapped._compiled_call_impl is not None:  # noqa: SLF001  no public way
                        # torch cuts a graph where DDP's buckets end, but none that was compiled before.
                        torch.compiler.reset()
        gradients = [p.grad for p in self.dense if p.grad is not None]
        gradients += self._sparse_values() if self.sparse else []
        if self.scale != 1:
            torch._foreach_mul_(gradients, 1 / self.scale)
        return gradient_norm(gradients, self.world.device)

    def _sparse_values(self) -> list[Tensor]:
        """The values of the sparse gradients of the tables in `self.sparse`."""
        # values() and indices() refuse uncoalesced gradients.
        return [p.grad._values() for p in self.sparse if p.grad is not None]  # noqa: SLF001

    def _overflowed(self, norm: Tensor) -> bool:
        """fp16: whether gradients overflowed. Then they are dropped and the loss scale is halved.

        The same step is computed again, so that the learning-rate schedule stays right. Raises TrainingError
        below SCALE_LEAST.
        """
        with self.world.waiting_for("the norm of the reduced gradient"):
            finite = math.isfinite(norm.item())
        if finite:
            self.good_steps += 1
            if self.good_steps % SCALE_PATIENCE == 0:
                self.scale *= 2
            return False
        self.scale, self.good_steps = self.scale / 2, 0
        self.optimizer.zero_grad(set_to_none=True)
        self._copied.clear()
        if self.scale < SCALE_LEAST:
            way = "lower --lr, or use --precision fp32"
            raise TrainingError(f"fp16 gradients overflow at every loss scale: {way}")
        return True

    def loss_scale(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def own_state(self) -> portable_state.PortableState:
        state = portable_state.collect_state(self.unwrapped, self.optimizer)
        return portable_state.rank_share(state, self.world.rank, self.world.size)

    def restore(self, saved: SavedCheckpoint, loss_scale: dict[str, Any] | None = None) -> None:
        self.load_weights(saved)
        portable_state.load_moments(SharedReader(saved, self.world), self.unwrapped, self.optimizer)
        self._set_loss_scale(loss_scale)

    def _set_loss_scale(self, saved: dict[str, Any] | None) -> None:
        """Take over a saved loss scale, under fp16 only."""
        if self.plan.precision == "fp16" and saved:
            self.scale, self.good_steps = float(saved["scale"]), int(saved["good_steps"])

    def moments(self) -> portable_state.Moments:
        return {name: dict(self.optimizer.state.get(p, {})) for name, p in self.named.items()}

    def load_moments(self, moments: portable_state.Moments, loss_scale: dict[str, Any]) -> None:
        self._set_loss_scale(loss_scale)
        for name, state in moments.items():
            if state:
                self.optimizer.state[self.named[name]] = dict(state)
