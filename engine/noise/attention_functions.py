"""Register attention functions with transformers for a run, and unregister them when it ends."""

from __future__ import annotations

import sys
from typing import Any

_registered: set[str] = set()


def register_attention(name: str, attention: Any, mask: Any) -> None:
    """Register an attention function and its mask function under `name`, for `set_attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    _registered.add(name)


def known_attention(kernel: str) -> tuple[Any, Any]:
    """(attention function, mask function) registered under a name; those of SDPA where there are none.

    The eager function is not registered but defined in each model's file; SDPA computes the same.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    functions: Any = AttentionInterface._global_mapping  # noqa: SLF001  no public way to read it
    masks: Any = AttentionMaskInterface._global_mapping  # noqa: SLF001
    return functions.get(kernel) or functions["sdpa"], masks.get(kernel, sdpa_mask)


def unregister_attention() -> None:
    """Unregister everything that `register_attention` registered in this process."""
    if "transformers" not in sys.modules:
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in _registered:
        AttentionInterface._global_mapping.pop(name, None)  # noqa: SLF001  no public way to remove one
        AttentionMaskInterface._global_mapping.pop(name, None)  # noqa: SLF001
    _registered.clear()
