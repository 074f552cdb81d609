"""The blocks of a model: what is recomputed, or gathered from shards, one at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from isobatch.core.plan import Recompute


def layer_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the model's outermost nn.ModuleLists, in order."""
    inside: set[int] = set()
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            inside.update(id(m) for m in module.modules())
            found += list(module)
    return found


KEPT = ("mm", "addmm")
"""Products with weights; attention's scores, where they are made, would be as large as length squared."""
MATMUL_LAYERS = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")


def matmul_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters in the blocks that only matrix products use: autocast rounds them to its type anyway."""
    chosen: dict[nn.Parameter, None] = {}
    for module in (m for block in layer_blocks(model) for m in block.modules() if _is_matmul(m)):
        chosen.update(dict.fromkeys(module.parameters(recurse=False)))
    others = {p for m in model.modules() if not _is_matmul(m) for p in m.parameters(recurse=False)}
    return [p for p in chosen if p not in others]


def _is_matmul(module: nn.Module) -> bool:
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name in MATMUL_LAYERS or getattr(kind, "only_multiplies", False)


def checkpoint_activations(model: nn.Module, how: Recompute, keyed: bool) -> int:
    """Recompute each block's activations in the backward pass (Chen et al. 2016); returns how many blocks.

    Selective: but for what products with weights and attention's kernels give (Korthikanti et al. 2022). With
    keyed noise (`keyed`) no generator state is kept: the same key gives the same mask.
    """
    blocks = layer_blocks(model) if how != "off" else []
    for block in blocks:
        vars(block).pop("forward", None)  # which recomputes otherwise
        block.forward = _recomputing(block.forward, how == "selective", not keyed)
    return len(blocks)


def _recomputing(forward: Callable[..., Any], selective: bool, generators: bool) -> Callable[..., Any]:
    """A function of Python and no `partial`: dynamo compiles what a frame calls."""
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": generators}
    if selective:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_or_recompute)

    def recomputing(*args: Any, **named: Any) -> Any:
        return checkpoint(forward, *args, **options, **named)

    return recomputing


def _keep_or_recompute(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    name = operation.__name__.partition(".")[0]
    kept = name in KEPT or "dot_product" in name
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
