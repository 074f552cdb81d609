"""Weights of checkpoints: those that a run begins from, and those that hooks have saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import CHECKSUMS, SavedCheckpoint
from isobatch.engine.checkpointing.digests import bytes_digest
from isobatch.engine.checkpointing.portable_state import HOOK, WEIGHT, saved_weight_names
from isobatch.models.capabilities import KeepsRows

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isobatch.core.facts import Facts
    from isobatch.models.base import Task


def load_start_weights(origin: Mapping[str, Any], model: nn.Module, task: Task, facts: Facts) -> None:
    """Set the model's weights to those of the checkpoint that `starts_from` names.

    What that run did not train keeps its values; tables may have other rows, see `KeepsRows`. Raises
    UserError where the checkpoint is gone or another one, or where its weights are not this model's.
    """
    import torch

    folder = Path(origin["run"]) / "checkpoints" / origin["checkpoint"]
    if not (folder / CHECKSUMS).is_file():
        raise UserError(f"the recipe starts from {folder}, and it is not there: put it back")
    if bytes_digest(folder / CHECKSUMS) != origin["digest"]:
        raise UserError(f"the recipe starts from {folder}, and that is another checkpoint now")
    saved, kept = SavedCheckpoint(folder), {}
    if isinstance(task, KeepsRows):
        kept = {n: torch.from_numpy(rows) for n, rows in task.kept_rows(Path(origin["run"]), facts).items()}
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    names = saved_weight_names(saved)
    kinds = {_layer_kind(name) for name in names}
    wrong = [n for n, _ in model.named_parameters() if n not in names and _layer_kind(n) in kinds]
    for name in sorted(names):
        shape = tuple(targets[name].shape) if name in targets else None
        before = saved.entries[WEIGHT + name].shape
        wrong += [name] if shape != ((len(kept[name]), *before[1:]) if name in kept else before) else []
    if wrong:
        raise UserError(
            f"--from {origin['run']}: its weights are not this model's: {wrong[0]} has another shape, or one"
            " of them lacks it; keep the flags that make the model"
        )
    with torch.no_grad():
        for name in names:
            value = saved.read(WEIGHT + name)
            targets[name].copy_(rows_of(value, kept[name]) if name in kept else value)


def rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """The rows of a table by number; -1 stands for the mean of its rows that are not zero, -2 for zeros."""
    import torch

    trained = table[table.any(1)] if table.any() else table
    mean = trained.mean(0, keepdim=True)
    return torch.cat([table, torch.zeros_like(mean), mean])[rows]  # the last two


def _layer_kind(name: str) -> str:
    """The name without the numbers of layers."""
    return re.sub(r"\d+", "#", name)


def export_beside(task: Task, model: nn.Module, saved: SavedCheckpoint, folder: Path, facts: Facts) -> None:
    """Export to `folder`/NAME the weights that a hook of this name had saved in a checkpoint.

    The model has its own weights again afterwards.
    """
    for name in saved.hooks_with_weights():
        held = [
            (p, key) for n, p in model.named_parameters() if (key := f"{HOOK}{name}/{n}") in saved.entries
        ]
        own = [p.detach().clone() for p, _ in held]
        if (folder / name).exists():
            raise UserError(f"hook {name}: the export has files of that name: give it another `name`")
        (folder / name).mkdir()
        for p, key in held:
            p.data.copy_(saved.read(key))
        try:
            task.export(model, folder / name, facts)
        finally:
            for (p, _), values in zip(held, own, strict=True):
                p.data.copy_(values)
