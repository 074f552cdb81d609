"""Metrics of a language model: perplexity by token and by word, and bits per byte.

`loss` is the mean in nats per predicted token, `perplexity` its exponential. `word_perplexity` and
`bits_per_byte` are the nats of all predicted tokens of a text by its words and by its UTF-8 bytes. The first
token of a block is predicted by nobody and costs nothing, so that short blocks look a little better; --stride
leaves one such token in all. The end of a line is a word, as in the literature on PTB and WikiText (Mikolov
et al. 2010).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_EXPONENT = 700.0
RUNNING_TEXT = "text"
"""The form of a dataset of running text, as the data's facts name it."""
MAX_BYTES_PER_WORD = 24
"""Bytes per word above which a text has no words separated by white space (Chinese, Thai)."""


def metrics(
    parts: Mapping[str, Any], split: str, facts_extra: Mapping[str, Any], stride: int
) -> dict[str, Any]:
    """Metrics of a split from its reduced parts: `nll`, or `nll.N` for a mixture.

    A mixture also has those of each dataset, as NAME_metric.

    `facts_extra`: the data's extra facts; `stride`: distance in tokens of the windows over running text.
    """
    losses = [part for name, part in parts.items() if name.startswith("nll")]
    weight = sum(float(part.weight) for part in losses)
    loss = sum(float(part.value) for part in losses) / max(1.0, weight)
    if "nll" in parts:
        return _dataset_metrics(loss, facts_extra, facts_extra, split, stride)
    found: dict[str, Any] = {"loss": loss, "perplexity": finite_exp(loss)}
    for number, dataset in enumerate(facts_extra["sets"]):
        nll = parts[f"nll.{number}"]
        if not nll.weight:
            continue
        values = _dataset_metrics(float(nll.value) / float(nll.weight), dataset, facts_extra, split, stride)
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
