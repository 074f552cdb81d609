"""A run that begins from another's weights: `recipe.starts_from` names them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import CHECKSUMS, SavedCheckpoint
from isobatch.engine.checkpointing.digests import bytes_digest
from isobatch.engine.checkpointing.portable_state import WEIGHT, saved_weight_names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn


def load_start_weights(origin: Mapping[str, Any], model: nn.Module) -> None:
    """Set the model's weights to those of the checkpoint that `starts_from` names.

    What that run did not train keeps its values. Raises UserError where the checkpoint is gone or another
    one, or where its weights are not this model's.
    """
    import torch

    folder = Path(origin["run"]) / "checkpoints" / origin["checkpoint"]
    if not (folder / CHECKSUMS).is_file():
        raise UserError(f"the recipe starts from {folder}, and it is not there: put it back")
    if bytes_digest(folder / CHECKSUMS) != origin["digest"]:
        raise UserError(f"the recipe starts from {folder}, and that is another checkpoint now")
    saved = SavedCheckpoint(folder)
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    names = saved_weight_names(saved)
    kinds = {_layer_kind(name) for name in names}
    further = [n for n, _ in model.named_parameters() if n not in names and _layer_kind(n) in kinds]
    if further:
        raise UserError(
            f"--from {origin['run']}: this model has more layers ({further[0]}): keep the flags that make it"
        )
    with torch.no_grad():
        for name in sorted(names):
            shape = saved.entries[WEIGHT + name].shape
            if name not in targets or tuple(targets[name].shape) != shape:
                found = f"shape {tuple(targets[name].shape)}" if name in targets else "none of that name"
                raise UserError(
                    f"--from {origin['run']}: its weights are not this model's: {name} has shape {shape}"
                    f" there, and here {found}; keep the flags that make the model"
                )
            targets[name].copy_(saved.read(WEIGHT + name))


def _layer_kind(name: str) -> str:
    """The name without the numbers of layers."""
    return re.sub(r"\d+", "#", name)
