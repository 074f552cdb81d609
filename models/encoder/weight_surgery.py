"""Masks on heads and neurons, and cutting them out for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.models.encoder.encoders import Layer
from isobatch.models.encoder.importance import Kept

if TYPE_CHECKING:
    from torch import Tensor, nn

MASK, IMPORTANCE = "mask", "importance"
Cuts = dict[str, list[tuple[int, "Tensor"]]]
"""Parameter -> (dimension, indices that stay)."""


def mask(linear: nn.Module, keep_K: Tensor) -> None:
    """Multiply a linear layer's input by 0 where `keep_K` is False, from now on."""
    linear.register_buffer(MASK, keep_K.to(linear.weight))  # type: ignore[arg-type]
    if not linear._forward_pre_hooks:
        linear.register_forward_pre_hook(_apply)


def _apply(linear: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    return None if linear.mask is None else (given[0] * linear.mask, *given[1:])


def masked(linear: Any) -> Tensor:
    """(K,) bool: the inputs that count."""
    import torch

    found = getattr(linear, MASK, None)
    return torch.ones(linear.in_features, dtype=torch.bool) if found is None else found.bool().cpu()


def kept(layers: list[Layer], head: int) -> Kept:
    """What the masks leave."""
    return Kept(
        [masked(layer.output).view(-1, head)[:, 0] for layer in layers],
        [masked(layer.down) for layer in layers],
    )


def put_masks(layers: list[Layer], keep: Kept, head: int) -> None:
    """Mask what does not stay; a layer of which all stays has no mask."""
    for layer, heads, neurons in zip(layers, keep.heads, keep.neurons, strict=True):
        for linear, columns in ((layer.output, heads.repeat_interleave(head)), (layer.down, neurons)):
            if not bool(columns.all()):
                mask(linear, columns)


def cut(layers: list[Layer]) -> Cuts:
    """Take out of the model all that is masked; returns what stays of each parameter that was cut."""
    cuts: Cuts = {}
    for layer in layers:
        _cut_between(layer, ("query", "key", "value"), "output", cuts)
        _cut_between(layer, ("up",), "down", cuts)
    return cuts


def _cut_between(layer: Layer, makers: tuple[str, ...], reader: str, cuts: Cuts) -> None:
    """Remove the masked inputs of one linear layer, and what makes them in those before it."""
    linear = getattr(layer, reader)
    stays = masked(linear)
    if bool(stays.all()):
        return
    indices = stays.nonzero().flatten()
    for maker in makers:
        keep_rows(getattr(layer, maker), indices)
        cuts[f"{layer.name(maker)}.weight"] = [(0, indices)]
        cuts[f"{layer.name(maker)}.bias"] = [(0, indices)]
    keep_columns(linear, indices)
    cuts[f"{layer.name(reader)}.weight"] = [(1, indices)]


def keep_rows(linear: Any, indices: Tensor) -> None:
    """Outputs that stay."""
    linear.weight = _part(linear.weight, 0, indices)
    linear.bias = _part(linear.bias, 0, indices)
    linear.out_features = len(indices)


def keep_columns(linear: Any, indices: Tensor) -> None:
    """Inputs that stay. Buffers that go with them are cut alike; a mask is used up."""
    linear.weight = _part(linear.weight, 1, indices)
    linear.in_features = len(indices)
    if getattr(linear, MASK, None) is not None:
        linear.register_buffer(MASK, None)
    if getattr(linear, IMPORTANCE, None) is not None:
        linear.register_buffer(IMPORTANCE, linear.importance[indices.to(linear.importance.device)])


def _part(parameter: Any, dimension: int, indices: Tensor) -> Any:
    from torch import nn

    values = parameter.detach().index_select(dimension, indices.to(parameter.device)).contiguous()
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
