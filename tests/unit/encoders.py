"""Small encoders of every family for tests, with weights large enough to tell them apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobatch.models.encoder import encoders
from isobatch.models.encoder.importance import HeadsAndNeurons

HEAD, HEADS, NEURONS, LAYERS = 16, 4, 128, 3
VOCABULARY = 1000
FAMILIES = tuple(encoders.FAMILIES)


def classifier(family: str, head: str = encoders.SEQUENCE, **more: Any) -> Any:
    """A random classifier of 3 layers, 4 heads of 16 and 128 neurons; no dropout.

    ModernBERT's first layer sees the whole text, the others 4 tokens around each.
    """
    from transformers import AutoConfig

    width = HEAD * HEADS
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": NEURONS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
    }
    if family == "distilbert":
        sizes = {"dim": width, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": NEURONS, "dropout": 0.0}
        sizes |= {"attention_dropout": 0.0, "seq_classif_dropout": 0.0, "pad_token_id": 0}
    if family == "electra":
        sizes |= {"embedding_size": 32}
    if family == "modernbert":
        sizes |= {"local_attention": 8, "bos_token_id": 1, "eos_token_id": 2}
        sizes |= {"cls_token_id": 1, "sep_token_id": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **(sizes | more))
    model = encoders.new_classifier(config, head)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model.eval()


def given(rows: int = 6, width: int = 19) -> dict[str, np.ndarray]:
    """Texts of several lengths."""
    ids = np.random.default_rng(0).integers(5, VOCABULARY, (rows, width))
    mask = (np.arange(width) < np.arange(width, width - 3 * rows, -3)[:, None]).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask}


def logits(model: Any, inputs: dict[str, np.ndarray] | None = None) -> Tensor:
    found: Tensor = model(**{k: torch.from_numpy(v) for k, v in (inputs or given()).items()}).logits
    return found


def some_masks() -> HeadsAndNeurons:
    """Two heads of the first layer, none of the second, all of the third; 64, 96 and 128 neurons."""
    draw = torch.Generator().manual_seed(1)
    heads = [torch.tensor([True, False, False, True]), torch.zeros(HEADS).bool(), torch.ones(HEADS).bool()]
    neurons = []
    for count in (64, 96, NEURONS):
        keep = torch.zeros(NEURONS, dtype=torch.bool)
        keep[torch.randperm(NEURONS, generator=draw)[:count]] = True
        neurons.append(keep)
    return HeadsAndNeurons(heads, neurons)
