"""Tests of engine/strategies/zero.py that need neither a process group nor a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from isobatch.core.optimizers import OPTIMIZERS
from isobatch.engine.strategies.zero import ZeroStrategy

STAGES = {1: "single_partition_of_fp32_groups", 3: "fp32_partitioned_groups_flat"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_fused_optimizer_steps_after_its_moments_were_made(stage: int, device: str) -> None:
    """Its step count lies on the partitions' device; on another, torch refuses the update."""
    with FakeTensorMode():
        flat = torch.empty(8, device=device, requires_grad=True)
        inner = OPTIMIZERS["adamw"].build([{"params": [flat], "weight_decay": 0.0}], 1e-3, device)
        strategy: Any = object.__new__(ZeroStrategy)
        strategy.stage = stage
        strategy.engine = SimpleNamespace(
            optimizer=SimpleNamespace(optimizer=inner, **{STAGES[stage]: [flat]})
        )
        strategy._make_moments({"step", "exp_avg", "exp_avg_sq"})  # noqa: SLF001  no checkpoint, no engine
        assert {v.device.type for v in inner.state[flat].values()} == {device}
        flat.grad = torch.empty(8, device=device)
        inner.step()


@pytest.mark.parametrize(("rank", "elements"), [(0, 2), (1, 1), (2, 0), (3, 0)])
def test_the_padding_of_a_shard_is_no_weight(rank: int, elements: int) -> None:
    """DeepSpeed leaves it as memory lay there: a NaN in it would end a healthy run."""
    flat = torch.full((2,), torch.nan)  # of a parameter of 3 elements over 4 ranks
    flat[:elements] = 1.0
    parameter = SimpleNamespace(
        ds_tensor=SimpleNamespace(ds_numel=2), ds_numel=3, ds_shape=(3,), requires_grad=True
    )
    strategy: Any = object.__new__(ZeroStrategy)
    strategy.stage, strategy.world = 3, SimpleNamespace(rank=rank, device="cpu")
    strategy.unwrapped = SimpleNamespace(named_parameters=lambda: [("a", parameter)])
    zero = {
        "grad_position": {0: (0, 0, 2)},
        "get_param_id": lambda _: 0,
        "optimizer": torch.optim.SGD([flat]),
    }
    strategy.engine = SimpleNamespace(optimizer=SimpleNamespace(fp32_partitioned_groups_flat=[flat], **zero))
    ((_, part),) = strategy.held()
    assert len(part) == elements
    assert part.isfinite().all()
