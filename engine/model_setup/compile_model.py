"""Compile a model for training: its blocks one at a time, so that one graph serves all that are alike.

A graph of the whole model would hold each block anew, and takes as often as long to compile. Between blocks
DDP reduces and FSDP gathers.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from isobatch.core.plan import Plan
from isobatch.engine.model_setup.layer_blocks import layer_blocks


def compile_model(model: nn.Module, plan: Plan) -> None:
    """Let `model` be compiled at its next forward pass, in the plan's mode; nothing if the plan has none.

    It is one graph where it has no blocks of several modules, and as CUDA graphs.
    """
    if plan.compile != "off":
        from isobatch.engine.model_setup import gpu_graphs  # with Inductor, which is large

        config, inductor = torch._dynamo.config, torch._inductor.config  # noqa: SLF001  torch's options
        if plan.device == "cuda":
            inductor.joint_custom_post_pass = gpu_graphs.KeptResiduals()
            inductor.post_grad_custom_pre_pass = gpu_graphs.SumsWithinSamples()
            # The card times cuBLAS's products and Triton's, of which what follows can be a part.
            inductor.max_autotune_gemm = plan.compile == "max-autotune"
            inductor._pre_fusion_custom_pass = gpu_graphs.WholeEpilogues()  # noqa: SLF001  torch's name
        # Compile blocks under activation checkpointing although they count their draws of noise. Without this
        # option dynamo runs such blocks eagerly, in silence. The count must not be taken up again when a
        # block is recomputed, and is not.
        config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        config.recompile_limit = 64  # for all blocks: by shape, with and without gradients
        blocks = [block for block in layer_blocks(model) if any(block.children())]
        whole = not blocks or plan.compile == "reduce-overhead"
        config.optimize_ddp = whole  # else graphs of blocks are cut once more where DDP's buckets end
        for part in [model] if whole else blocks:
            part.compile(mode="reduce-overhead" if plan.compile == "reduce-overhead" else None)


def uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, a compiled model runs eagerly: for batches of shapes that are not worth a compilation."""
    if any(module._compiled_call_impl is not None for module in model.modules()):  # noqa: SLF001  no public way
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()
