"""One more strategy: every process holds the whole model, and each gradient is summed by itself.

DDP and isobatch's own reduction send gradients in buckets. This one sends a message per parameter: slower
where there are many small ones, but nothing is copied into a bucket. The numbers are the same.

A strategy is a subclass of `engine.strategies.base.Strategy` in a file of engine/strategies/, and an entry of
`core.strategies.STRATEGIES`. From it follow the choices of --strategy and what the planner, the session and
checkpoints must know. In a clone a test tries this one with

    monkeypatch.setitem(STRATEGIES, "per-parameter", PER_PARAMETER)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isobatch.core.errors import UserError
from isobatch.core.strategies import StrategyTraits
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.strategies.base import MakeOptimizer, Strategy, set_rate

if TYPE_CHECKING:
    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint

PER_PARAMETER = StrategyTraits(
    implementation="examples.strategy:PerParameterStrategy",  # `module:Class` within isobatch
    takes_fp16=False,
    sees_gradients=True,
)


class PerParameterStrategy(Strategy):
    """Collectives go through `world` alone, and every rank issues the same ones whatever work it has."""

    def begin(self, make_optimizer: MakeOptimizer) -> None:
        if self.sparse or self.plan.precision == "fp16":
            raise UserError("--strategy per-parameter: takes neither sparse tables nor fp16: use ddp")
        self.optimizer = make_optimizer(self.model)
        self.named = dict(self.model.named_parameters())
        self.dense = [p for p in self.model.parameters() if p.requires_grad]

    def step_optimizer(self, rate: float, observe: Callable[[], None] | None = None) -> Tensor:
        self._reduce()
        gradients = [p.grad for p in self.dense if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients) if gradients else torch.zeros((), device=self.world.device)
        if observe is not None:
            observe()
        set_rate(self.optimizer, rate)
        if self.clip:
            nn.utils.clip_grads_with_norm_(self.dense, self.clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _reduce(self) -> None:
        """Sum each gradient over ranks. Micro-batches bring shares of one sum, so nothing is averaged."""
        has_gradient = torch.tensor([p.grad is not None for p in self.dense], dtype=torch.int32)
        ranks = self.world.all_reduce_sum(has_gradient.to(self.world.device)).tolist()
        for p, count in zip(self.dense, ranks, strict=True):
            if count:  # a parameter that no rank used keeps no gradient: it must not decay
                mine = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
                p.grad = self.world.all_reduce_sum(mine)

    def own_state(self) -> portable_state.PortableState:
        """Every rank holds all state, so each writes an equal share."""
        state = portable_state.collect_state(self.unwrapped, self.optimizer)
        return portable_state.rank_share(state, self.world.rank, self.world.size)

    def restore(self, saved: SavedCheckpoint, loss_scale: dict[str, Any] | None = None) -> None:
        self.load_weights(saved)
        portable_state.load_moments(saved, self.unwrapped, self.optimizer)

    def moments(self) -> portable_state.Moments:
        return {name: dict(self.optimizer.state.get(p, {})) for name, p in self.named.items()}

    def load_moments(self, moments: portable_state.Moments, loss_scale: dict[str, Any]) -> None:
        for name, state in moments.items():
            if state:
                self.optimizer.state[self.named[name]] = dict(state)
