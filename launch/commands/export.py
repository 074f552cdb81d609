"""`export`: a finished run's model in other forms, each checked against the trained one.

A form is written by the task (`exports`, `export_as`); its parity with the trained model is kept here.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.terminal.console import print_answer
from isobatch.core.terminal.status import doing
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.engine.train.evaluate import host_batches
from isobatch.launch.commands.evaluate import require_final
from isobatch.launch.local.run_setup import DataOptions, locate_data, open_single_run
from isobatch.models import model_card
from isobatch.models.capabilities import description_of
from isobatch.models.protocols import Exports

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder

PARITY = "parity.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions(DataOptions):
    """Flags of `export`."""

    to: tuple[str, ...] = ()
    """Forms to write (several: a,b): hf, dense, onnx, onnx-int4 of classifiers, merged, adapter of language
    models; by default all that the task has."""


def export(words: Sequence[str]) -> int:
    """Usage: export RUN [--to merged | --to hf,dense,onnx,onnx-int4] [--json]: into RUN/exports/, checked on
    all held-out samples; exit 3 where an exported model answers otherwise than the trained one.
    """
    run, options = open_single_run(words, "export", ExportOptions)
    task, _ = workload_of(run.recipe).make(run.recipe)
    if not isinstance(task, Exports):
        raise UserError(f"export: {run.recipe.task} has no other form than {run.final}")
    wanted = tuple(kind.replace("_", "-") for kind in options.to) or task.exports
    if unknown := [kind for kind in wanted if kind not in task.exports]:
        needs = ": `auto --task qat --pruned RUN` makes such a model" if unknown[0] == "onnx-int4" else ""
        raise UserError(f"--to {unknown[0]}: {run.recipe.task} exports {', '.join(task.exports)}{needs}")
    if any(kind.startswith("onnx") for kind in wanted):
        for library in ("onnx", "onnxruntime"):
            need(library, f"--to {','.join(wanted)}")
    found = {kind: export_form(run, kind, options.data) for kind in wanted}
    lines = (
        f"{one['folder']}: largest logit difference {one['max_logit_difference']:.1e} over"
        f" {one['samples']} samples"
        for one in found.values()
    )
    return print_answer(found, "\n".join(lines), options.json)


def export_form(run: RunFolder, kind: str, data_path: str | None = None) -> dict[str, Any]:
    """Write one form of a finished run's model to exports/KIND once it is checked; returns the figures.

    `data_path`: where the data lies now, if it has moved. Raises UserError, and ExportError where the
    exported model differs from the trained one.
    """
    require_final(run)
    locate_data(run, run.recipe, data_path)
    facts, (task, data) = run.facts, workload_of(run.recipe).make(run.recipe)
    assert isinstance(task, Exports), "the caller has asked"
    held_out = next((s for s in HELD_OUT_SPLITS if s in facts.samples), "train")
    samples = data.open(Path(facts.folder), held_out)
    folder = run.folder / "exports" / kind
    unchecked = folder.with_name(f".{kind}.new")
    with run.lock("export"):
        doing(f"exporting to {kind}")
        shutil.rmtree(unchecked, ignore_errors=True)
        unchecked.mkdir(parents=True)
        try:
            figures = dict(task.export_as(kind, run.final, unchecked, facts, lambda: host_batches(samples)))
            card = run.final / model_card.FILE
            is_merged = kind == "merged" and card.is_file()
            if is_merged and (text := _merged_card(run, task, card, unchecked, figures)):
                (unchecked / model_card.FILE).write_text(text, encoding="utf-8")
            figures |= {"split": held_out, "folder": str(folder)}
            (unchecked / PARITY).write_text(atomic_files.json_text(figures, indent=2) + "\n")
            atomic_files.share_as_umask_allows(unchecked)
            shutil.rmtree(folder, ignore_errors=True)
            unchecked.rename(folder)
        finally:
            shutil.rmtree(unchecked, ignore_errors=True)
    return figures


def _merged_card(run: RunFolder, task: Any, card: Path, folder: Path, figures: dict[str, Any]) -> str:
    """The model card of a merged folder, with the figures of final/; empty where that has no card of ours."""
    difference = f"{figures['max_logit_difference']:.1e}"
    measured_on = f"with the adapter beside its base; the merged logits differ by at most {difference}"
    described = description_of(task, folder, run.facts)
    of_final = card.read_text(encoding="utf-8")
    return model_card.render_export(described, run.recipe, of_final, measured_on)
