"""What a language model's loss comes to: by token, by word and by byte, and what it is a mean over.

`loss` is in nats a predicted token, `perplexity` its exponential. `word_perplexity` and `bits_per_byte`
spread it over all tokens of a text, then over its words or UTF-8 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LARGEST_EXPONENT = 700.0
TEXT = "text"
"""The form of a set of running text."""
LONGEST_WORD = 24
"""Bytes of a text for each of its words, above which white space does not separate them (Chinese, Thai)."""


def metrics(parts: Mapping[str, Any], split: str, known: Mapping[str, Any], stride: int) -> dict[str, Any]:
    """Of the reduced parts of a split: `nll`, or those of each set of a mixture apart.

    `known` is the data's extra facts; `stride` the distance of the windows that running text is judged in.
    """
    losses = [part for name, part in parts.items() if name.startswith("nll")]
    weight = sum(float(part.weight) for part in losses)
    loss = sum(float(part.value) for part in losses) / max(1.0, weight)
    if "nll" in parts:
        return _figures(loss, known, known, split, stride)
    return _loss(loss) | _of_sets(parts, split, known, stride)


def _of_sets(parts: Mapping[str, Any], split: str, known: Mapping[str, Any], stride: int) -> dict[str, Any]:
    """The same of each set that this split has and, where its answers are classes, the accuracy."""
    found: dict[str, Any] = {}
    for number, one in enumerate(known["sets"]):
        nll, right = parts[f"nll.{number}"], parts.get(f"right.{number}")
        own: dict[str, Any] = {}
        if nll.weight:
            own = _figures(float(nll.value) / float(nll.weight), one, known, split, stride)
        if right is not None and right.weight:
            own["accuracy"] = float(right.value) / float(right.weight)
        found |= {f"{one['name']}_{name}": value for name, value in own.items()}
    return found


def _figures(
    loss: float, one: Mapping[str, Any], known: Mapping[str, Any], split: str, stride: int
) -> dict[str, Any]:
    """Of one set: its loss, what that is a mean over, and by its words and bytes."""
    found: dict[str, Any] = _loss(loss)
    if one.get("form", TEXT) == TEXT:
        found["stride"] = stride
    elif known["response_only"]:
        found["unit"] = "response token"
    if text := one.get("splits", {}).get(split):
        nats = loss * text["tokens"]
        found["bits_per_byte"] = nats / (math.log(2) * text["bytes"])
        if text["bytes"] <= LONGEST_WORD * text["words"]:
            found["word_perplexity"] = _exp(nats / max(1, text["words"]))
    return found


def _loss(loss: float) -> dict[str, float]:
    return {"loss": loss, "perplexity": _exp(loss)}


def _exp(value: float) -> float:
    """exp, finite for any loss: a diverged model must not make JSON that others cannot read."""
    return math.exp(min(value, LARGEST_EXPONENT))
