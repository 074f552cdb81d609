"""Attention functions that a run registers with transformers, and takes out again when it ends."""

from __future__ import annotations

import sys
from typing import Any

_registered: set[str] = set()


def register_attention(name: str, attention: Any, mask: Any) -> None:
    """Let models choose `attention` and `mask` by `name`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _registered.add(name)


def known_attention(kernel: str) -> tuple[Any, Any]:
    """(attention, mask) registered under a name; SDPA's where there is none.

    The eager function belongs to each model's file; SDPA computes the same.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    functions: Any = AttentionInterface._global_mapping  # noqa: SLF001  no public way to read it
    masks: Any = AttentionMaskInterface._global_mapping  # noqa: SLF001
    return functions.get(kernel) or functions["sdpa"], masks.get(kernel, sdpa_mask)


def unregister_attention() -> None:
    """Take out all that was registered here: nothing process-wide outlives a run."""
    if "transformers" not in sys.modules:
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in _registered:
        AttentionInterface._global_mapping.pop(name, None)  # noqa: SLF001  no public way to remove one
        AttentionMaskInterface._global_mapping.pop(name, None)  # noqa: SLF001
    _registered.clear()
