"""Attention whose dropout is keyed by sample, for transformers models and lengths up to 512.

Attention kernels draw their own dropout noise, by block and batch row. Where a model has dropout inside
attention, a function registered here with transformers computes the probabilities and applies a keyed mask.
Without dropout it calls the model's plain kernel.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobatch.core.errors import UserError
from isobatch.engine.noise.keyed_noise import KeyedDropout, KeyedNoise, apply_mask, hash_bits, kept
from isobatch.models.attention_functions import known_attention, register_attention, without_waiting

NAME = "keyed"
MAX_KEYED_LENGTH = 512
"""Longer samples need too large a (T, T) matrix per head; recipes' default attention dropout is 0."""
SOFTMAX_WIDTH = 16
"""Rows below this, a vector of AVX-512, take torch 2.13 five times as long on a CPU as longer ones."""


def key_dropout(model: nn.Module, noise: KeyedNoise) -> int:
    """Replace every nn.Dropout in place, and key dropout inside attention; returns how many were replaced."""
    keyed: dict[int, KeyedDropout] = {}  # a module registered under several names stays one module
    for name, module in list(model.named_modules()):
        for child_name, child in list(module._modules.items()):  # noqa: SLF001  named_children skips second names
            if type(child) is nn.Dropout:
                site = f"{name}.{child_name}" if name else child_name
                setattr(module, child_name, keyed.setdefault(id(child), KeyedDropout(child.p, noise, site)))
    key_attention(model, noise)
    return len(keyed)


def key_attention(model: nn.Module, noise: KeyedNoise) -> None:
    """Make a transformers model use the keyed attention function; other models are left alone."""
    config: Any = getattr(model, "config", None)
    if "transformers" not in sys.modules or not hasattr(config, "_attn_implementation"):
        return
    plain, mask = known_attention(config._attn_implementation or "sdpa")  # noqa: SLF001  transformers has no public name
    register_attention(NAME, partial(keyed_attention, plain), without_waiting(mask))
    for name, module in model.named_modules():
        module.noise_site = noise.register(f"{name}.attention") if hasattr(module, "is_causal") else None
    model.set_attn_implementation(NAME)  # type: ignore[operator]


def keyed_attention(
    plain: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """query (B, H, T, D), key and value (B, K, S, D); returns (B, T, H, D), as transformers wants it.

    `plain`: the model's own function, used without dropout. `named`: among others `dropout`, `scaling` and
    `is_causal`.
    """
    dropout, is_causal = named.get("dropout", 0.0), named.get("is_causal")
    if not dropout or not module.training:
        return plain(module, query, key, value, mask, **{**named, "dropout": 0.0})
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    probabilities = _probabilities(query, key, mask, named.get("scaling"), causal and query.shape[2] > 1)
    mask = dropout_mask(module.noise_site.draw(), probabilities.shape, dropout)
    dropped = apply_mask(probabilities, mask, dropout).to(value.dtype)
    return torch.matmul(dropped, repeat_kv_heads(value, query)).transpose(1, 2).contiguous(), None


def repeat_kv_heads(x: Tensor, query: Tensor) -> Tensor:
    """x (B, K, ...) with its heads repeated to the H heads of query (B, H, ...): grouped-query attention."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) if x.shape[1] != query.shape[1] else x


def _probabilities(
    query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None, causal: bool
) -> Tensor:
    """(B, H, T, S) float32 attention probabilities."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, repeat_kv_heads(key, query).transpose(2, 3)).float() * scale
    if mask is None and causal:
        length, span = scores.shape[-2:]
        mask = torch.ones(length, span, dtype=torch.bool, device=scores.device).tril(span - length)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if scores.is_cpu and (missing := SOFTMAX_WIDTH - scores.shape[-1]) > 0:
        return F.pad(scores, (0, missing), value=-torch.inf).softmax(-1)[..., :-missing]
    return scores.softmax(-1)


def dropout_mask(keys: Tensor, shape: torch.Size, probability: float) -> Tensor:
    """A (B, H, T, S) mask of 0 and 1 that does not depend on padding of T and S.

    The position of a pair is counted in a square of MAX_KEYED_LENGTH by MAX_KEYED_LENGTH. Raises UserError
    where a batch is longer.
    """
    batch, heads, length, span = shape
    if max(length, span) > MAX_KEYED_LENGTH:
        raise UserError(
            f"dropout inside attention is keyed up to {MAX_KEYED_LENGTH} tokens, and this batch has"
            f" {max(length, span)}: set the model's attention dropout to 0, or use --noise native"
        )
    pairs = (span + 1) // 2
    row = torch.arange(heads * length, device=keys.device)
    start = ((row // length) * MAX_KEYED_LENGTH + row % length) * (MAX_KEYED_LENGTH // 2)
    keyed = torch.stack([keys[:, :1] + start.to(torch.int32), keys[:, 1:].expand(-1, len(start))], -1)
    draws = hash_bits(keyed.reshape(-1, 2), pairs).view(torch.int16)
    return kept(draws.view(batch, heads, length, 2 * pairs), probability)[..., :span].contiguous()
