"""Classification by a language model: which of a few answers is the likeliest behind each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.base import Batch


def right(model: Any, batch: Batch, answers: Sequence[Sequence[int]]) -> Tensor:
    """(B,) bool: whether a row's own answer, its learnt tokens, is the likeliest of `answers` (token ids).

    The answers' log-probabilities are sums over their tokens, the end token among them. A row whose answer
    is none of them counts as wrong.
    """
    scores, own = [], []
    for answer in answers:
        tokens, inside = _answered(batch, torch.tensor(answer, device=batch["tokens"].device))
        scores.append(_log_probability(model, tokens, inside))
        own.append(_is_own(batch, tokens, inside))
    chosen = torch.stack(scores).argmax(0)
    return torch.stack(own).gather(0, chosen[None])[0]


def _answered(batch: Batch, answer: Tensor) -> tuple[Tensor, Tensor]:
    """(B, W) tokens of the prompts with this answer behind, and where it stands; 0 behind it."""
    start = batch["learn"].long().argmax(1)
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


def _is_own(batch: Batch, tokens: Tensor, inside: Tensor) -> Tensor:
    """(B,) whether the rows' learnt tokens are these."""
    width = max(tokens.shape[1], batch["tokens"].shape[1])
    padded = [
        torch.nn.functional.pad(t, (0, width - t.shape[1]))
        for t in (batch["tokens"].long(), batch["learn"].bool(), tokens, inside)
    ]
    theirs, learnt, ours, there = padded
    return ((theirs == ours) | ~learnt).all(1) & (learnt == there).all(1)
