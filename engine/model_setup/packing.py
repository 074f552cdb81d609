"""Sample packing: the samples of a micro-batch in one row, each attending to itself alone, without padding.

Inside the model the padded (B, T) positions are the (1, N) real ones. The task's input and output keep their
rows, so that what is learnt is the same. Attention runs in torch's kernel for variable lengths where there is
one (CUDA), else on rows padded for attention alone (ModernBERT's unpadding, Warner et al. 2024; Zeng
et al. 2022, "Boosting distributed training performance of the unpadded BERT model").
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isobatch.core.errors import UserError
from isobatch.engine.loading.device_copies import array_to_device
from isobatch.engine.noise.keyed_attention import repeat_kv_heads
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.models.attention_functions import known_attention, register_attention

NAME = "packed"


class PackedLayout:
    """Positions of the N tokens of B samples in a right-padded (B, T) batch. `lengths` (B,), `width` T."""

    def __init__(self, lengths: np.ndarray, width: int, device: torch.device) -> None:
        rows, positions = np.nonzero(np.arange(width) < lengths[:, None])
        self.rows, self.width, self.tokens = len(lengths), width, len(rows)
        self.longest = int(lengths.max())
        self.padded_positions = array_to_device(rows * width + positions, device)
        """(N,): each token's index in the flattened (B, T) batch."""
        self.positions = array_to_device(positions, device)[None]
        """(1, N): each token's position in its sample."""
        self.borders = array_to_device(np.append(0, np.cumsum(lengths)).astype(np.int32), device)
        """(B + 1,) int32: cumulative lengths, where samples begin and end in the row."""

    def take(self, x: Tensor) -> Tensor:
        """(B, T, ...) -> (1, N, ...)."""
        return x.flatten(0, 1).index_select(0, self.padded_positions)[None]

    def pad(self, x: Tensor) -> Tensor:
        """(1, N, ...) -> (B, T, ...), padded with zeros."""
        empty = x.new_zeros(self.rows * self.width, *x.shape[2:])
        return empty.index_copy(0, self.padded_positions, x[0]).view(self.rows, self.width, *x.shape[2:])


class SamplePacking:
    """Hooks that pack the input of a transformers decoder and unpack its logits; `bind` sets the lengths."""

    forwarding = 0
    """Packed forward passes now running: transformers' mask functions get no model to ask."""

    def __init__(self, model: nn.Module, noise: KeyedNoise | None) -> None:
        self.noise = noise
        self.lengths: np.ndarray | None = None
        self.layout: PackedLayout | None = None
        """Layout of the last forward pass, kept for its backward pass."""
        _register(model, self)
        model.register_forward_pre_hook(self._pack, with_kwargs=True)
        model.register_forward_hook(self._unpack, always_call=True)

    def bind(self, lengths: np.ndarray | None) -> None:
        """Set the lengths (B,) of the rows of further forward passes; None turns packing off."""
        self.lengths = lengths
        self._set_layout(None)

    @contextlib.contextmanager
    def preserve_state(self) -> Iterator[None]:
        """Restore the bound lengths and the layout afterwards, so that others can be bound inside."""
        lengths, layout = self.lengths, self.layout
        yield
        self.lengths = lengths
        self._set_layout(layout)

    def _set_layout(self, layout: PackedLayout | None) -> None:
        self.layout = layout
        if self.noise is not None:
            self.noise.packed_rows = layout

    def _pack(self, _model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        self._set_layout(None)
        if self.lengths is None:
            return None
        if args or inputs.get("attention_mask") is not None or "input_ids" not in inputs:
            raise UserError("--pack on: this task gives its model more than tokens: leave the flag out")
        tokens = inputs["input_ids"]
        layout = PackedLayout(self.lengths, tokens.shape[1], tokens.device)
        self._set_layout(layout)
        SamplePacking.forwarding += 1
        return (), {**inputs, "input_ids": layout.take(tokens), "position_ids": layout.positions}

    def _unpack(self, _model: nn.Module, _args: Any, output: Any) -> Any:
        if self.lengths is None or self.layout is None:
            return None
        SamplePacking.forwarding -= 1
        if output is not None:  # None after a forward pass that failed
            output.logits = self.layout.pad(output.logits)
        return output


def _register(model: Any, packing: SamplePacking) -> None:
    """Make a transformers model use `_packed_attention`, and no mask in packed forward passes."""
    plain, mask = known_attention(model.config._attn_implementation or "sdpa")  # noqa: SLF001  no public name

    def no_mask(*args: Any, **named: Any) -> Any:
        return None if SamplePacking.forwarding else mask(*args, **named)

    register_attention(NAME, partial(_packed_attention, plain), no_mask)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.packing = packing
    model.set_attn_implementation(NAME)


def _packed_attention(
    plain: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """query (1, H, N, D), key and value (1, K, N, D); returns (1, N, H, D), as transformers wants it.

    `plain`: the model's own function, used without packing. `named`: among others `dropout` and `scaling`.
    """
    layout = module.packing.layout
    if layout is None:
        return plain(module, query, key, value, mask, **named)
    if query.is_cuda:  # there torch has a kernel for variable lengths
        if named.get("dropout") and module.training:
            raise UserError("--pack on: attention's kernel takes no dropout: add --dropout 0")
        return _varlen(layout, query, key, value, named.get("scaling")), None
    rows = [layout.pad(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value)]
    output, _ = plain(module, *rows, None, **named)
    return layout.take(output), None


def _varlen(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """torch's kernel for variable lengths, in the value's number format; its versions take other options.

    Rotary embeddings leave queries and keys in fp32, and autocast does not know this kernel.
    """
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if scaling is not None and "scale" in known:
        options["scale"] = scaling
    elif scaling is not None:  # the kernel scales by 1 / sqrt(D)
        query = query * (scaling * query.shape[-1] ** 0.5)
    if "enable_gqa" in known:
        options["enable_gqa"] = key.shape[1] != query.shape[1]
    else:
        key, value = repeat_kv_heads(key, query), repeat_kv_heads(value, query)
    q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    borders, longest = layout.borders, layout.longest
    output: Any = varlen_attn(q, k, v, borders, borders, longest, longest, **options)
    return output[None]
