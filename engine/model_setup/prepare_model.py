"""Build the model of a recipe on its device and set it up as the plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from isobatch.core.errors import UserError
from isobatch.core.strategies import traits_of
from isobatch.engine.model_setup.layer_blocks import checkpoint_activations
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.models.activations import fuse_gelu
from isobatch.models.capabilities import build_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.models.base import Task


def prepare_model(
    task: Task,
    recipe: Recipe,
    facts: Facts,
    plan: Plan,
    device: torch.device,
    build: Callable[[Facts], nn.Module] | None = None,
) -> tuple[nn.Module, KeyedNoise | None]:
    """The model with the recipe's initial weights, and the keyed noise of its dropout (None if native).

    `build` stands for the task's `build_model` on ranks that get their shards from another. Raises UserError
    where the model computes batch statistics.
    """
    torch.manual_seed(recipe.seed)
    model = build(facts) if build else build_model(task, facts, device)
    fuse_gelu()
    if traits_of(plan.strategy).shards:  # shards are of one number format
        _hold_in_fp32(model)
    if not traits_of(plan.strategy).shards_weights:  # else only its shards go to the device
        model = model.to(device)
    choose_attention: Any = getattr(model, "set_attn_implementation", None)
    if plan.attention != "sdpa" and choose_attention is not None:
        choose_attention({"flash": "flash_attention_2"}.get(plan.attention, plan.attention))
    _refuse_batch_statistics(model)
    noise = KeyedNoise(recipe.seed, task.rows_per_sample) if recipe.noise == "keyed" else None
    if noise is not None:
        key_dropout(model, noise)
    if plan.activation_checkpointing:
        checkpoint_activations(model, keyed=noise is not None)
    return model, noise


def _hold_in_fp32(model: nn.Module) -> None:
    """Hold weights that a task holds in half precision in fp32, with the same values."""
    for p in model.parameters():
        if p.dtype in (torch.bfloat16, torch.float16):
            hollow = not any(p.stride())  # a hollow one has the memory of a single element
            values = p.data[(0,) * p.ndim] if hollow else p.data
            p.data = values.float().expand(p.shape)


def _refuse_batch_statistics(model: nn.Module) -> None:
    """Raise UserError for batch norm: its statistics depend on the division into micro-batches."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001  the base of all batch norms
            raise UserError(
                f"{name} is a {type(module).__name__}: its statistics follow the micro-batch, so no two"
                " machines would learn the same; use GroupNorm or LayerNorm"
            )
