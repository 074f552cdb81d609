"""Exports a model again and compares the files with those of final/."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.atomic_files import read_json, rows_in, write_json
from isobatch.core.errors import UserError
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, phase_and_step
from isobatch.engine.checkpointing.digests import folder_digests
from isobatch.engine.checkpointing.weight_files import export_beside
from isobatch.engine.consent import adapter_base
from isobatch.models import capabilities, hub, model_card

if TYPE_CHECKING:
    from torch import nn

    from isobatch.core.recipe import Recipe
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.models.base import Task

ROUNDING = 1e-5
"""Difference allowed between tensors that are computed in the export, as a share of the largest element."""
MEASURED_ROUNDING = 2e-2
"""The same in files that are computed from held-out data, some in 16 bits."""
HeldOut = Callable[..., Iterable[Any]]
CONFIGURATIONS = (".json", ".jinja", ".txt", ".model")
"""Ends of files that another version of a library may write otherwise. They hold no code."""


def compare_export(
    run: RunFolder, task: Task, model: nn.Module, saved: SavedCheckpoint, batches: HeldOut | None
) -> dict[str, Any]:
    """Export into a temporary folder, and compare it with the run's final/ as `compare_folders` does.

    `saved`: the checkpoint of the model. `batches`: the held-out samples, where there are any, from which the
    task measures its export again: see `MeasuresExport`, whose result is added as `metrics`. `card` says
    whether the model card is that of the logged figures.
    """
    with tempfile.TemporaryDirectory() as temporary:
        fresh, facts = Path(temporary), run.facts
        task.export(model, fresh, facts)
        export_beside(task, model, saved, fresh, facts)
        base, config = adapter_base(run.folder), fresh / hub.ADAPTER_CONFIG
        if run.here != run.recipe and hub.last_name(base) == hub.last_name(str(run.recipe.model)):
            write_json(config, {**read_json(config), "base_model_name_or_path": base})  # it has moved
        metrics, remark = dict[str, Any](), ""
        if batches and isinstance(task, capabilities.MeasuresExport):
            metrics |= task.final_metrics(model, fresh, facts, batches)
        if not batches and isinstance(task, capabilities.FinishesUnmeasured):
            remark = task.finish_unmeasured(model, fresh)
        found = compare_folders(run.final, fresh, task.measured_files)
        return {**found, "metrics": metrics, "card": is_own_card(run, task, fresh, remark)}


def is_own_card(run: RunFolder, task: Task, final: Path, unmeasured: str = "") -> bool:
    """Whether final/README.md is what a run with this export and its logged figures writes.

    `unmeasured`: what the task remarks where nothing is held out. Paths that are not here any more, and that
    of the run, may be written otherwise.
    """
    summary: Mapping[str, Any] = run.summary() or {}
    said, measured = str(summary.get("remark", "")), summary["metrics_by_split"]
    expected = "" if measured else unmeasured
    if measured and isinstance(task, capabilities.FinalRemark):
        expected = task.final_remark(measured[summary["split"]])
    if not re.fullmatch(".+".join(map(re.escape, re.split(r"\bRUN\b", expected))), said, re.DOTALL):
        return False
    last = [row for row in rows_in(run.metrics) if "exported" in row][-1]
    is_chosen = run.recipe.patience and task.phases()[-1].early_stopping
    chosen_by = capabilities.monitor_of(task, run.facts)[0] if is_chosen else ""
    before = summary["steps"] - last["step"]
    _, step = phase_and_step(last["exported"])
    figures = model_card.HeldOutFigures(measured, before + step, chosen_by, said)
    described = capabilities.description_of(task, final, run.facts)
    here, written = run.here, (run.final / model_card.FILE).read_text(encoding="utf-8")
    if f"\n- {here.data}\n" not in written:  # a folder that is gone may look like a hub id
        here = dataclasses.replace(here, data=str(run.final))
    card = model_card.render(described, run.recipe, run.facts, figures, here)
    return _plain_places(card, run.recipe) == _plain_places(written, run.recipe)


def _plain_places(card: str, recipe: Recipe) -> str:
    """A card with the last names of the paths that a recipe names."""
    for place in filter(None, (recipe.data, recipe.model)):
        card = card.replace(place, hub.last_name(place))
    return card


def compare_folders(final: Path, fresh: Path, measured: Sequence[str] = ()) -> dict[str, Any]:
    """Compare two exports. Returns `identical`, and `differing`, the files that differ by more than rounding
    or that only `final` has; of them `configurations` are such that another version of a library may have
    written them.

    Files of `measured` may differ by more. Model cards are left out: they hold measured figures, which are
    compared for themselves.
    """
    wanted, found = (
        {name: digest for name, digest in folder_digests(folder).items() if name != model_card.FILE}
        for folder in (final, fresh)
    )
    others = sorted(name for name, digest in found.items() if wanted.get(name) != digest)
    tensors = [name for name in others if name in wanted and name.endswith(".safetensors")]
    allowed = {name: MEASURED_ROUNDING if name in measured else ROUNDING for name in tensors}
    rounded = [name for name in tensors if _difference(final / name, fresh / name) <= allowed[name]]
    texts = [name for name in others if name in wanted and name.endswith(".json")]
    renamed = [name for name in texts if _without_version(final / name) == _without_version(fresh / name)]
    differing = sorted({*others, *wanted.keys() - found.keys()} - {*rounded, *renamed})
    excused = [name for name in differing if _is_configuration(final / name)]
    return {"identical": wanted == found, "differing": differing, "configurations": excused}


def _without_version(path: Path) -> Any:
    """A JSON object without the version of transformers that wrote it; what is no object, its path."""
    try:
        return {**read_json(path), "transformers_version": ""}
    except UserError:
        return path


def _is_configuration(path: Path) -> bool:
    """Whether a file is configuration, which names no code by `auto_map`."""
    is_one = path.suffix in CONFIGURATIONS and path.is_file()
    return is_one and "auto_map" not in path.read_text(encoding="utf-8", errors="replace")


def _difference(wanted: Path, found: Path) -> float:
    """How the tensors of two files differ, as a share of the largest element; 1 where their form does."""
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
