"""Classification by a language model: which of a few answers is the likeliest behind each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobatch.models.base import Batch


def right(model: Any, batch: Batch, answers: Sequence[Sequence[int]]) -> Tensor:
    """(B,) bool: whether the tokens that a row ends with are the likeliest of `answers` (token ids).

    The answers' log-probabilities are sums over their tokens, the end token among them. A row that ends with
    none of them counts as wrong.
    """
    known = [torch.tensor(answer, device=batch["tokens"].device) for answer in answers]
    own = torch.stack([_ends_with(batch, answer) for answer in known])
    lengths = torch.tensor([[len(answer)] for answer in answers], device=own.device)
    longest = (own * lengths).amax(0)  # one answer may end as another does: the longest is meant
    start = batch["length"] - longest
    own &= lengths == longest
    scores = torch.stack([_log_probability(model, *_answered(batch, start, answer)) for answer in known])
    found: Tensor = own.gather(0, scores.argmax(0)[None])[0]
    return found


def _ends_with(batch: Batch, answer: Tensor) -> Tensor:
    """(B,) whether the last tokens of a row are these."""
    places = batch["length"][:, None] - len(answer) + torch.arange(len(answer), device=answer.device)
    last = batch["tokens"].long().gather(1, places.clamp_min(0))
    return (last == answer).all(1) & (batch["length"] > len(answer))


def _answered(batch: Batch, start: Tensor, answer: Tensor) -> tuple[Tensor, Tensor]:
    """(B, W) tokens of the rows up to `start`, with this answer behind, and where it stands; then 0."""
    places = torch.arange(int(start.max()) + len(answer), device=answer.device)
    offset = places - start[:, None]
    inside = (offset >= 0) & (offset < len(answer))
    prompt = torch.nn.functional.pad(batch["tokens"].long(), (0, len(answer)))[:, : len(places)]
    tokens = torch.where(inside, answer[offset.clamp(0, len(answer) - 1)], prompt)
    return tokens.masked_fill(offset >= len(answer), 0), inside


def _log_probability(model: Any, tokens: Tensor, inside: Tensor) -> Tensor:
    """(B,) of the tokens inside, each from those before it."""
    logs = model(input_ids=tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    found: Tensor = (logs.gather(-1, tokens[:, 1:, None])[..., 0] * inside[:, 1:]).sum(1)
    return found
