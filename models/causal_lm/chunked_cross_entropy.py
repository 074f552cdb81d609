"""Cross-entropy of a language model's head in chunks, without the full table of logits.

The logits of a few tokens at a time are computed, turned into gradients in place and dropped, as in Liger's
fused linear cross-entropy (Hsu et al. 2024). Memory is that of one chunk and not of tokens x vocabulary; the
number of multiplications is the same. Ignored targets cost nothing.

Letters: B rows, T tokens of a row, N predicted tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobatch.models.attention_functions import causal_attention_alone
from isobatch.models.causal_lm.model_sizes import CHUNK_BYTES, LINEAR_HEAD_TYPES, PACKABLE_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator

IGNORE_INDEX = -100
"""The target of a token that is not predicted."""


class BypassableHead(nn.Linear):
    """A linear LM head that returns its input, the hidden states, while `bypassed` is set."""

    bypassed = False

    def forward(self, states: Tensor) -> Tensor:
        return states if self.bypassed else super().forward(states)


def make_head_bypassable(model: Any) -> None:
    """Turn a model's head into a `BypassableHead` if its logits are a plain linear layer's."""
    head = model.get_output_embeddings()
    if model.config.model_type in LINEAR_HEAD_TYPES and type(head) is nn.Linear:
        head.__class__ = BypassableHead


def next_token_loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p of the targets, in nats and fp32.

    tokens: (B, T) int64; targets: (B, T) int64, IGNORE_INDEX where nothing is predicted.
    """
    head = getattr(model, "module", model).get_output_embeddings()
    # Under ZeRO-3 and FSDP the head's weights are gathered only while the model itself runs.
    sharded = hasattr(head.weight, "ds_id") or hasattr(head.weight, "device_mesh")
    if not isinstance(head, BypassableHead) or sharded:
        with _no_mask(model, tokens):
            logits = model(input_ids=tokens, use_cache=False).logits
        # The last position has an ignored target, because slicing it off would copy all logits.
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )
    with bypass(head), _no_mask(model, tokens):
        states = model(input_ids=tokens, use_cache=False).logits
    is_target = targets.flatten() != IGNORE_INDEX
    weights: list[Tensor | None] = [head.weight, head.bias]
    # autograd.Function.forward cannot see no_grad: detached weights skip the gradient work.
    if not torch.is_grad_enabled():
        weights = [None if w is None else w.detach() for w in weights]
    total_loss: Tensor = ChunkedCrossEntropy.apply(
        states.flatten(0, 1)[is_target], *weights, targets.flatten()[is_target]
    )
    return total_loss


def _no_mask(model: Any, tokens: Tensor) -> contextlib.AbstractContextManager[None]:
    """Causal attention without a mask, for the model types of which it is known to be the same."""
    if getattr(model, "module", model).config.model_type not in PACKABLE_TYPES:
        return contextlib.nullcontext()
    return causal_attention_alone(model, tokens.shape[1])


@contextlib.contextmanager
def bypass(head: BypassableHead) -> Iterator[None]:
    """Inside, the model returns the head's input in place of logits."""
    head.bypassed = True
    try:
        yield
    finally:
        head.bypassed = False


class ChunkedCrossEntropy(torch.autograd.Function):
    """(N, D) states, (V, D) weight, (V,) bias or None, (N,) targets -> 0-d sum of -log p.

    Gradients are computed in the forward.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        device_type = states.device.type
        dtype = (
            torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else states.dtype
        )
        cast_weight, nll_sum = weight.to(dtype), torch.zeros((), device=states.device)
        needs_grad = ctx.needs_input_grad
        grad_states = torch.empty_like(states) if needs_grad[0] else None
        grad_weight = torch.zeros_like(weight) if needs_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and needs_grad[2] else None
        tokens_per_chunk = max(1, CHUNK_BYTES // (4 * len(weight)))
        with torch.autocast(device_type, enabled=False):
            for start in range(0, len(states), tokens_per_chunk):
                chunk = slice(start, start + tokens_per_chunk)
                chunk_states, chunk_targets = states[chunk].to(dtype), targets[chunk, None]
                logits = (
                    chunk_states @ cast_weight.T
                    if bias is None
                    else torch.addmm(bias.to(dtype), chunk_states, cast_weight.T)
                )
                log_probs = logits.float().log_softmax(-1)
                nll_sum -= log_probs.gather(1, chunk_targets).sum()
                grad_logits = log_probs.exp_().scatter_add_(
                    1, chunk_targets, log_probs.new_full(chunk_targets.shape, -1.0)
                )
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                grad_logits = grad_logits.to(dtype)
                if grad_states is not None:
                    grad_states[chunk] = grad_logits @ cast_weight
                if grad_weight is not None and grad_weight.dtype == grad_logits.dtype:
                    grad_weight.addmm_(grad_logits.T, chunk_states)  # in place, without another (V, D) tensor
                elif grad_weight is not None:
                    grad_weight += grad_logits.T @ chunk_states
        ctx.save_for_backward(grad_states, grad_weight, grad_bias)
        return nll_sum

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if g is None else g.mul_(gradient) for g in ctx.saved_tensors]
        return (*gradients, None)
