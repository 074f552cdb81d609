"""Log-probabilities of single tokens, without the full table of logits.

As in models/causal_lm/chunked_cross_entropy.py the logits of a few tokens at a time are made and dropped.
What a token's log-probability is multiplied with is known only once the loss is, so that the backward pass
makes the logits again.

Letters: R rows, T tokens of a row, N predicted tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobatch.models.causal_lm import chunked_cross_entropy as chunked
from isobatch.models.causal_lm.chunked_cross_entropy import IGNORE_INDEX


def token_log_probs(model: Any, tokens: Tensor, targets: Tensor, count: int | None = None) -> Tensor:
    """(R, T) fp32: log p of each target in nats, 0 where nothing is predicted.

    tokens: (R, T) int64; targets: (R, T) int64, IGNORE_INDEX where nothing is predicted; `count`: how many
    are predicted, where the host knows it.
    """
    head = chunked.bypassable_head(model)
    if head is None:
        logits = chunked.run_model(model, tokens).float().transpose(1, 2)
        return -F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    with chunked.bypass(head):
        states = chunked.run_model(model, tokens).flatten(0, 1)
    flat = targets.flatten()
    rows = chunked.predicted_rows(flat, count)
    weights = [head.weight, head.bias]
    if not torch.is_grad_enabled():
        weights = [None if w is None else w.detach() for w in weights]
    found = ChunkedLogProbs.apply(states.index_select(0, rows), *weights, flat.index_select(0, rows))
    # Added up row by row, and not by index_add, whose order on a GPU is any.
    return found.new_zeros(len(flat)).index_copy(0, rows, found).view(targets.shape)


class ChunkedLogProbs(torch.autograd.Function):
    """(N, D) states, (V, D) weight, (V,) bias or None, (N,) targets -> (N,) fp32 log p of the targets."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight, bias, targets)
        ctx.dtype = chunked.product_dtype(states)
        found = torch.empty(len(states), device=states.device)
        for chunk, logits, _ in _chunks(states, weight, bias, ctx.dtype):
            found[chunk] = logits.log_softmax(-1).gather(1, targets[chunk, None])[:, 0]
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_states = torch.empty_like(states) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs[2] else None
        for chunk, logits, cast_weight in _chunks(states, weight, bias, ctx.dtype):
            _, errors = chunked.softmax_errors(logits, targets[chunk, None], torch.float32)
            errors = errors.mul_(-gradient[chunk, None]).to(ctx.dtype)
            if grad_states is not None:
                grad_states[chunk] = errors @ cast_weight
            own = errors[:, : len(weight)]
            if grad_weight is not None:
                chunked.add_product(grad_weight, own.T, states[chunk].to(ctx.dtype))
            if grad_bias is not None:
                grad_bias += own.sum(0, dtype=torch.float32)
        weights = [None if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias)]
        return grad_states, *weights, None


def _chunks(states: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Any:
    """Yield (slice of the tokens, their (n, V') fp32 logits, the weight in the products' number format)."""
    cast_weight = chunked.cast_and_pad(weight, dtype)
    size = chunked.chunk_tokens(states.device, len(weight))
    with torch.autocast(states.device.type, enabled=False):
        for start in range(0, len(states), size):
            chunk = slice(start, start + size)
            yield (
                chunk,
                chunked.head_logits(states[chunk].to(dtype), cast_weight, bias, len(weight)),
                cast_weight,
            )
