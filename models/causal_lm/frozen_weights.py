"""Frozen weights in bf16: half the memory, while the products are computed as for fp32 weights.

The recipe rounds the values, so that every machine learns beside the same ones. A layer computes in the
number format of training: under bf16 autocast with the weights as they are, otherwise with a copy that lives
as long as its product.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HELD = torch.bfloat16


def product_dtype(x: Tensor) -> torch.dtype:
    """The number format of products with x: autocast's where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., K) @ weight (N, K) transposed + bias (N,), in the format of autocast or else of x."""
    dtype = product_dtype(x)
    if weight.requires_grad or weight.dtype in (dtype, torch.float32):
        return F.linear(x, weight, bias)
    return _Product.apply(x, weight, bias, dtype)


class _Product(torch.autograd.Function):
    """A product with a frozen weight; for the backward pass the weight is kept as it is held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.formats = x.dtype, dtype, None if bias is None else bias.dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        x_format, dtype, bias_format = ctx.formats
        of_x = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_x = (gradient.to(dtype) @ weight.to(dtype)).to(x_format)
            if ctx.needs_input_grad[2]:
                of_bias = gradient.flatten(0, -2).sum(0).to(bias_format)
        return of_x, None, of_bias, None


class FrozenLinear(nn.Linear):
    """A linear layer whose weight may be held in bf16."""

    only_multiplies = True
    """Its parameters are used in matrix products alone."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class FrozenEmbedding(nn.Embedding):
    """A table that may be held in bf16; its rows come out in fp32."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


@functools.cache
def _frozen_classes() -> dict[type, type]:
    from transformers.pytorch_utils import Conv1D

    class FrozenConv1D(Conv1D):
        """GPT-2's linear layer, whose weight (K, N) may be held in bf16."""

        only_multiplies = True

        def forward(self, x: Tensor) -> Tensor:
            return linear(x, self.weight.T, self.bias)

    return {nn.Linear: FrozenLinear, nn.Embedding: FrozenEmbedding, Conv1D: FrozenConv1D}


@torch.no_grad()
def hold_matrices_in_bf16(model: nn.Module, trained: Iterable[str] = ()) -> None:
    """Round the matrices and tables to bf16 and hold them so; everything else is held in fp32, and the
    modules named in `trained` too.

    All are copied: one tensor that still lies in the mapped file keeps the whole file in memory.
    """
    classes, held = _frozen_classes(), set()
    for module in model.modules():
        if type(module) in classes:
            module.__class__ = classes[type(module)]
            held.add(id(module.weight))
    held -= {id(p) for name in trained for p in model.get_submodule(name).parameters()}
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(HELD if id(p) in held else torch.float32, copy=True)


@contextlib.contextmanager
def held_in_fp32(model: nn.Module) -> Iterator[None]:
    """Inside, what is held in bf16 is held in fp32, with the same values."""
    held = [p for p in model.parameters() if p.dtype == HELD]
    for p in held:
        p.data = p.data.float()
    yield
    for p in held:
        p.data = p.data.to(HELD)
