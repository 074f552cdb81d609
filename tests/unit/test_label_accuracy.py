"""Tests of models/causal_lm/perplexity.py: against scores computed row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from isobatch.models.causal_lm.perplexity import correct_predictions

END = 30
ANSWERS = [[5, END], [6, 7, END], [4, 6, 7, END]]
"""The third ends with the tokens of the second."""


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=32, n_layer=2, n_head=2, n_positions=16))
    for p in net.parameters():
        p.data.mul_(8)  # so that answers differ by more than rounding
    return net.eval()


def rows() -> list[tuple[list[int], int | None]]:
    """(prompt and answer, which answer it is)."""
    draw = torch.Generator().manual_seed(2)
    found: list[tuple[list[int], int | None]] = []
    for number in range(24):
        prompt = torch.randint(8, 30, (1 + number % 6,), generator=draw).tolist()
        own = number % len(ANSWERS)
        found.append((prompt + ANSWERS[own], own))
    return [*found, ([9, 10, 11, END], None)]


def test_the_label_with_the_highest_probability_is_predicted(model: Any) -> None:
    expected = []
    for tokens, own in rows():
        prompt = tokens[: len(tokens) - len(ANSWERS[own])] if own is not None else tokens
        scores = []
        for answer in ANSWERS:
            with torch.no_grad():
                logs = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            scores.append(sum(float(logs[len(prompt) + k - 1, token]) for k, token in enumerate(answer)))
        expected.append(own is not None and max(range(len(ANSWERS)), key=scores.__getitem__) == own)
    assert 0 < sum(expected) < len(expected)
    width = max(len(tokens) for tokens, _ in rows())
    batch = {
        "tokens": torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in rows()]),
        "length": torch.tensor([len(tokens) for tokens, _ in rows()]),
    }
    with torch.no_grad():
        assert correct_predictions(model, batch, ANSWERS).tolist() == expected
