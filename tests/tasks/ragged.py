"""A small GPT-2 on sequences of very different lengths, whose losses no micro-batching may change."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from isobatch.data.base import Columns, Data, Ragged
from isobatch.models.base import Batch, Loss, StepContext, Task

VOCABULARY = 61


class Sequences(Data):
    """Seeded random walks over the vocabulary: 4 to 48 tokens, so that micro-batches differ."""

    def read(self) -> Mapping[str, Columns]:
        return {"train": _split(np.random.default_rng(1), 93), "valid": _split(np.random.default_rng(2), 17)}


def _split(generator: np.random.Generator, count: int) -> Columns:
    rows = [
        (generator.integers(VOCABULARY) + np.cumsum(generator.integers(1, 4, length))) % VOCABULARY
        for length in generator.integers(4, 49, count)
    ]
    tokens = Ragged.from_rows([r.astype(np.uint16) for r in rows])
    return {"tokens": tokens, "token.weight": (tokens.lengths - 1).astype(np.int32)}


class RaggedLM(Task):
    """Dropout everywhere a GPT-2 has it, attention included."""

    data = Sequences
    defaults = {"batch_size": 24, "lr": 1e-3, "epochs": 2.0, "max_length": 48, "dropout": 0.1}

    def build_model(self, facts: Any) -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        p = self.recipe.dropout or 0.0
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        config = GPT2Config(**sizes, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p, use_cache=False)
        return GPT2LMHeadModel(config)

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        from torch.nn import functional

        logits = model(input_ids=batch["tokens"]).logits[:, :-1]
        targets = batch["tokens"][:, 1:].clone()
        import torch

        places = torch.arange(targets.shape[1], device=targets.device)
        targets[places >= batch["length"][:, None] - 1] = -100
        total = functional.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1), reduction="sum")
        return {"loss": Loss(total, "token")}


class PacedLM(RaggedLM):
    """A step takes at least a twentieth of a second, so that a test can stop it at a certain one."""

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        time.sleep(0.05)
        return super().loss(model, batch, step)
