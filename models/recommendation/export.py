"""Export of a trained recommender: vectors, head and names, as `Recommendations` reads them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.models.recommendation import catalogue, recommendations

if TYPE_CHECKING:
    from pathlib import Path

    from isobatch.core.facts import Facts

TRAINING_FILE = "training.safetensors"
"""The trained parameters by name, for --start of another training."""


def export_recommender(net: Any, folder: Path, facts: Facts) -> None:
    """Write what `Recommendations` reads, a copy of recommendations.py, and the trained parameters."""
    from safetensors.numpy import save_file

    net.eval()
    users, items = net.all_vectors()
    arrays = {"users": users, "items": items, "bias": net.item_bias.weight[:, 0]}
    for name, p in net.named_parameters():
        if name.startswith(("mlp_layers.", "product.")):
            arrays[name] = p
    vectors = {k: np.ascontiguousarray(v.detach().cpu().numpy()) for k, v in arrays.items()}
    vectors["had"] = np.array(catalogue.Catalogue.read(facts.folder).had)
    save_file(vectors, folder / recommendations.VECTORS_FILE)
    trained = {
        n: p for n, p in net.named_parameters() if "encoder." not in n or "lora_" in n or p.requires_grad
    }
    save_file({n: p.detach().cpu().contiguous().numpy() for n, p in trained.items()}, folder / TRAINING_FILE)
    described = (net.item_text >= 0) & (net.encoder is not None)
    known = {"counts": net.counts.tolist(), "described": described.long().tolist()}
    names = {**catalogue.read_names(facts.folder), **known}
    (folder / recommendations.NAMES_FILE).write_text(json.dumps(names, ensure_ascii=False))
    encoder = None if net.encoder is None else net.encoder.weights_identity()
    config = {"model_type": "isobatch-recommender", "head": net.head, "encoder": encoder}
    (folder / recommendations.CONFIG_FILE).write_text(json.dumps(config))
    shutil.copy(recommendations.__file__, folder / "recommendations.py")
