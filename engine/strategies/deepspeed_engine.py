"""Make DeepSpeed's engine from its config: the plan's, or the one that accelerate's config names."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.package import ROOT
from isobatch.core.plan import Plan, StrategyName
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.model_setup.layer_blocks import layer_blocks

CONFIGS = ROOT / "configs" / "deepspeed"
OWN_CONFIG = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
"""Where `accelerate launch` says which DeepSpeed config its own config names."""
NO_CLIP = 1e30
"""In place of no clipping, without which stages 1 and 2 compute no norm."""


def given_config() -> dict[str, Any] | None:
    """The DeepSpeed config that accelerate's config names, by a path from here or the package; or None."""
    if not (given := os.environ.get(OWN_CONFIG)):
        return None
    path = Path(given).expanduser()
    return atomic_files.read_json(path if path.exists() else ROOT / given)


def strategy_of(config: dict[str, Any]) -> StrategyName:
    """The name of the strategy that a DeepSpeed config means. Raises UserError for ZeRO stage 0."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise UserError(f"the DeepSpeed config asks for stage {stage}: use 1, 2 or 3, or a DDP config")
    return "zero3-offload" if stage == 3 and "offload_optimizer" in zero else f"zero{stage}"


def config_for(plan: Plan, clip: float) -> dict[str, Any]:
    """The given config, or the one of the plan's strategy; plan and recipe set precision and clipping."""
    config: dict[str, Any] = given_config() or atomic_files.read_json(CONFIGS / f"{plan.strategy}.json")
    half = {"enabled": plan.precision == "bf16", "dtype": "bfloat16", "lower_precision_safe_modules": []}
    return {**config, "gradient_clipping": clip or NO_CLIP, "torch_autocast": half}


def make_engine(model: nn.Module, optimizer: Optimizer, config: dict[str, Any], world: Communicator) -> Any:
    """A DeepSpeed engine around the model. Raises UserError where DeepSpeed is not installed."""
    if world.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    with contextlib.redirect_stdout(sys.stderr):  # it logs to standard output from its import on
        need("deepspeed", "ZeRO")
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # Its shared-memory all-reduce is compiled at first use, under a lock that a killed process leaves
        # behind, and spins forever where a rank has died. gloo raises an error instead.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        world.form_group()
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it
        if config["zero_optimization"]["stage"] == 3:
            _shard(model, config, world)
        with world.waiting_for("the start of DeepSpeed's engine"):
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )
    return engine


def _shard(model: nn.Module, config: dict[str, Any], world: Communicator) -> None:
    """Shard the weights block by block: DeepSpeed's engine would first move the whole model to the device.

    zero.Init broadcasts rank 0's weights on the device; the others may have a hollow model.
    """
    from deepspeed import zero
    from deepspeed.runtime.zero.partition_parameters import is_zero_param

    world.broadcast_onto_device(model.buffers())
    for module in (*layer_blocks(model), model):
        if not world.is_main:
            for p in (p for p in module.parameters() if not is_zero_param(p)):
                p.data = torch.empty(p.shape, dtype=p.dtype, device=world.device)
        with world.waiting_for("the broadcast of the initial weights"):
            zero.Init(module=module, config_dict_or_path=config)
