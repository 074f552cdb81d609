"""Export of a finished classifier to other formats, each checked against the trained model."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import ExportError, explain_errors
from isobatch.core.package import table_beside
from isobatch.models.encoder import evaluation, problems
from isobatch.models.encoder.calibration import FILE as CALIBRATION_FILE
from isobatch.models.encoder.calibration import Calibration

if TYPE_CHECKING:
    from torch import nn

    from isobatch.models.base import Batch
    from isobatch.models.encoder.class_metrics import Predictions
    from isobatch.models.protocols import Batches

LOGIT_TOLERANCE = 1e-3
"""Largest allowed difference of a logit."""
TIE_TOLERANCE = 1e-2
"""How far from the middle between two levels a value may be, in levels, and still round either way."""
ONNX_FORMS = table_beside(__file__, "onnx_forms")
ONNX_FILES = {form: file for form, (file, _) in ONNX_FORMS.items()}
"""Form of a model -> the file in its folder."""
SIDE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", CALIBRATION_FILE)
"""Files that an ONNX file needs beside it: the classes' names, the tokenizer, and how to answer."""
_TRACED: list[Any] = []
"""The digests of the final/ that was traced last, and its ONNX program."""
CUSTOM_CODE = ("per_layer_config", "auto_map")
"""Fields of config.json that need modeling_pruned.py."""


def check_agreement(
    kind: str, problem: problems.Problem, trained: Predictions, exported: Predictions
) -> dict[str, Any]:
    """Raise ExportError unless two models agree on all classes, and on logits within LOGIT_TOLERANCE.

    Returns max_logit_difference, samples and the headline figure. `kind`: the format, for the message.
    """
    differences = np.abs(trained.logits - exported.logits).max(1)
    disagreements = trained.differing(exported)
    worst = int(disagreements[0]) if len(disagreements) else int(differences.argmax())
    # `not <=` and not `>`, so that NaN is an error too.
    if len(disagreements) or not differences[worst] <= LOGIT_TOLERANCE:
        raise ExportError(
            f"--to {kind}: held-out sample {worst} is answered {exported.logits[worst].round(4).tolist()},"
            f" and by the trained model {trained.logits[worst].round(4).tolist()} (difference"
            f" {differences[worst]:.2g}, at most {LOGIT_TOLERANCE:g}; {len(disagreements)} predictions"
            " differ): do not use it"
        )
    score = problem.score(problem.evidence(exported))
    found = {"max_logit_difference": float(differences.max()), "samples": len(differences)}
    return {**found, f"exported_{problem.headline}": score}


def predict_with_onnx_levels(
    model: nn.Module, file: Path, batches: Iterable[Batch]
) -> tuple[Predictions, float]:
    """The trained model's predictions with its activations rounded as onnxruntime rounds them in its file.

    A value halfway between two levels is rounded up or down by float noise of 1e-7, and that one level then
    moves many others. So each of the file's roundings is compared with the model's own value, in levels, and
    then taken over. Returns the predictions, and the most by which a rounding was off beyond half a level.
    """
    import torch

    from isobatch.models.encoder import onnx_graph

    with tempfile.TemporaryDirectory() as folder:  # not beside the file: a killed export leaves nothing there
        rounding = onnx_graph.write_with_levels(file, shown := Path(folder) / "levels.onnx")
        session = evaluation.onnx_session(shown, threads=1)
    quantizers: list[Any] = [model.get_submodule(name) for name in rounding]
    names, run = [i.name for i in session.get_inputs()], evaluation.torch_runner(model)

    def run_with_levels(inputs: dict[str, np.ndarray]) -> np.ndarray:
        _, *levels = session.run(None, evaluation.named_inputs(names, inputs))
        inside = torch.from_numpy(inputs["attention_mask"]).bool()
        for quantizer, onnx_levels in zip(quantizers, levels, strict=True):
            found = torch.from_numpy(onnx_levels).float()
            if found.dim() > 2:  # padding is not read; the last layer may have the first token alone
                found = found.masked_fill(~inside[:, : found.shape[1], None], -1.0)
            quantizer.given_levels = found
        return run(inputs)

    found = evaluation.predict(run_with_levels, batches)
    for quantizer in quantizers:
        quantizer.given_levels = None
    return found, float(np.max([quantizer.max_rounding_excess for quantizer in quantizers]))


def tokenizer_runner(file: Path) -> evaluation.Runner:
    """Run an ONNX file on exactly the inputs that the tokenizer beside it makes.

    Raises ExportError where it takes others.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent)
    run = evaluation.onnx_runner(file, 1, tokenizer.model_input_names)
    # The library's exceptions have no base of their own.
    with explain_errors(f"{file.name} does not take what its tokenizer makes", Exception, to=ExportError):
        run(dict(tokenizer(["a text", "another"], padding=True, return_tensors="np")))
    return run


def check_quantized(model: nn.Module, file: Path, batches: Batches) -> dict[str, Any]:
    """Raise ExportError unless the file computes what the trained model does, ties rounded alike.

    Returns the figures of the comparison.
    """
    unforced = evaluation.predict(evaluation.torch_runner(model), batches())
    exported = evaluation.predict(tokenizer_runner(file), batches())
    trained, rounding_excess = predict_with_onnx_levels(model, file, batches())
    kind = next(kind for kind, name in ONNX_FILES.items() if name == file.name)
    if not rounding_excess <= TIE_TOLERANCE:
        raise ExportError(
            f"--to {kind}: an activation is rounded to a level {0.5 + rounding_excess:.3f} away from the"
            " trained model's: the file does not compute what was trained"
        )
    problem = problems.of_model(model)
    score = problem.score(problem.evidence(unforced))
    found = check_agreement(kind, problem, trained, exported)
    return found | {f"fake_quant_{problem.headline}": score, "rounding_doubt": rounding_excess}


def copy_beside(final: Path, folder: Path, *more: str) -> None:
    """Copy SIDE_FILES, and `more`, into the folder of another form; its config.json says how to answer, too,
    for programs that read no safetensors.
    """
    for file in final.iterdir():
        if file.name in (*SIDE_FILES, *more):
            shutil.copy(file, folder)
    kept, config = Calibration.open(final), json.loads((final / "config.json").read_text(encoding="utf-8"))
    settled = {"temperature": kept.temperature, "thresholds": np.asarray(kept.thresholds).tolist()}
    settled |= {"abstaining": kept.confidences.shown()} if kept.confidences else {}
    config["isobatch"] = {**(config.get("isobatch") or {}), **settled}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def export_dense(model: Any, final: Path, folder: Path) -> None:
    """A folder that any transformers opens without custom code: the family's own model of the unpruned size,
    zeros where something was removed, which gives the same logits.
    """
    import torch
    from safetensors.torch import save_model
    from transformers import AutoConfig

    from isobatch.models.encoder import encoders

    values = {name: value for name, value in model.config.to_dict().items() if name not in CUSTOM_CODE}
    dense_model = encoders.new_classifier(AutoConfig.for_model(**values)).eval()
    groups = encoders.row_groups(model)
    with torch.no_grad():
        target = dense_model.state_dict()
        for name, value in model.state_dict().items():
            place, part = (
                x.unflatten(0, (n := groups.get(name, 1), len(x) // n)) for x in (target[name], value)
            )
            place.zero_()[tuple(slice(size) for size in part.shape)] = part
    save_model(dense_model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    copy_beside(final, folder)
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in CUSTOM_CODE}
    config["architectures"] = [type(dense_model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def export_onnx(model: Any, final: Path, folder: Path) -> Path:
    """The fp32 graph, and beside it the tokenizer and the classes' names. Returns the ONNX file.

    The forms of one model that a process writes share the trace of it, which takes seconds.
    """
    from isobatch.models.encoder import onnx_graph

    parts = ((final / name).read_bytes() for name in ("model.safetensors", "config.json"))
    if _TRACED[:1] != [key := [hashlib.sha256(part).digest() for part in parts]]:
        _TRACED[:] = key, onnx_graph.classifier_program(model)
    _TRACED[1].save(file := folder / ONNX_FILES["onnx"])
    copy_beside(final, folder)
    return file
