"""Masking attention heads and neurons, and removing the masked ones from the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isobatch.models.encoder.importance import HeadsAndNeurons

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.models.encoder.encoders import EncoderLayer

MASK, IMPORTANCE = "mask", "importance"
KeptIndices = dict[str, list[tuple[int, "Tensor"]]]
"""Parameter name -> (dimension, indices that stay) for each parameter that was shrunk."""


def mask_inputs(linear: nn.Module, keep_K: Tensor) -> None:
    """From now on multiply a linear layer's (K,) inputs by 0 where `keep_K` is False."""
    linear.register_buffer(MASK, keep_K.to(linear.weight))  # type: ignore[arg-type]
    if not linear._forward_pre_hooks:  # noqa: SLF001  torch has no public way to ask
        linear.register_forward_pre_hook(_apply_mask)


def _apply_mask(linear: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    return None if linear.mask is None else (arguments[0] * linear.mask, *arguments[1:])


def input_mask(linear: Any) -> Tensor:
    """(K,) bool: the inputs of a linear layer that are not masked."""
    import torch

    found = getattr(linear, MASK, None)
    return torch.ones(linear.in_features, dtype=torch.bool) if found is None else found.bool().cpu()


def current_masks(layers: list[EncoderLayer]) -> HeadsAndNeurons:
    """The masks of these layers."""
    heads = [input_mask(layer.output).view(-1, layer.head_size)[:, 0] for layer in layers]
    return HeadsAndNeurons(heads, [input_mask(layer.down) for layer in layers])


def set_masks(layers: list[EncoderLayer], keep: HeadsAndNeurons) -> None:
    """Mask what does not stay; a layer of which everything stays gets no mask."""
    for layer, heads, neurons in zip(layers, *keep, strict=True):
        columns = heads.repeat_interleave(layer.head_size)
        for linear, stays in ((layer.output, columns), (layer.down, neurons)):
            if not bool(stays.all()):
                mask_inputs(linear, stays)


CONSUMERS = ("output", "down")
"""The linear layers whose inputs are masked; what produces them shrinks together with them."""


def remove_masked(layers: list[EncoderLayer]) -> KeptIndices:
    """Remove everything masked from the weights, in place; returns what stays of each parameter."""
    kept_indices: KeptIndices = {}
    for layer in layers:
        for consumer in CONSUMERS:
            keep = input_mask(getattr(layer, consumer))
            if not bool(keep.all()):
                kept_indices |= _keep_between(layer, consumer, keep.nonzero().flatten())
    return kept_indices


def match_shapes(layers: list[EncoderLayer], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Give a model the sizes, masks and importance buffers of `shapes`, in place; whether sizes changed."""
    import torch

    changed = False
    for layer in layers:
        for consumer in CONSUMERS:
            linear, name = getattr(layer, consumer), layer.name(consumer)
            width = shapes[f"{name}.weight"][1]
            if width != linear.in_features:
                changed = True
                _keep_between(layer, consumer, torch.arange(width))
            for buffer in (MASK, IMPORTANCE):
                if f"{name}.{buffer}" not in shapes:
                    linear.register_buffer(buffer, None)
                elif buffer == MASK:
                    mask_inputs(linear, torch.ones(width))
                else:
                    linear.register_buffer(buffer, torch.zeros_like(linear.weight[0]))
    return changed


def _keep_between(layer: EncoderLayer, consumer: str, indices: Tensor) -> KeptIndices:
    """Shrink the layers on both sides to these values, in place; the mask is dropped, importance shrinks."""
    import torch

    kept: KeptIndices = {f"{layer.name(consumer)}.weight": [(1, indices)]}
    for name, linear, groups in layer.producers(consumer):
        first_rows = torch.arange(0, linear.out_features, linear.out_features // groups)
        rows = (first_rows[:, None] + indices).flatten()
        kept[f"{name}.weight"] = [(0, rows)]
        linear.weight = _select(linear.weight, 0, rows)
        if linear.bias is not None:
            kept[f"{name}.bias"] = [(0, rows)]
            linear.bias = _select(linear.bias, 0, rows)
        linear.out_features = len(rows)
    linear = getattr(layer, consumer)
    linear.weight = _select(linear.weight, 1, indices)
    linear.in_features = len(indices)
    linear.register_buffer(MASK, None)
    if getattr(linear, IMPORTANCE, None) is not None:
        linear.register_buffer(IMPORTANCE, linear.importance[indices.to(linear.importance.device)])
    return kept


def _select(parameter: Any, dimension: int, indices: Tensor) -> Any:
    from torch import nn

    values = parameter.detach().index_select(dimension, indices.to(parameter.device)).contiguous()
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
