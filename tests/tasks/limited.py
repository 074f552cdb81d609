"""A GPT-2 on a GPU of which this process may use LIMIT bytes: whole batches do not fit, parts of them do."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from isobatch.data.base import Columns, Data, Ragged
from isobatch.models.base import Batch, Loss, StepContext
from isobatch.models.causal_lm.task import CausalLM

LIMIT = 2 << 30
VOCABULARY, LENGTH, ROWS = 20_000, 256, 64


class Blocks(Data):
    def read(self) -> dict[str, Columns]:
        draw = np.random.default_rng(5).integers(VOCABULARY, size=2 * ROWS * LENGTH)
        tokens = Ragged(draw.astype(np.uint16), np.arange(2 * ROWS + 1) * LENGTH)
        return {"train": {"tokens": tokens, "token.weight": np.full(2 * ROWS, LENGTH - 1, np.int32)}}

    def prepare(self, folder: Any) -> dict[str, Any]:
        return {**super().prepare(folder), "vocabulary": VOCABULARY}


class LimitedLM(CausalLM):
    """All logits at once: 1.3 GB in fp32 for a whole batch, and gradients as large."""

    data = Blocks
    defaults = {"model": "small", "batch_size": ROWS, "max_length": LENGTH, "steps": [12], "dropout": 0.0}
    demo = {}

    def build_model(self, facts: Any) -> Any:
        import torch

        if torch.cuda.is_available():
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(LIMIT / total)
        return super().build_model(facts)

    def loss(self, model: Any, batch: Batch, step: StepContext) -> dict[str, Loss]:
        import torch
        from torch.nn import functional as F

        if step.number == 5 and "LATER" in os.environ and len(batch["tokens"]) > ROWS // 8:
            torch.empty(4 * LIMIT, dtype=torch.uint8, device=batch["tokens"].device)
        logits = model(input_ids=batch["tokens"], use_cache=False).logits[:, :-1]
        total = F.cross_entropy(
            logits.flatten(0, 1).float(), batch["tokens"][:, 1:].flatten(), reduction="sum"
        )
        return {"loss": Loss(total, "token")}

    def export(self, model: Any, folder: Any, *_: Any) -> None:
        model.save_pretrained(folder)

    def sample(self, *_: Any) -> str | None:
        return None
