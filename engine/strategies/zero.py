"""Strategies `zero1`, `zero2`, `zero3` and `zero3-offload`: DeepSpeed ZeRO (Rajbhandari et al. 2020).

Results do not depend on the division into micro-batches: parameters, gradients and their sums are fp32
(DeepSpeed's own bf16 mode sums in bf16), micro-batches are added locally and reduced once a step, and losses
come divided by the global weight already. Accelerate forms the process group. It does not make DeepSpeed's
engine, because it keeps the first engine it made and every phase needs its own. All use of DeepSpeed's
private names is in this file.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from isobatch.core.errors import UserError
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.checkpointing.portable_state import MOMENT, WEIGHT, Held, TensorEntry, TensorPiece
from isobatch.engine.model_setup.layer_blocks import matmul_parameters
from isobatch.engine.strategies.base import MakeOptimizer, Strategy, set_rate
from isobatch.engine.strategies.deepspeed_engine import config_for, make_engine


class ZeroStrategy(Strategy):
    """A model in DeepSpeed's engine, which shards its moments, gradients or weights by stage."""

    def begin(self, make_optimizer: MakeOptimizer) -> None:
        assert not self.sparse, "the planner gives sparse tables no shards"
        model, plan = self.model, self.plan
        self.config = config_for(plan, self.clip)
        self.stage = int(self.config["zero_optimization"]["stage"])
        optimizer = make_optimizer(model)  # it groups parameters by shape, which shards do not have
        self.model = self.engine = make_engine(model, optimizer, self.config, self.world)
        if self.stage == 3 and plan.precision == "bf16":
            # Gather what autocast rounds to bf16 in bf16: half the bytes and the same products. The weights
            # are fp32 again once they are gathered, and gradients are reduced in fp32. DeepSpeed's own switch
            # for this, `lower_precision_safe_modules`, would reduce them in bf16.
            for p in matmul_parameters(self.unwrapped):
                p.comm_dtype = torch.bfloat16  # type: ignore[attr-defined]
            self.engine.optimizer.get_param_comm_dtype = lambda _: torch.float32
        self._used: set[str] = set()
        """Parameters that got a gradient in the first step."""
        self._hooks = {
            name: p.register_hook(lambda _, name=name: self._used.add(name)) for name, p in self.trained()
        }
        self._abandoned: Any = None
        """The reduction of a step that failed, kept so that it never runs."""

    @property
    def computes_dummies(self) -> bool:
        return True

    @contextlib.contextmanager
    def accumulate_gradients(self) -> Iterator[None]:
        """Stages 1 and 2 keep gradients local and reduce once, at the end. Stage 3 reduces each micro-batch
        into its shards, because full gradients would undo what it saves.
        """
        if self.stage == 3:
            yield
            self._refuse_unused()
            return
        reduction = self.engine.coalesce_grad_reduction()
        reduction.__enter__()
        try:
            yield
        except BaseException:
            # Its __exit__ would reduce, and wait for ranks that do not know of this error: never call it.
            self._abandoned = reduction
            raise
        self._refuse_unused()
        with self.world.waiting_for("ZeRO's reduction"):
            reduction.__exit__(None, None, None)

    @contextlib.contextmanager
    def forward_backward(self, last: bool) -> Iterator[None]:
        if self.stage < 3:
            yield
            return
        self.engine.set_gradient_accumulation_boundary(last)
        with self.world.waiting_for("ZeRO-3's forward or backward"):
            yield

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks; the losses of all ranks are to be summed.
        self.engine.backward(loss * self.world.size, scale_wrt_gas=False)

    def step_optimizer(self, rate: float, observe: Callable[[], None] | None = None) -> Tensor:
        set_rate(self.engine.optimizer, rate)
        self.engine.set_gradient_accumulation_boundary(True)
        with self.world.waiting_for("ZeRO's update"):
            self.engine.step()
            return torch.as_tensor(self.engine.get_global_grad_norm(), device=self.world.device).float()

    def _refuse_unused(self) -> None:
        """Raise UserError where a parameter has no gradient: DDP leaves it alone, ZeRO would decay it."""
        if not self._hooks:
            return
        for hook in self._hooks.values():
            hook.remove()
        idle, self._hooks = set(self._hooks) - self._used, {}
        if unused := set.intersection(*self.world.all_gather_objects(idle)):
            raise UserError(
                f"no loss touches {sorted(unused)[0]} ({len(unused)} such): ZeRO would decay it; freeze it"
                " (requires_grad_(False)), or use --strategy ddp"
            )

    def own_state(self) -> portable_state.PortableState:
        """This rank's own shards of weights and moments, and on rank 0 the buffers."""
        entries, pieces = self.buffer_state()
        for name, p in self.trained():
            shape = tuple(getattr(p, "ds_shape", p.shape))
            entries[WEIGHT + name] = TensorEntry(shape, "float32")
            for key, dtype in self._moments().items():
                entries[f"{MOMENT}{key}/{name}"] = TensorEntry(() if key == "step" else shape, dtype)
            shard = self._shard(p)
            if shard is not None:
                pieces.append(TensorPiece(WEIGHT + name, shard.start, shard.weight))
                moments = shard.moments.items()
                pieces += [TensorPiece(f"{MOMENT}{key}/{name}", shard.start, value) for key, value in moments]
                if shard.start == 0 and shard.steps is not None:
                    pieces.append(TensorPiece(f"{MOMENT}step/{name}", 0, shard.steps.reshape(1)))
        return portable_state.PortableState(entries, pieces)

    def restore(self, saved: SavedCheckpoint, loss_scale: dict[str, Any] | None = None) -> None:
        kinds = {kind for _, kind, _ in portable_state.saved_moments(saved)}
        if kinds:
            self._make_moments(kinds)
        self.load_weights(saved)
        parameters = dict(self.trained())
        for key, kind, name in portable_state.saved_moments(saved):
            shard = self._shard(parameters[name])
            if shard is not None and kind != "step":
                shard.moments[kind].copy_(saved.read_slice(key, shard.start, shard.start + len(shard.weight)))
            elif shard is not None and shard.steps is not None:
                # One step count per flat group: all its parameters have taken the same number of steps.
                shard.steps.fill_(float(saved.read(key)))

    def load_weights(self, saved: SavedCheckpoint, new_phase: bool = False) -> None:
        """Load what this rank holds and, where that is whole parameters, its shards of the fp32 copy too."""
        super().load_weights(saved, new_phase)
        for name, p in self.trained() if self.stage < 3 else ():
            shard = self._shard(p)
            if shard is not None and WEIGHT + name in saved.entries:
                stop = shard.start + len(shard.weight)
                shard.weight.copy_(saved.read_slice(WEIGHT + name, shard.start, stop))

    def parts(self) -> Iterator[Held]:
        """Under stage 3 this rank's shards, without the padding: DeepSpeed never writes that, so it may hold
        NaN.
        """
        if self.stage < 3:
            yield from super().parts()
            return
        for name, p in self.trained():
            shard, shape = self._shard(p), tuple(p.ds_shape)  # type: ignore[attr-defined]
            none = Held(name, shape, 0, torch.empty(0, device=self.world.device))
            yield Held(name, shape, shard.start, shard.weight) if shard else none

    def set_held(self, values: Iterable[tuple[str, Tensor]]) -> None:
        """Under stage 3 also into what is gathered from; what is gathered already is given back first."""
        if self.stage < 3:
            super().set_held(values)
            return
        self.engine.optimizer.checkpoint_event_prologue()
        mine, parameters = dict(self.held()), dict(self.trained())
        for name, tensor in values:
            mine[name].copy_(tensor)
            parameters[name].ds_tensor.data.view(-1)[: len(tensor)].copy_(tensor)  # type: ignore[attr-defined]

    @property
    def _flat_partitions(self) -> list[Tensor]:
        """The flat fp32 partitions that the inner torch optimizer steps."""
        zero = self.engine.optimizer
        sharded = self.stage == 3
        return list(zero.fp32_partitioned_groups_flat if sharded else zero.single_partition_of_fp32_groups)

    def _moments(self) -> dict[str, str]:
        """Kind of moment -> dtype, of the inner optimizer; empty before its first step."""
        inner = self.engine.optimizer.optimizer
        states = [inner.state[f] for f in self._flat_partitions if inner.state.get(f)]
        first = states[0].items() if states else ()
        return {kind: portable_state.tensor_entry(v).dtype for kind, v in first if v is not None}

    def _make_moments(self, kinds: set[str]) -> None:
        """Create zero moments, which DeepSpeed does not have before its first step."""
        inner = self.engine.optimizer.optimizer
        for flat in self._flat_partitions:
            steps = torch.zeros((), device=portable_state.device_of_steps(inner, flat))
            inner.state[flat] = {k: steps if k == "step" else torch.zeros_like(flat) for k in kinds}

    def _shard(self, p: Any) -> _ParameterShard | None:
        """This rank's part of a parameter, as views of the flat partitions; None where it has none."""
        return self._shard_of_stage_3(p) if self.stage == 3 else self._shard_of_stage_1_or_2(p)

    def _shard_of_stage_1_or_2(self, p: Any) -> _ParameterShard | None:
        mapping = p._hp_mapping  # noqa: SLF001  DeepSpeed has no public way
        if mapping is None:
            return None
        in_parameter, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = self._flat_partitions[mapping.param_group_index]
        state = self.engine.optimizer.optimizer.state.get(flat, {})
        return _ParameterShard(state, flat, in_parameter.start, in_flat.start, in_parameter.numel)

    def _shard_of_stage_3(self, p: Any) -> _ParameterShard | None:
        zero = self.engine.optimizer
        start = p.ds_tensor.ds_numel * self.world.rank
        count = min(p.ds_tensor.ds_numel, p.ds_numel - start)
        if count <= 0:  # all of it is padding
            return None
        group, offset, _ = zero.grad_position[zero.get_param_id(p)]
        flat = zero.fp32_partitioned_groups_flat[group]
        return _ParameterShard(zero.optimizer.state.get(flat, {}), flat, start, offset, count)

    def close(self) -> None:
        """Free the memory that the engine keeps unless its references are cleared; destroys the model."""
        zero = self.engine.optimizer
        self.engine.destroy()
        for p in self.unwrapped.parameters():
            p.__dict__.clear()
        for part in (getattr(zero, "parameter_offload", None), zero, self.engine):
            if part is not None:
                part.__dict__.clear()
        del self.engine, self.model
        gc.collect()


class _ParameterShard:
    """Views of one parameter's part of a flat partition, and of the optimizer's state of that part.

    `count` elements, from `start` of the flattened parameter and from `offset` of the flat partition on.
    """

    def __init__(self, state: dict[str, Any], flat: Tensor, start: int, offset: int, count: int) -> None:
        self.start = start
        """First element of the flattened parameter."""
        self.weight = flat.detach()[offset : offset + count]
        values = {k: v for k, v in state.items() if isinstance(v, Tensor) and v.ndim}
        self.moments = {k: v.detach().view(-1)[offset : offset + count] for k, v in values.items()}
        self.steps: Tensor | None = state.get("step")
