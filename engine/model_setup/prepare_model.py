"""Build the model of a recipe on its device and set it up as the plan says; or without values.

A hollow model has all of a model but its values, for ranks that get their shards from rank 0's model: a host
does not hold a whole model for each of its processes. A hollow parameter has its shape, type and place among
the modules, and the memory of a single element.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.plan import Plan
from isobatch.core.strategies import traits_of
from isobatch.engine.model_setup.layer_blocks import checkpoint_activations
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.models.base import Task
from isobatch.models.fused_layers import fuse_layers


def prepare_model(
    task: Task, facts: Facts, plan: Plan, device: torch.device, build: Callable[[Facts], nn.Module]
) -> tuple[nn.Module, KeyedNoise | None]:
    """The model that `build` makes, with the recipe's initial weights, and the keyed noise of its dropout.

    Native noise is None. Raises UserError where the model computes batch statistics.
    """
    torch.manual_seed(task.recipe.seed)
    model = build(facts)
    fuse_layers(model)
    if traits_of(plan.strategy).shards:  # shards are of one number format
        _hold_in_fp32(model)
    if not traits_of(plan.strategy).shards_weights:  # else only its shards go to the device
        model = model.to(device)
    choose_attention: Any = getattr(model, "set_attn_implementation", None)
    if plan.attention != "sdpa" and choose_attention is not None:
        choose_attention({"flash": "flash_attention_2"}.get(plan.attention, plan.attention))
    _refuse_batch_statistics(model)
    noise = KeyedNoise(task.recipe.seed, task.rows_per_sample) if task.recipe.noise == "keyed" else None
    if noise is not None:
        key_dropout(model, noise)
    checkpoint_activations(model, plan.activation_checkpointing, keyed=noise is not None)
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


Outline = list[tuple[str, tuple[int, ...], str, bool]]
"""(name, shape, type, whether it trains) of a model's parameters and buffers, a shared one by every name."""


def build_hollow(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model that `build` makes, hollow; None where it cannot be built without values."""
    try:
        with torch.device("meta"), _pretrained_from_configs():
            model = build()
    except Exception:  # whatever a task computes from values: such a model is built whole
        return None
    return model if _hollow_out(model) else None


def outline(model: nn.Module) -> Outline:
    """What two models must have in common for the values of one to fit the other."""
    parameters = model.named_parameters(remove_duplicate=False)
    tensors = (*parameters, *model.named_buffers(remove_duplicate=False))
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]


def _hollow_out(model: nn.Module) -> bool:
    """Make what lies on the meta device hollow; whether that is all.

    A shared parameter is replaced by one, with its attributes; buffers become zeros on the host.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if p.is_meta:
                if id(p) not in replaced:
                    values = torch.zeros((), dtype=p.dtype).expand(p.shape)
                    replaced[id(p)] = nn.Parameter(values, requires_grad=p.requires_grad)
                    replaced[id(p)].__dict__.update(vars(p))
                module.register_parameter(name, replaced[id(p)])
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")  # noqa: SLF001  keeps persistence
    attributes = (v for module in model.modules() for v in vars(module).values())
    return not any(isinstance(v, torch.Tensor) and v.is_meta for v in attributes)


@contextlib.contextmanager
def _pretrained_from_configs() -> Iterator[None]:
    """Let transformers' `from_pretrained`, which refuses the meta device, make models of their configs."""
    import transformers

    base: Any = transformers.PreTrainedModel
    before = vars(base)["from_pretrained"]

    def made(kind: Any, *_: Any, config: Any, dtype: Any = None, **__: Any) -> Any:
        kept = None if dtype == "auto" else dtype  # a file's own types are known only from its values
        return kind._from_config(config, dtype=kept)  # noqa: SLF001  what AutoModel.from_config calls

    base.from_pretrained = classmethod(made)
    try:
        yield
    finally:
        base.from_pretrained = before
