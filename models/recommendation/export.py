"""Export of a trained recommender as `Recommendations` reads it, and training that starts from one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import refuse
from isobatch.models.recommendation import catalogue, recommendations

if TYPE_CHECKING:
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


def load_trained(net: Any, start: str, facts: Facts, data: str) -> None:
    """Load the trained parameters of --start; those that it lacks, such as LoRA's, stay as they are.

    `data`: what the recipe names. Raises UserError unless users, items, encoder and shapes are the same.
    """
    from safetensors.torch import load_file

    weights = training_weights_file(start)
    names, config = (
        json.loads((weights.parent / file).read_text())
        for file in (recommendations.NAMES_FILE, recommendations.CONFIG_FILE)
    )
    own_names = catalogue.read_names(facts.folder)
    encoder = None if net.encoder is None else net.encoder.weights_identity()
    found, own = load_file(weights), net.state_dict()
    other = {n: value for n, value in found.items() if n in own and own[n].shape != value.shape}
    refuse(
        {
            f"--start {start}: its users or items are others than those of {data}": any(
                names[kind] != own_names[kind] for kind in ("users", "items")
            ),
            f"--start {start}: its texts were read by another encoder: give its --text-model and --tokenizer,"
            " and for one with random weights its --seed": None not in (config["encoder"], encoder)
            and config["encoder"] != encoder,
            f"--start {start}: has other shapes of {', '.join(other)}: it was trained on other data or with"
            " other --dim, --head or --layers": other,
        }
    )
    net.load_state_dict({k: v for k, v in found.items() if k in own}, strict=False)


def training_weights_file(start: str) -> Path:
    """The file of a run, or of its final/, that training can start from."""
    folder = Path(start).expanduser()
    return (folder / "final" if (folder / "final").is_dir() else folder) / TRAINING_FILE
