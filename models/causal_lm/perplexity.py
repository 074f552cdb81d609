"""Metrics of a language model: perplexity by token and by word, bits per byte, accuracy of labels.

`loss` is the mean in nats per predicted token, `perplexity` its exponential. `word_perplexity` and
`bits_per_byte` are the nats of all predicted tokens of a text by its words and by its UTF-8 bytes. The first
token of a block is predicted by nobody and costs nothing, so that short blocks look a little better; --stride
leaves one such token in all. The end of a line is a word, as in the literature on PTB and WikiText (Mikolov
et al. 2010).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from isobatch.models.base import Batch

MAX_EXPONENT = 700.0
RUNNING_TEXT = "text"
"""The form of a dataset of running text, as the data's facts name it."""
MAX_BYTES_PER_WORD = 24
"""Bytes per word above which a text has no words separated by white space (Chinese, Thai)."""


def metrics(
    parts: Mapping[str, Any], split: str, facts_extra: Mapping[str, Any], stride: int
) -> dict[str, Any]:
    """Metrics of a split from its reduced parts: `nll`, or `nll.N` and `right.N` for a mixture.

    A mixture also has those of each dataset, as NAME_metric, with an accuracy where its answers are labels.

    `facts_extra`: the data's extra facts; `stride`: distance in tokens of the windows over running text.
    """
    losses = [part for name, part in parts.items() if name.startswith("nll")]
    weight = sum(float(part.weight) for part in losses)
    loss = sum(float(part.value) for part in losses) / max(1.0, weight)
    if "nll" in parts:
        return _dataset_metrics(loss, facts_extra, facts_extra, split, stride)
    found: dict[str, Any] = {"loss": loss, "perplexity": finite_exp(loss)}
    for number, dataset in enumerate(facts_extra["sets"]):
        nll, correct = parts[f"nll.{number}"], parts.get(f"right.{number}")
        values: dict[str, Any] = {}
        if nll.weight:
            loss = float(nll.value) / float(nll.weight)
            values = _dataset_metrics(loss, dataset, facts_extra, split, stride)
        if correct is not None and correct.weight:
            values["accuracy"] = float(correct.value) / float(correct.weight)
        found |= {f"{dataset['name']}_{name}": value for name, value in values.items()}
    return found


def _dataset_metrics(
    loss: float, dataset: Mapping[str, Any], facts_extra: Mapping[str, Any], split: str, stride: int
) -> dict[str, Any]:
    """Metrics of one dataset with this mean loss in nats per predicted token."""
    found: dict[str, Any] = {"loss": loss, "perplexity": finite_exp(loss)}
    if dataset.get("form", RUNNING_TEXT) == RUNNING_TEXT:
        found["stride"] = stride
    elif facts_extra["response_only"]:
        found["unit"] = "response token"
    if text_counts := dataset.get("splits", {}).get(split):
        nats = loss * text_counts["predicted"]
        found["bits_per_byte"] = nats / (math.log(2) * text_counts["bytes"])
        if text_counts["bytes"] <= MAX_BYTES_PER_WORD * text_counts["words"]:
            words = text_counts["words"] + text_counts["lines"]
            found["word_perplexity"] = finite_exp(nats / max(1, words))
    return found


def finite_exp(value: float) -> float:
    """exp, finite for any loss: JSON has no infinity, and a diverged model must not break other readers."""
    return math.exp(min(value, MAX_EXPONENT))


def correct_predictions(model: Any, batch: Batch, label_tokens: Sequence[Sequence[int]]) -> Tensor:
    """(B,) bool: whether the answer that a row ends with is the likeliest of the labels.

    label_tokens: the token ids of each label, its end token included. A label's log-probability after the
    prompt is the sum over its tokens. A row that ends with no label counts as wrong.
    """
    import torch

    device = batch["tokens"].device
    labels = [torch.tensor(label_ids, device=device) for label_ids in label_tokens]
    is_true_label = torch.stack([_ends_with(batch, label_ids) for label_ids in labels])
    lengths = torch.tensor([[len(label_ids)] for label_ids in label_tokens], device=device)
    # A label may be the end of another one: the longest match is meant.
    longest_match = (is_true_label * lengths).amax(0)
    is_true_label &= lengths == longest_match
    answer_start = batch["length"] - longest_match
    scores = torch.stack([_log_probability(model, batch, answer_start, label_ids) for label_ids in labels])
    correct: Tensor = is_true_label.gather(0, scores.argmax(0)[None])[0]
    return correct


def _ends_with(batch: Batch, label_ids: Tensor) -> Tensor:
    """(B,) bool: whether these are the last tokens of a row."""
    import torch

    offset = torch.arange(len(label_ids), device=label_ids.device) - len(label_ids)
    last_tokens = batch["tokens"].long().gather(1, (batch["length"][:, None] + offset).clamp_min(0))
    return (last_tokens == label_ids).all(1) & (batch["length"] > len(label_ids))


def _log_probability(model: Any, batch: Batch, answer_start: Tensor, label_ids: Tensor) -> Tensor:
    """(B,) log-probability of this answer in place of the row's own, each token given all before it."""
    import torch

    positions = torch.arange(int(answer_start.max()) + len(label_ids), device=label_ids.device)
    offset = positions - answer_start[:, None]
    in_answer = (offset >= 0) & (offset < len(label_ids))
    prompt = torch.nn.functional.pad(batch["tokens"].long(), (0, len(label_ids)))[:, : len(positions)]
    tokens = torch.where(in_answer, label_ids[offset.clamp(0, len(label_ids) - 1)], prompt)
    tokens = tokens.masked_fill(offset >= len(label_ids), 0)
    log_probs = model(input_ids=tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    found: Tensor = (log_probs.gather(-1, tokens[:, 1:, None])[..., 0] * in_answer[:, 1:]).sum(1)
    return found
