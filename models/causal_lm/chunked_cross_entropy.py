"""Cross-entropy of a language model's head without its whole table of logits.

Logits of a few tokens at a time are made, turned into gradients in place and dropped, as in Liger's fused
linear cross-entropy (Hsu et al. 2024): memory of one chunk in place of tokens x vocabulary, for the same
multiplications. Tokens that are not to be predicted cost nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobatch.models.causal_lm.model_sizes import CHUNK_BYTES, PLAIN_HEADS

IGNORED = -100


class Head(nn.Linear):
    """A head that can be told to pass its input on."""

    passes = False

    def forward(self, states: Tensor) -> Tensor:
        return states if self.passes else super().forward(states)


def make_passable(model: Any) -> None:
    """Let a model's head become a `Head`, if its logits are those of a plain linear layer."""
    head = model.get_output_embeddings()
    if model.config.model_type in PLAIN_HEADS and type(head) is nn.Linear:
        head.__class__ = Head


def loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p of (B, T) targets, in nats and fp32; IGNORED ones have none."""
    head = getattr(model, "module", model).get_output_embeddings()
    # ZeRO-3 has the head's weights here only while the head itself runs.
    if not isinstance(head, Head) or hasattr(head.weight, "ds_id"):
        logits = model(input_ids=tokens, use_cache=False).logits
        # The last position keeps its logits and an ignored target: slicing logits would copy them all.
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
    with passing(head):
        states = model(input_ids=tokens, use_cache=False).logits
    learnt = targets.flatten() != IGNORED
    weights: list[Tensor | None] = [head.weight, head.bias]
    if not torch.is_grad_enabled():  # a function of its own would make gradients even so
        weights = [None if w is None else w.detach() for w in weights]
    found: Tensor = _Chunked.apply(states.flatten(0, 1)[learnt], *weights, targets.flatten()[learnt])
    return found


@contextlib.contextmanager
def passing(head: Head) -> Iterator[None]:
    head.passes = True
    try:
        yield
    finally:
        head.passes = False


class _Chunked(torch.autograd.Function):
    """(N, D) states, (V, D) weight, bias or None, (N,) targets -> the sum; gradients are made on the way."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        kind = states.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
        rounded, total = weight.to(dtype), torch.zeros((), device=states.device)
        wanted = ctx.needs_input_grad
        of_states = torch.empty_like(states) if wanted[0] else None
        of_weight = torch.zeros_like(weight) if wanted[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and wanted[2] else None
        rows = max(1, CHUNK_BYTES // (4 * len(weight)))
        with torch.autocast(kind, enabled=False):
            for part in range(0, len(states), rows):
                at = slice(part, part + rows)
                some, answers = states[at].to(dtype), targets[at, None]
                logits = some @ rounded.T if bias is None else torch.addmm(bias.to(dtype), some, rounded.T)
                logs = logits.float().log_softmax(-1)
                total -= logs.gather(1, answers).sum()
                error = logs.exp_().scatter_add_(1, answers, logs.new_full(answers.shape, -1.0))
                if of_bias is not None:
                    of_bias += error.sum(0)
                error = error.to(dtype)
                if of_states is not None:
                    of_states[at] = error @ rounded
                if of_weight is not None and of_weight.dtype == error.dtype:
                    of_weight.addmm_(error.T, some)  # no table of its own for each chunk
                elif of_weight is not None:
                    of_weight += error.T @ some
        ctx.save_for_backward(of_states, of_weight, of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if g is None else g.mul_(gradient) for g in ctx.saved_tensors]
        return (*found, None)
