"""Accuracy of a language model as a classifier: which label is the likeliest answer to each prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.models.base import Batch


def correct_predictions(model: Any, batch: Batch, label_tokens: Sequence[Sequence[int]]) -> Tensor:
    """(B,) bool: whether the answer that a row ends with is the likeliest of the labels.

    label_tokens: the token ids of each label, its end token included. A label's log-probability after the
    prompt is the sum over its tokens. A row that ends with no label counts as wrong.
    """
    labels = [torch.tensor(label_ids, device=batch["tokens"].device) for label_ids in label_tokens]
    is_true_label = torch.stack([_ends_with(batch, label_ids) for label_ids in labels])
    lengths = torch.tensor([[len(label_ids)] for label_ids in label_tokens], device=is_true_label.device)
    # A label may be the end of another one: the longest match is meant.
    longest_match = (is_true_label * lengths).amax(0)
    answer_start = batch["length"] - longest_match
    is_true_label &= lengths == longest_match
    scores = torch.stack(
        [_log_probability(model, *_with_answer(batch, answer_start, label_ids)) for label_ids in labels]
    )
    correct: Tensor = is_true_label.gather(0, scores.argmax(0)[None])[0]
    return correct


def _ends_with(batch: Batch, label_ids: Tensor) -> Tensor:
    """(B,) bool: whether these are the last tokens of a row."""
    positions = (
        batch["length"][:, None] - len(label_ids) + torch.arange(len(label_ids), device=label_ids.device)
    )
    last_tokens = batch["tokens"].long().gather(1, positions.clamp_min(0))
    return (last_tokens == label_ids).all(1) & (batch["length"] > len(label_ids))


def _with_answer(batch: Batch, answer_start: Tensor, label_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(B, W) tokens with this answer in place of the row's own, then 0; and (B, W) bool: the answer."""
    positions = torch.arange(int(answer_start.max()) + len(label_ids), device=label_ids.device)
    answer_offset = positions - answer_start[:, None]
    in_answer = (answer_offset >= 0) & (answer_offset < len(label_ids))
    prompt = torch.nn.functional.pad(batch["tokens"].long(), (0, len(label_ids)))[:, : len(positions)]
    tokens = torch.where(in_answer, label_ids[answer_offset.clamp(0, len(label_ids) - 1)], prompt)
    return tokens.masked_fill(answer_offset >= len(label_ids), 0), in_answer


def _log_probability(model: Any, tokens: Tensor, in_answer: Tensor) -> Tensor:
    """(B,) log-probability of the tokens in the answer, each given all tokens before it."""
    log_probs = model(input_ids=tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    correct: Tensor = (log_probs.gather(-1, tokens[:, 1:, None])[..., 0] * in_answer[:, 1:]).sum(1)
    return correct
