"""Exports a model again and compares the files with those of final/."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.engine.checkpointing.digests import folder_digests
from isobatch.models import model_card

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from isobatch.core.facts import Facts
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.models.base import Task

ROUNDING = 1e-5
"""Difference allowed between tensors that are computed in the export, as a share of the largest element."""
VERSION_KEYS = ("transformers_version", "torch_version")
"""Fields of JSON files that name the library which wrote them."""


def compare_export(run: RunFolder, task: Task, model: nn.Module, facts: Facts) -> dict[str, Any]:
    """Export into a temporary folder, and compare it with the run's final/ as `compare_folders` does."""
    with tempfile.TemporaryDirectory() as temporary:
        task.export(model, Path(temporary), facts)
        return compare_folders(run.final, Path(temporary), leave_out=task.measured_files)


def compare_folders(final: Path, fresh: Path, leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Compare two exports. Returns `files`, `identical` (their number), `largest` and `differing`.

    `largest` is the largest difference of tensors, as a share of their largest element; `differing` names
    the files that differ by more than rounding, or that only `final` has. Files of `leave_out` are left out,
    and model cards: they hold measured figures, which are compared for themselves.
    """
    wanted, found = (
        {
            name: digest
            for name, digest in folder_digests(folder).items()
            if name not in (model_card.FILE, *leave_out)
        }
        for folder in (final, fresh)
    )
    same = [name for name in found if wanted.get(name) == found[name]]
    differing, largest = sorted(wanted.keys() - found.keys()), 0.0
    for name in sorted(found.keys() - set(same)):
        difference = _difference(final / name, fresh / name)
        largest = max(largest, difference)
        if not difference <= ROUNDING:
            differing.append(name)
    return {"files": len(found), "identical": len(same), "largest": largest, "differing": differing}


def _difference(wanted: Path, found: Path) -> float:
    """How two files differ, as a share: 0 for the same content, 1 for another one or another form."""
    if not wanted.exists():
        return 1.0
    if found.suffix == ".safetensors":
        return _tensors_difference(wanted, found)
    if found.suffix == ".json":
        return float(_json_content(wanted) != _json_content(found))
    return 1.0


def _json_content(path: Path) -> Any:
    content = json.loads(path.read_text(encoding="utf-8"))
    return (
        {k: v for k, v in content.items() if k not in VERSION_KEYS} if isinstance(content, dict) else content
    )


def _tensors_difference(wanted: Path, found: Path) -> float:
    from safetensors import safe_open

    with safe_open(str(wanted), "pt") as old, safe_open(str(found), "pt") as new:
        if sorted(old.keys()) != sorted(new.keys()):
            return 1.0
        largest = 0.0
        for name in new.keys():  # noqa: SIM118 (no mapping)
            a, b = old.get_tensor(name), new.get_tensor(name)
            if a.shape != b.shape or a.dtype != b.dtype or (not a.is_floating_point() and not a.equal(b)):
                return 1.0
            if a.numel() and not a.equal(b):
                share = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-12)
                largest = max(largest, float(share) if share.isfinite() else 1.0)
    return min(1.0, largest)
