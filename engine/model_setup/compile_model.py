"""Compile a model for training, or take it back, as its strategy needs it.

DDP overlaps its reduction with a compiled backward pass only if the graph was cut where its buckets end.
torch cuts a model that is compiled INSIDE the wrapper; one that was compiled before is not compiled again.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.plan import Plan


def compile_model(model: nn.Module, plan: Plan) -> None:
    """Let `model` be compiled at its next forward pass, in the plan's mode; nothing if the plan has none."""
    if plan.compile != "off":
        # Compile blocks under activation checkpointing although they count their draws of noise. Without this
        # option dynamo runs such blocks eagerly, in silence. The count must not be taken up again when a
        # block is recomputed, and is not.
        option = "skip_fwd_side_effects_in_bwd_under_checkpoint"
        if hasattr(torch._dynamo.config, option):  # noqa: SLF001  torch's name for its options
            setattr(torch._dynamo.config, option, True)  # noqa: SLF001
        model.compile(mode=None if plan.compile == "on" else plan.compile)


def uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, a compiled model runs eagerly: for batches of shapes that are not worth a compilation."""
    if any(module._compiled_call_impl is not None for module in model.modules()):  # noqa: SLF001  no public way
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()


def run_uncompiled(model: nn.Module) -> None:
    """Let `model` run eagerly until it is compiled again."""
    model._compiled_call_impl = None  # noqa: SLF001  torch has no public way back
