"""Key the dropout of a model: every nn.Dropout module, and dropout inside transformers' attention."""

from __future__ import annotations

from torch import nn

from isobatch.engine.noise.keyed_attention import key_attention
from isobatch.engine.noise.keyed_noise import KeyedDropout, KeyedNoise


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
