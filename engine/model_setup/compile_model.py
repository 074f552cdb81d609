"""Compile a model for training, or take it back, as its strategy needs it.

DDP overlaps its reduction with a compiled backward pass only if the graph was cut where its buckets end.
torch cuts a model that is compiled INSIDE the wrapper; one that was compiled before is not compiled again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.plan import Plan


def compile_model(model: nn.Module, plan: Plan) -> None:
    """Let `model` be compiled at its next forward pass, in the plan's mode; nothing if the plan has none."""
    if plan.compile != "off":
        model.compile(mode=None if plan.compile == "on" else plan.compile)


def run_uncompiled(model: nn.Module) -> None:
    """Let `model` run eagerly until it is compiled again."""
    model._compiled_call_impl = None  # noqa: SLF001  torch has no public way back
