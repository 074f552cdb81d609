"""Resizing a trained model's embeddings for another tokenizer.

Tokens that the model knows keep their vectors; all others start at the mean of the model's vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENIZER_FILE = "tokenizer.json"


def match_token_ids(path: str, tokenizer: Any) -> dict[int, int] | None:
    """New token id -> the same token's id in the model's own tokenizer; None if it has no tokenizer.json."""
    from tokenizers import Tokenizer

    file = Path(path) / TOKENIZER_FILE
    if not file.is_file():
        return None
    old_vocabulary = Tokenizer.from_file(str(file)).get_vocab()
    return {
        token_id: old_vocabulary[token]
        for token, token_id in tokenizer.get_vocab().items()
        if token in old_vocabulary
    }


def resize_model_embeddings(model: Any, count: int, old_ids: dict[int, int] | None) -> None:
    """Give a model `count` input and output embeddings, in place.

    `old_ids`: new token id -> old token id, whose vector it takes; None keeps each id's vector.
    """
    tables = (model.get_input_embeddings, model.get_output_embeddings)
    before = [table().weight.detach().clone() for table in tables]
    model.resize_token_embeddings(count, mean_resizing=False)
    with torch.no_grad():
        # Tied tables are written twice with the same values.
        for table, old in zip(tables, before, strict=True):
            table().weight.copy_(
                _remap_rows(old, count, {n: n for n in range(count)} if old_ids is None else old_ids)
            )


def _remap_rows(old: Tensor, count: int, old_ids: dict[int, int]) -> Tensor:
    """(count, H): row `new` is the old row of `old_ids[new]`, or the mean of all old rows."""
    pairs = [(new, token_id) for new, token_id in old_ids.items() if token_id < len(old)]
    table = old.mean(0).repeat(count, 1)
    table[[new for new, _ in pairs]] = old[[token_id for _, token_id in pairs]]
    return table
