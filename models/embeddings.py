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
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    before = [None if table is None else table.weight.detach().clone() for table in tables]
    model.resize_token_embeddings(count, mean_resizing=False)
    tied = tables[1] is None or tables[1].weight.data_ptr() == tables[0].weight.data_ptr()
    after = [model.get_input_embeddings(), model.get_output_embeddings()]
    for table, old in list(zip(after, before, strict=True))[: 1 if tied else 2]:
        assert old is not None
        same = rows if rows is not None else {n: n for n in range(min(count, len(old)))}
        with torch.no_grad():
            table.weight.copy_(_moved(old, count, {k: v for k, v in same.items() if v < len(old)}))


def _moved(old: Tensor, count: int, rows: dict[int, int]) -> Tensor:
    new = old.mean(0).repeat(count, 1)
    new[torch.tensor([*rows.keys()], dtype=torch.long)] = old[
        torch.tensor([*rows.values()], dtype=torch.long)
    ]
    return new
