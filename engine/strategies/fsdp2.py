"""torch's fully_shard (FSDP2, Zhao et al. 2023 for its ancestor): each process holds rows of every parameter.
With copies (HSDP) it does so within a group of processes, and groups sum their gradients.

Gradients are summed, not averaged, because losses come divided by the global weight already. Blocks of the
model's layer lists are gathered one by one, in the forward and again in the backward pass. Each micro-batch
is reduced into the shards: whole gradients would undo what sharding saves. Every rank must use the same
parameters in a micro-batch; a rank without samples computes a dummy.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from isobatch.core.errors import UserError
from isobatch.core.strategies import traits_of
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.checkpointing.portable_state import MOMENT, WEIGHT, Held, TensorPiece
from isobatch.engine.model_setup.layer_blocks import layer_blocks, matmul_parameters
from isobatch.engine.strategies.base import MakeOptimizer, Strategy, gradient_norm, set_rate

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


class FullyShardStrategy(Strategy):
    """Rows of every parameter, its gradient and its moments."""

    def begin(self, make_optimizer: MakeOptimizer) -> None:
        assert not self.sparse, "the planner gives sparse tables no shards"
        model, world = self.model, self.world
        self._copies = self.plan.mesh[0]
        options: dict[str, Any] = {"mesh": world.device_mesh(self._copies)}
        if traits_of(self.plan.strategy).offloads:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
        half = set(matmul_parameters(model)) if self.plan.precision == "bf16" else set()
        blocks = [(block, own_parameters(block, half)) for block in layer_blocks(model)]
        apart = {p for _, own in blocks for p in own}
        world.broadcast_onto_device(t for t in (*model.parameters(), *model.buffers()) if t not in apart)
        fully_shard(model, ignored_params=apart, **options)
        for block, own in blocks:
            whole = (p for p in block.parameters() if p in own and not isinstance(p, DTensor))
            world.broadcast_onto_device(whole)
            policy: dict[str, Any] = {"mp_policy": HALF} if own <= half else {}
            fully_shard(block, ignored_params=set(block.parameters()) - own, **policy, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self.optimizer = make_optimizer(model)

    @contextlib.contextmanager
    def forward_backward(self, last: bool) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_is_last_backward(last)
        if self._copies > 1:
            self.model.set_requires_all_reduce(last)
        with self.world.waiting_for("FSDP's forward or backward"):
            yield

    def step_optimizer(self, rate: float, observe: Callable[[], None] | None = None) -> Tensor:
        """The norm is of the whole gradient, whose rows lie on all ranks of a copy."""
        gradients = [_rows(p.grad) for _, p in self.trained() if p.grad is not None]  # this rank's
        if self._copies > 1 and (idle := [name for name, p in self.trained() if p.grad is None]):
            raise UserError(
                f"the last micro-batch's loss touches no {idle[0]} ({len(idle)} such), and copies add up"
                " gradients in it alone: freeze it (requires_grad_(False)), or use --strategy fsdp2"
            )
        where = gradients[0].device if gradients else self.world.device  # the host's, of offloaded ones
        local = gradient_norm(gradients, where).to(self.world.device)
        norm = self.world.all_reduce_sum(local.square() / self._copies).sqrt()
        set_rate(self.optimizer, rate)
        if self.clip and gradients:
            torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp_max(1.0).to(where))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def parts(self) -> Iterator[Held]:
        """This rank's rows."""
        self._reshard()
        for name, p in self.trained():
            assert isinstance(p, DTensor)
            yield Held(name, tuple(p.shape), self._start(p), _rows(p))

    def _reshard(self) -> None:
        """A forward pass without a backward may have left parameters whole: they are no rows, and have no
        moments.
        """
        for module in self.unwrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def own_state(self) -> portable_state.PortableState:
        """Every rank's own rows of weights and moments; buffers come from rank 0."""
        self._reshard()
        entries, pieces = self.buffer_state()
        for name, p in self.trained():
            state = {WEIGHT + name: p.detach()}
            moments = self.optimizer.state.get(p, {}).items()
            state |= {f"{MOMENT}{k}/{name}": torch.as_tensor(v) for k, v in moments if v is not None}
            for key, value in state.items():
                entries[key] = portable_state.tensor_entry(value)
                if isinstance(value, DTensor):
                    pieces += self.saved_share(key, self._start(value), _rows(value))
                elif self.world.is_main:
                    pieces.append(TensorPiece(key, 0, value.reshape(-1)))
        return portable_state.PortableState(entries, pieces)

    def _start(self, tensor: DTensor) -> int:
        """First element of this rank's rows in the flattened tensor; rows are divided as by torch.chunk."""
        shards = self.world.size // self._copies
        first_row = math.ceil(tensor.shape[0] / shards) * (self.world.rank % shards)
        return min(first_row, tensor.shape[0]) * math.prod(tensor.shape[1:])

    def restore(self, saved: SavedCheckpoint, loss_scale: dict[str, Any] | None = None) -> None:
        self.load_weights(saved)
        parts, parameters = {part.name: part for part in self.parts()}, dict(self.trained())
        for key, kind, name in portable_state.saved_moments(saved):
            p = parameters[name]
            if saved.entries[key].shape:
                moment = torch.zeros_like(p)
                _rows(moment).copy_(self.read_part(saved, key, parts[name]))
                self.optimizer.state[p][kind] = moment
            else:
                where = portable_state.device_of_steps(self.optimizer, p)
                self.optimizer.state[p][kind] = saved.read(key).to(where)


def own_parameters(block: nn.Module, half: set[nn.Parameter]) -> set[nn.Parameter]:
    """What is gathered with a block: all of it in fp32 or, in bf16, what it has of `half`.

    Autocast rounds these to bf16 anyway. What else it has, where that is vectors of layers as of norms,
    is gathered in fp32 with the root: in a group of its own it would break a compiled block where it is
    gathered. Gradients are summed over micro-batches and ranks in fp32.
    """
    own = set(block.parameters())
    rest = [m for m in block.modules() if any(p not in half for p in m.parameters(recurse=False))]
    alone = not any(list(m.children()) for m in rest) and all(p.ndim == 1 for p in own - half)
    return own & half if own & half and alone else own


def _rows(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, sharing its memory."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
