"""Put keyed noise into a model: every dropout module, and attention where transformers lets us."""

from __future__ import annotations

from torch import nn

from engine.attention import key_attention
from engine.noise import KeyedDropout, KeyedNoise


def key_dropout(model: nn.Module, noise: KeyedNoise) -> int:
    """Replace every nn.Dropout of a model, in place; returns how many. Attention is keyed in its kernel."""
    replaced = 0
    for name, module in list(model.named_modules()):
        for child_name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                site = f"{name}.{child_name}" if name else child_name
                setattr(module, child_name, KeyedDropout(child.p, noise, site))
                replaced += 1
    key_attention(model, noise)
    return replaced
