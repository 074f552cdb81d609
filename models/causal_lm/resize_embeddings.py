"""Another tokenizer for a trained model: tokens that it knows keep their vectors, others get the mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = "tokenizer.json"


def known(place: str, tokenizer: Any) -> dict[int, int] | None:
    """A token's number -> its number in the model's own tokenizer; None where there is no tokenizer.json."""
    from tokenizers import Tokenizer

    file = Path(place) / FILE
    if not file.is_file():
        return None
    own = Tokenizer.from_file(str(file)).get_vocab()
    return {number: own[token] for token, number in tokenizer.get_vocab().items() if token in own}


def resize(model: Any, count: int, rows: dict[int, int] | None) -> None:
    """Give a model `count` embeddings, and a head as wide; without `rows` numbers keep their vectors."""
    tables = (model.get_input_embeddings, model.get_output_embeddings)
    before = [table().weight.detach().clone() for table in tables]
    model.resize_token_embeddings(count, mean_resizing=False)
    with torch.no_grad():
        for table, old in zip(tables, before, strict=True):  # where they are one, it is done twice alike
            table().weight.copy_(_moved(old, count, {n: n for n in range(count)} if rows is None else rows))


def _moved(old: Tensor, count: int, rows: dict[int, int]) -> Tensor:
    there = [(new, number) for new, number in rows.items() if number < len(old)]
    table = old.mean(0).repeat(count, 1)
    table[[new for new, _ in there]] = old[[number for _, number in there]]
    return table
