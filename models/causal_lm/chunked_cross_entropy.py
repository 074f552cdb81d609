"""Cross-entropy of a language model's head in chunks, without the full table of logits.

The logits of a few tokens at a time are computed, turned into gradients in place and dropped, as in Liger's
fused linear cross-entropy (Hsu et al. 2024). Memory is that of one chunk and not of tokens x vocabulary; the
number of multiplications is the same. Ignored targets cost nothing.

Letters: B rows, T tokens of a row, N predicted tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from isobatch.models.attention_functions import causal_attention_alone
from isobatch.models.causal_lm.frozen_weights import FrozenLinear, linear, product_dtype
from isobatch.models.causal_lm.model_sizes import LINEAR_HEAD_TYPES, PACKABLE_TYPES
from isobatch.models.fused_kernels import fused_on_gpu
from isobatch.models.head_chunks import chunk_bytes

IGNORE_INDEX = -100
"""The target of a token that is not predicted."""
PAD = 64
"""Tensor cores are at full speed only for a vocabulary that is a multiple of this."""


class BypassableHead(nn.Linear):
    """A linear LM head that computes `instead` of its hidden states, where that is set, and no logits."""

    instead: Callable[[Tensor], Any] | None = None

    def forward(self, states: Tensor) -> Any:
        if self.instead is not None:
            return self.instead(states)
        return linear(states, self.weight, self.bias)


def make_head_bypassable(model: Any) -> None:
    """Turn a model's head into a `BypassableHead` if its logits are a plain linear layer's."""
    head = model.get_output_embeddings()
    if model.config.model_type in LINEAR_HEAD_TYPES and type(head) in (nn.Linear, FrozenLinear):
        head.__class__ = BypassableHead


def next_token_loss(
    model: Any, tokens: Tensor, targets: Tensor, count: int | None = None, smoothing: float = 0.0
) -> Tensor:
    """Sum of -log p of the targets, in nats and fp32.

    tokens: (B, T) int64; targets: (B, T) int64, IGNORE_INDEX where nothing is predicted; `count`: how many
    are predicted, where the host knows it; `smoothing`: the share of a target's probability that is spread
    over the vocabulary (Szegedy et al. 2016).
    """
    head = bypassable_head(model)
    if head is None:
        logits = run_model(model, tokens)
        # The last position has an ignored target, because slicing it off would copy all logits.
        return F.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            label_smoothing=smoothing,
        )
    flat = targets.flatten()

    def loss(states: Tensor) -> Tensor:
        return chunked_loss(states, flat, head, count, smoothing)

    return at_head(head, model, tokens, loss)


def bypassable_head(model: Any) -> BypassableHead | None:
    """The model's head if it is a linear layer that can be bypassed, else None."""
    head = getattr(model, "module", model).get_output_embeddings()
    return head if isinstance(head, BypassableHead) else None


def run_model(model: Any, tokens: Tensor) -> Tensor:
    """(B, T) int64 tokens -> (B, T, V) logits, or what the head computes instead.

    There is no attention mask: padding is on the right, so causal attention never sees it from a real token,
    and the targets of padding are ignored. Without a mask SDPA takes its faster causal path.
    """
    config = getattr(getattr(model, "module", model), "config", None)
    # Causal attention without a mask, for the model types of which it is known to be the same.
    is_plain = getattr(config, "model_type", None) in PACKABLE_TYPES
    with causal_attention_alone(config, tokens.shape[1]) if is_plain else contextlib.nullcontext():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def chunked_loss(
    states: Tensor, targets: Tensor, head: nn.Linear, count: int | None = None, smoothing: float = 0.0
) -> Tensor:
    """Sum of -log p of the targets under a linear head, in nats and fp32.

    states: (M, D); targets: (M,) int64, IGNORE_INDEX where nothing is predicted; `count`: N, how many are
    predicted, where the host knows it, so that it need not wait for the device to count them; `smoothing`
    as in `next_token_loss`.
    """
    rows = predicted_rows(targets, count)
    total: Tensor = ChunkedCrossEntropy.apply(
        states.index_select(0, rows), *_weights(head), targets.index_select(0, rows), smoothing
    )
    return total


def _weights(head: nn.Linear) -> list[Tensor | None]:
    """Detached where no gradient is wanted, which an autograd.Function's forward cannot see."""
    return [w if w is None or torch.is_grad_enabled() else w.detach() for w in (head.weight, head.bias)]


def predicted_rows(targets: Tensor, count: int | None) -> Tensor:
    """(N,) int64: the rows whose targets are predicted, ascending."""
    is_target = targets != IGNORE_INDEX
    if count is None:
        return is_target.nonzero()[:, 0]
    # A scatter of known size, as the size of nonzero() is known only once the device has computed it.
    place = (is_target.cumsum(0) - 1).masked_fill(~is_target, count).clamp_(max=count)
    rows = torch.arange(len(targets), device=targets.device)
    return torch.zeros(count + 1, dtype=torch.int64, device=targets.device).scatter_(0, place, rows)[:count]


def at_head(head: BypassableHead, model: Any, tokens: Tensor, compute: Callable[[Tensor], Any]) -> Any:
    """What `compute` makes of the (B * T, D) hidden states and of the head's weights, while these are whole.

    Under ZeRO-3 and FSDP they are gathered while the head runs; else it is done after the model, whose
    compiled graph does not hold it.
    """
    inside = hasattr(head.weight, "ds_id") or hasattr(head.weight, "device_mesh")
    head.instead = (lambda states: compute(states.flatten(0, 1))) if inside else lambda states: states
    try:
        found = run_model(model, tokens)
    finally:
        head.instead = None
    return found if inside else compute(found.flatten(0, 1))


class HeadGradients:
    """Gradients of states, weight and bias, added up over chunks; None of what needs none."""

    def __init__(self, needed: Sequence[bool], states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.formats = [None if w is None else w.dtype for w in (weight, bias)]
        self.vocabulary = len(weight)
        self.states = torch.empty_like(states) if needed[0] else None
        rows = padded_rows(len(weight))
        self.weight = weight.new_zeros(rows, weight.shape[1], dtype=torch.float32) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needed[2] else None

    def add(self, chunk: slice, errors: Tensor, chunk_states: Tensor, cast_weight: Tensor) -> None:
        """errors (n, V'): of the chunk's logits; the others as of `logit_chunks`."""
        if self.states is not None:
            self.states[chunk] = errors @ cast_weight
        if self.bias is not None:
            self.bias += errors[:, : len(self.bias)].sum(0, dtype=torch.float32)
        if self.weight is not None:
            add_product(self.weight[: errors.shape[1]], errors.T, chunk_states)

    def found(self) -> list[Tensor | None]:
        """In the number formats of what they are of."""
        parts = zip((self.weight, self.bias), self.formats, strict=True)
        return [self.states, *(None if g is None else g[: self.vocabulary].to(dtype) for g, dtype in parts)]


class ChunkedCrossEntropy(torch.autograd.Function):
    """(N, D) states, (V, D) weight, (V,) bias or None, (N,) targets, smoothing -> 0-d sum of -log p.

    Gradients are computed in the forward.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float
    ) -> Tensor:
        needs_grad, vocabulary = ctx.needs_input_grad, len(weight)
        nll_sum = torch.zeros((), device=states.device)
        gradients = HeadGradients(needs_grad, states, weight, bias)
        chunks = logit_chunks(states, weight, bias, rounded=any(needs_grad) and not smoothing)
        for chunk, chunk_states, logits, cast_weight in chunks:
            chunk_targets = targets[chunk, None]
            if smoothing:
                nll_sum += smoothing * (logits.logsumexp(-1) - logits[:, :vocabulary].mean(-1)).sum()
            if not any(needs_grad):
                nll_sum -= (1 - smoothing) * logits.log_softmax(-1).gather(1, chunk_targets).sum()
                continue
            nll, errors = softmax_errors(logits, chunk_targets, chunk_states.dtype)
            nll_sum += (1 - smoothing) * nll
            if smoothing:  # softmax - one-hot becomes softmax - smoothed one-hot
                errors[:, :vocabulary] -= smoothing / vocabulary
                errors.scatter_add_(1, chunk_targets, errors.new_full(chunk_targets.shape, smoothing))
            gradients.add(chunk, errors, chunk_states, cast_weight)
        ctx.save_for_backward(*gradients.found())
        return nll_sum

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (*[None if g is None else g.mul_(gradient) for g in ctx.saved_tensors], None, None)


LogitLoss = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
"""(Which of the N predicted tokens, their (n, V) fp32 logits) -> (a sum over them, 0-d; other sums, of which
no gradient is taken)."""


def loss_of_logits(model: Any, tokens: Tensor, rows: Tensor, compute: LogitLoss) -> tuple[Tensor, Tensor]:
    """Any sum over predicted tokens that is made of their logits, a chunk of them at a time.

    tokens: (B, T) int64; rows: (N,) which of the B * T positions predict. Returns the sums of what `compute`
    returns.
    """
    head = bypassable_head(model)
    if head is None:
        logits = run_model(model, tokens).flatten(0, 1).index_select(0, rows).float()
        return compute(slice(None), logits)

    def at_rows(states: Tensor) -> Any:
        return ChunkedLoss.apply(states.index_select(0, rows), *_weights(head), compute)

    return at_head(head, model, tokens, at_rows)


class ChunkedLoss(torch.autograd.Function):
    """(N, D) states, (V, D) weight, (V,) bias or None, a LogitLoss -> the sums of what that returns.

    Gradients are computed in the forward, those of the logits by autograd.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, compute: LogitLoss
    ) -> tuple[Tensor, Tensor]:
        trains, vocabulary = any(ctx.needs_input_grad), len(weight)
        gradients = HeadGradients(ctx.needs_input_grad, states, weight, bias)
        total, figures = torch.zeros((), device=states.device), torch.zeros((), device=states.device)
        for chunk, chunk_states, logits, cast_weight in logit_chunks(states, weight, bias):
            with torch.set_grad_enabled(trains):
                known = logits.detach().requires_grad_(trains)
                loss, more = compute(chunk, known[:, :vocabulary])
            total, figures = total + loss.detach(), figures + more.detach()
            if trains:
                (errors,) = torch.autograd.grad(loss, known)
                gradients.add(chunk, errors.to(chunk_states.dtype), chunk_states, cast_weight)
        ctx.save_for_backward(*gradients.found())
        ctx.mark_non_differentiable(figures)
        return total, figures

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if g is None else g.mul_(gradient) for g in ctx.saved_tensors), None)


def token_log_probs(model: Any, tokens: Tensor, targets: Tensor, count: int | None = None) -> Tensor:
    """(B, T) fp32: log p of each target in nats, 0 where nothing is predicted; see `next_token_loss`."""
    head = bypassable_head(model)
    if head is None:
        logits = run_model(model, tokens).float().transpose(1, 2)
        return -F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    flat = targets.flatten()
    rows = predicted_rows(flat, count)

    def of_rows(states: Tensor) -> Any:
        predicting = states.index_select(0, rows)
        return ChunkedLogProbs.apply(predicting, *_weights(head), flat.index_select(0, rows))

    found = at_head(head, model, tokens, of_rows)
    # Added up row by row, and not by index_add, whose order on a GPU is any.
    return found.new_zeros(len(flat)).index_copy(0, rows, found).view(targets.shape)


class ChunkedLogProbs(torch.autograd.Function):
    """(N, D) states, (V, D) weight, (V,) bias or None, (N,) targets -> (N,) fp32 log p of the targets.

    What each is multiplied with is known only once the loss is, so that the backward makes the logits again.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight, bias, targets)
        ctx.dtype = product_dtype(states)
        found = torch.empty(len(states), device=states.device)
        for chunk, _, logits, _ in logit_chunks(states, weight, bias):
            found[chunk] = logits.log_softmax(-1).gather(1, targets[chunk, None])[:, 0]
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets = ctx.saved_tensors
        gradients = HeadGradients(ctx.needs_input_grad, states, weight, bias)
        for chunk, chunk_states, logits, cast_weight in logit_chunks(states, weight, bias, ctx.dtype):
            _, errors = softmax_errors(logits, targets[chunk, None], torch.float32)
            errors = errors.mul_(-gradient[chunk, None]).to(ctx.dtype)
            gradients.add(chunk, errors, chunk_states, cast_weight)
        return *gradients.found(), None


def logit_chunks(
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
    rounded: bool = False,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Some of the (N, D) states at a time: their slice, the states in the format of products (`dtype`, else
    autocast's), their (n, V') logits, and the weight (V', D) in that format.

    Logits are in fp32, or, on tensor cores and if they may be `rounded`, in the format of products: half of
    what the head reads and writes, as where autocast runs a whole head.
    """
    dtype, vocabulary, device = dtype or product_dtype(states), len(weight), states.device
    cast_weight = cast_and_pad(weight, dtype)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    logits_dtype = dtype if rounded and on_tensor_cores(device, dtype) else torch.float32
    size = max(1, chunk_bytes(memory) // (logits_dtype.itemsize * vocabulary))
    with torch.autocast(device.type, enabled=False):
        for start in range(0, len(states), size):
            chunk = slice(start, start + size)
            chunk_states = states[chunk].to(dtype)
            logits = head_logits(chunk_states, cast_weight, bias, vocabulary, logits_dtype)
            yield chunk, chunk_states, logits, cast_weight


def on_tensor_cores(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products are in half precision on an NVIDIA GPU: torch can then give their sums in fp32."""
    return device.type == "cuda" and dtype != torch.float32 and torch.version.hip is None


def padded_rows(vocabulary: int) -> int:
    return -(-vocabulary // PAD) * PAD


def cast_and_pad(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(V', D): the weight in the number format of the products; on tensor cores V' is a multiple of 64."""
    vocabulary, width = weight.shape
    rows = padded_rows(vocabulary) if on_tensor_cores(weight.device, dtype) else vocabulary
    if rows == vocabulary:
        return weight.to(dtype)
    padded = torch.zeros(rows, width, dtype=dtype, device=weight.device)
    padded[:vocabulary] = weight
    return padded


def head_logits(
    states: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int, dtype: torch.dtype
) -> Tensor:
    """(n, V') logits in `dtype`; -inf in the columns that `cast_and_pad` added."""
    if on_tensor_cores(states.device, states.dtype):
        logits = torch.mm(states, weight.T, out_dtype=dtype)
        logits[:, vocabulary:] = float("-inf")
        if bias is not None:
            logits[:, :vocabulary] += bias
        return logits
    return F.linear(states, weight, None if bias is None else bias.to(states.dtype)).float()


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total (V, D) fp32 += one (V, n) @ other (n, D), in place where the number formats allow it."""
    if one.dtype == total.dtype:
        total.addmm_(one, other)
    elif on_tensor_cores(one.device, one.dtype):
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
    else:
        total += one @ other


def softmax_errors(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(n, V) logits, (n, 1) targets -> sum of -log p in fp32, and (n, V) softmax - one-hot in `dtype`.

    The logits may be overwritten. On a GPU one kernel reads and writes them once; elsewhere there are
    four passes in place.
    """
    return (_fused_errors if logits.is_cuda else _errors_in_place)(logits, targets, dtype)


def _errors_in_place(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    log_probs = logits.float().log_softmax(-1)
    nll = -log_probs.gather(1, targets).sum()
    errors = log_probs.exp_().scatter_add_(1, targets, log_probs.new_full(targets.shape, -1.0))
    return nll, errors.to(dtype)


def _errors_by_kernel(logits: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from isobatch.models.causal_lm.softmax_kernel import softmax_errors  # where there is Triton

    return softmax_errors(logits, targets, dtype)


_fused_errors = fused_on_gpu(_errors_by_kernel, _errors_in_place, is_kernel=True)
