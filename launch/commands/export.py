"""`export`: a finished run's model in other forms, each checked against the trained one.

A form is written by the task (`exports`, `export_as`); its parity with the trained model is kept here.
"""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.flags import nearest_hint
from isobatch.core.measures import format_bytes
from isobatch.core.terminal import doing, print_answer, rendered
from isobatch.data.text.chat_templates import template_in
from isobatch.data.text.go_template import ollama_modelfile
from isobatch.data.tokenizers import open_tokenizer
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.commands.evaluate import require_capability
from isobatch.launch.local.options import DataOptions
from isobatch.launch.local.run_setup import held_out, open_single_run
from isobatch.models import hub, model_card
from isobatch.models.capabilities import description_of
from isobatch.models.causal_lm import gguf_vocabulary
from isobatch.models.protocols import Exports

PARITY = "parity.json"


HUB, OLLAMA = "hub", "ollama"
ONLY_ASKED = ("gguf", "onnx-dynamic", "onnx-static", "vectors")
"""What the names of forms begin with that are not written unless they are named."""
MODELFILE, WEIGHTS = "Modelfile", "WEIGHTS"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions(DataOptions):
    """Flags of `export`."""

    to: tuple[str, ...] = ()
    """Forms to write (several: a,b): hf, dense, onnx, onnx-int8, onnx-int4 of classifiers; of language models
    merged, adapter (by default all of these that the task has); onnx-dynamic, onnx-static (8 bits without
    training); vectors, vectors-als of recommenders; gguf, ollama, each also -f32, -bf16 or -q8_0 in place
    of f16, gguf-adapter; hub pushes the forms beside it, alone final/."""
    repo: str | None = None
    """With --to hub: the repository, as in owner/name; by default the run's name."""
    private: bool = False
    """With --to hub: nobody else can see the repository."""


def export(words: Sequence[str]) -> int:
    """Usage: export RUN [--to merged,gguf,ollama,hub | --to hf,dense,onnx,onnx-dynamic] [--json]: into
    RUN/exports/, checked against the trained model, with the line to type next; exit 3 where an exported
    model answers otherwise than the trained one.
    """
    run, options = open_single_run(words, "export", ExportOptions, finished=True)
    task = require_capability(run, Exports, "export", f"has no other form than {run.final}")
    wanted = _wanted(task, run.recipe.task, options)
    if any(kind.startswith("onnx") for kind in wanted):
        for library in ("onnx", "onnxruntime"):
            need(library, f"--to {','.join(wanted)}")
    repository = options.repo or run.folder.name
    if pushes := HUB in wanted:
        hub.check_push(repository)
        wanted.remove(HUB)
    found = {kind: export_form(run, kind, options.data) for kind in wanted}
    lines = [line for kind, one in found.items() for line in _said(kind, one, run.folder.name)]
    if pushes:
        folders = [Path(one["folder"]) for one in found.values()] or [run.final]
        found[HUB] = hub.push(folders, repository, options.private)
        lines += [f"pushed to {found[HUB]['url']}", f"next: hf download {found[HUB]['repo']}"]
    return print_answer(found, "\n".join(lines), options.json)


def _wanted(task: Exports, name: str, options: ExportOptions) -> list[str]:
    """The forms that were asked for, as the task calls them. Raises UserError."""
    usual = [kind for kind in task.exports if not kind.startswith(ONLY_ASKED)] or [*task.exports[:1]]
    whole = [kind.replace("gguf", OLLAMA) for kind in task.exports if kind not in (*usual, "gguf-adapter")]
    forms = {kind.replace("_", "-"): kind for kind in (*task.exports, *whole, HUB)}
    wanted = [kind.replace("_", "-") for kind in options.to] or usual
    if unknown := [kind for kind in wanted if kind not in forms]:
        bits = unknown[0].removeprefix("onnx-int")
        known = f"{', '.join(forms.values())}{nearest_hint(unknown[0], forms)}"
        needs = f": `auto --task qat --pruned RUN --bits {bits}` makes such a model" * bits.isdecimal()
        raise UserError(f"--to {unknown[0]}: this {name} run exports {known}{needs}")
    for flag, given in (("--repo", options.repo), ("--private", options.private)):
        if given and HUB not in wanted:
            raise UserError(f"{flag}: says where a model is pushed: add --to hub")
    return list(dict.fromkeys(forms[kind] for kind in wanted))


def _said(kind: str, figures: dict[str, Any], name: str) -> list[str]:
    """What a written form is, and the line to type next."""
    shown = {"kind": kind, "name": name.lower(), "ollama": OLLAMA, "modelfile": MODELFILE, "file": None}
    words = {**shown, **figures, "of": figures, "quoted": shlex.quote, "size": format_bytes}
    return rendered(__file__, "export", **words).splitlines()


def export_form(run: RunFolder, kind: str, data_path: str | None = None) -> dict[str, Any]:
    """Write one form of a finished run's model to exports/KIND once it is checked; returns the figures.

    `data_path`: where the data lies now, if it has moved. Raises UserError, and ExportError where the
    exported model differs from the trained one.
    """
    task = require_capability(run, Exports, "export", f"has no other form than {run.final}")
    split, batches = held_out(run, data_path)
    folder = run.folder / "exports" / kind
    unchecked = folder.with_name(f".{kind}.new")
    modelfile = _modelfile(run, kind) if kind.startswith(OLLAMA) else None
    form = kind.replace(OLLAMA, "gguf")
    with run.lock("export"):
        doing(f"exporting to {kind}")
        shutil.rmtree(unchecked, ignore_errors=True)
        unchecked.mkdir(parents=True)
        try:
            figures = dict(task.export_as(form, run.final, unchecked, run.facts, batches))
            if modelfile:
                atomic_files.write_text(unchecked / MODELFILE, modelfile.replace(WEIGHTS, figures["file"]))
            card, has_card = run.final / model_card.FILE, kind == "merged" or "file" in figures
            if has_card and card.is_file() and (text := _card(run, task, card, unchecked, figures)):
                (unchecked / model_card.FILE).write_text(text, encoding="utf-8")
            figures |= {"split": split, "folder": str(folder)}
            (unchecked / PARITY).write_text(atomic_files.json_text(figures, indent=2) + "\n")
            atomic_files.share_as_umask_allows(unchecked)
            shutil.rmtree(folder, ignore_errors=True)
            unchecked.rename(folder)
            run.record_export(folder)
        finally:
            shutil.rmtree(unchecked, ignore_errors=True)
    return figures


def _modelfile(run: RunFolder, kind: str) -> str:
    """The Modelfile of a run's model, with WEIGHTS where the file's name will be."""
    tokenizer = open_tokenizer(run.final)
    begin = "".join(str(tokenizer.id_to_token(number)) for number in gguf_vocabulary.added_by(tokenizer)[0])
    return ollama_modelfile(template_in(run.final), WEIGHTS, begin, f"--to {kind}")


def _card(run: RunFolder, task: Any, card: Path, folder: Path, figures: dict[str, Any]) -> str:
    """The model card of a merged folder or a GGUF file, with the figures of final/; empty where that has no
    card of ours.
    """
    described, of_final = description_of(task, folder, run.facts), card.read_text(encoding="utf-8")
    if file := figures.get("file"):
        fields = {**described.hub_fields, "library_name": "gguf"}
        made = f"ollama create {run.folder.name.lower()} -f {MODELFILE}"
        usage = made if (folder / MODELFILE).is_file() else f"llama-cli -m {file}"
        described = dataclasses.replace(described, usage=usage, language="sh", hub_fields=fields)
        off = f"{figures['max_weight_difference']:.1e}"
        measured_on = f"before they were written as GGUF, where they differ by at most {off} of the largest"
    else:
        off = f"{figures['max_logit_difference']:.1e}"
        measured_on = f"with the adapter beside its base; the merged logits differ by at most {off}"
    return model_card.render_export(described, run.recipe, of_final, measured_on)
