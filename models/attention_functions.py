"""Attention functions of ours in transformers' tables, and causal attention without a mask."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CAUSAL = "-causal"
"""Ends the name under which an attention function is registered a second time, without a mask function."""
_registered: dict[str, tuple[Any, Any]] = {}
"""Name -> (attention function, mask function or None)."""


def register_attention(name: str, attention: Any, mask: Any) -> None:
    """Register an attention function and its mask function under `name`, for `set_attn_implementation`."""
    _registered[name] = attention, mask
    for table, function in zip(_tables(), (attention, mask), strict=True):
        if function is not None:
            table[name] = function


def _tables() -> tuple[Any, Any]:
    """transformers' attention functions and mask functions by name, which have no public way to read."""
    from transformers import AttentionInterface, AttentionMaskInterface

    return AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping  # noqa: SLF001


def known_attention(kernel: str) -> tuple[Any, Any]:
    """(attention function, mask function) registered under a name; those of SDPA where there are none.

    The eager function is not registered but defined in each model's file; SDPA computes the same.
    """
    functions, masks = _tables()
    return functions.get(kernel) or functions["sdpa"], masks.get(kernel) or masks["sdpa"]


def without_waiting(mask: Any) -> Any:
    """A mask function that asks no GPU whether rows are padded, as transformers' own do to skip the mask."""

    def build(*arguments: Any, **named: Any) -> Any:
        padding = named.get("attention_mask")
        if padding is not None and answers_late(padding):
            named |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return mask(*arguments, **named)

    return build


def answers_late(tensor: Tensor) -> bool:
    """Whether to read a number of this tensor is to wait for all work that is queued on its device."""
    return tensor.is_cuda


@contextlib.contextmanager
def causal_attention_alone(config: Any, length: int) -> Iterator[None]:
    """Inside, a decoder's attention is causal and builds no mask: rows are padded on the right or not at all.

    Without this, transformers looks for packed rows in the positions, which waits for the GPU, and gives a
    compiled model a dense (T, T) mask, with which SDPA cannot take its flash kernel. `config`: the model's;
    `length`: T, the rows' length. A model whose attention has a window that is shorter is left alone.
    """
    kernel = config._attn_implementation  # noqa: SLF001  no public name
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    needs_mask = not kernel or kernel == "eager" or kernel.startswith("flash")
    if needs_mask or any(window is not None and length >= window for window in windows):
        yield
        return
    # Registered again under a name without a mask function: transformers then makes no mask.
    register_attention(kernel + CAUSAL, known_attention(kernel)[0], None)
    config._attn_implementation = kernel + CAUSAL  # noqa: SLF001  set_attn_implementation reloads kernels
    try:
        yield
    finally:
        config._attn_implementation = kernel  # noqa: SLF001


def registered_attention() -> dict[str, tuple[Any, Any]]:
    """Name -> (attention function, mask function) of all that is registered here."""
    return dict(_registered)


def register_again(found: dict[str, tuple[Any, Any]]) -> None:
    """Register what `registered_attention` found: another model may have taken the names since."""
    for name, functions in found.items():
        register_attention(name, *functions)


def unregister_attention() -> None:
    """Unregister everything that was registered here in this process."""
    for name in _registered:
        for table in _tables():
            table.pop(name, None)
    _registered.clear()
