"""Weights of checkpoints: those that a run begins from, and those that hooks have saved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import NotHereError, UserError
from isobatch.engine.checkpointing.checkpoint import CHECKSUMS, SavedCheckpoint
from isobatch.engine.checkpointing.digests import bytes_digest
from isobatch.engine.checkpointing.portable_state import HOOK, WEIGHT, saved_weight_names
from isobatch.models.capabilities import KeepsRows

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from isobatch.core.facts import Facts
    from isobatch.models.base import Task


class CarriedOver:
    """A checkpoint with the rows that tables of other data take of it; a moment of a new row is zero."""

    def __init__(self, saved: SavedCheckpoint, rows: Mapping[str, np.ndarray]) -> None:
        """`rows`: see `KeepsRows`."""
        self._saved, self._rows = saved, rows
        self.entries = {
            key: replace(entry, shape=(len(rows[name]), *entry.shape[1:]))
            if entry.shape and (name := _parameter(key)) in rows
            else entry
            for key, entry in saved.entries.items()
        }

    def read(self, key: str) -> Tensor:
        """A whole tensor."""
        import torch

        value, rows = self._saved.read(key), self._rows.get(_parameter(key))
        if rows is None or not value.ndim:
            return value
        wanted = torch.from_numpy(rows)
        return rows_of(value, wanted if key.startswith(WEIGHT) else wanted.where(wanted != -1, -2))

    def read_slice(self, key: str, start: int, stop: int) -> Tensor:
        """Elements start..stop-1 of the flattened tensor, 1-d."""
        return self.read(key).flatten()[start:stop]


def open_start(origin: Mapping[str, Any], task: Task, facts: Facts) -> CarriedOver:
    """The checkpoint that `starts_from` names. Raises UserError where it is gone or another one."""
    folder = Path(origin["run"]) / "checkpoints" / origin["checkpoint"]
    if not (folder / CHECKSUMS).is_file():
        way = f"put the run {origin['run']} back; verify --level records does without"
        raise NotHereError(f"the recipe starts from {folder}, and it is not there: {way}")
    if bytes_digest(folder / CHECKSUMS) != origin["digest"]:
        raise UserError(f"the recipe starts from {folder}, and that is another checkpoint now")
    rows = task.kept_rows(Path(origin["run"]), facts)[0] if isinstance(task, KeepsRows) else {}
    return CarriedOver(SavedCheckpoint(folder), rows)


def load_start_weights(
    origin: Mapping[str, Any], model: nn.Module, task: Task, facts: Facts, only_check: bool = False
) -> None:
    """Set the model's weights to those of the checkpoint that `starts_from` names, or only see that they fit.

    What that run did not train keeps its values. Raises UserError as `open_start`, and where its weights are
    not this model's.
    """
    import torch

    saved = open_start(origin, task, facts)
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    names = saved_weight_names(saved)
    kinds = {_layer_kind(name) for name in names}
    wrong = [n for n, _ in model.named_parameters() if n not in names and _layer_kind(n) in kinds]
    for name in sorted(names):
        shape = tuple(targets[name].shape) if name in targets else None
        wrong += [name] if shape != saved.entries[WEIGHT + name].shape else []
    if wrong:
        raise UserError(
            f"--from {origin['run']}: its weights are not this model's: {wrong[0]} has another shape, or one"
            " of them lacks it; keep the flags that make the model"
        )
    with torch.no_grad():
        for name in () if only_check else names:
            targets[name].copy_(saved.read(WEIGHT + name))


def rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """The rows of a table by number; -1 stands for the mean of its rows that are not zero, -2 for zeros."""
    import torch

    mean = (table[table.any(1)] if table.any() else table).mean(0, keepdim=True)
    return torch.cat([table, torch.zeros_like(mean), mean])[rows]  # the last two


def _parameter(key: str) -> str:
    """The parameter of a checkpoint's key."""
    return key.rpartition("/")[2]


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
