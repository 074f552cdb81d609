"""Export of a finished classifier to other formats, each checked against the trained model."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import ExportError
from isobatch.core.extras import need
from isobatch.models import saving
from isobatch.models.base import Batch
from isobatch.models.encoder import encoders, evaluation, onnx_graph, problems

if TYPE_CHECKING:
    from torch import nn

    from isobatch.models.encoder.evaluation import Predictions, Runner

LOGIT_TOLERANCE = 1e-3
"""Largest allowed difference of a logit."""
TIE_TOLERANCE = 1e-2
"""How far from the middle between two levels a value may be, in levels, and still round either way."""
ONNX_FILE, ONNX_INT4_FILE = "model.onnx", "model-int4.onnx"
MOST_WEIGHTS_OF_A_FILE = 500_000_000
"""An ONNX file holds 2 GB; what is traced has its weights beside it where they are more."""
SIDE_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""Files that an ONNX file needs beside it: the classes' names and the tokenizer."""
CUSTOM_CODE = ("per_layer_config", "auto_map")
"""Fields of config.json that need modeling_pruned.py."""
Batches = Callable[[], Iterable[Batch]]


def check_agreement(kind: str, trained: Predictions, exported: Predictions) -> dict[str, Any]:
    """Raise ExportError unless two models agree on all classes, and on logits within LOGIT_TOLERANCE.

    Returns max_logit_difference and samples. `kind`: the format, for the message.
    """
    differences = np.abs(trained.logits - exported.logits).max(1)
    disagreements = np.flatnonzero(trained.predicted_labels != exported.predicted_labels)
    worst = int(disagreements[0]) if len(disagreements) else int(differences.argmax())
    # `not <=` and not `>`, so that NaN is an error too.
    if len(disagreements) or not differences[worst] <= LOGIT_TOLERANCE:
        raise ExportError(
            f"--to {kind}: held-out sample {worst} is answered {exported.logits[worst].round(4).tolist()},"
            f" and by the trained model {trained.logits[worst].round(4).tolist()} (difference"
            f" {differences[worst]:.2g}, at most {LOGIT_TOLERANCE:g}; {len(disagreements)} predictions"
            " differ): do not use it"
        )
    return {"max_logit_difference": float(differences.max()), "samples": len(differences)}


def predict_with_onnx_levels(model: nn.Module, batches: Iterable[Batch]) -> tuple[Predictions, float]:
    """The trained model's predictions with its activations rounded as onnxruntime rounded them.

    A value halfway between two levels is rounded up or down by float noise of 1e-7, and that one level then
    moves many others. So each of the file's roundings is compared with the model's own value, in levels, and
    then taken over. Returns the predictions, and the most by which a rounding was off beyond half a level.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder:  # not beside the file: a killed export leaves nothing there
        quantizers = onnx_graph.write_onnx(model, file := Path(folder) / "levels.onnx", expose_levels=True)
        session = evaluation.onnx_session(file, threads=1)
    names, run = [i.name for i in session.get_inputs()], evaluation.torch_runner(model)

    def run_with_levels(inputs: dict[str, np.ndarray]) -> np.ndarray:
        _, *levels = session.run(None, evaluation.named_inputs(names, inputs))
        for quantizer, onnx_levels in zip(quantizers, levels, strict=True):
            quantizer.given_levels = torch.from_numpy(onnx_levels).float()
        return run(inputs)

    found = evaluation.predict(run_with_levels, batches)
    for quantizer in quantizers:
        quantizer.given_levels = None
    return found, float(np.max([quantizer.max_rounding_excess for quantizer in quantizers]))


def tokenizer_runner(file: Path) -> Runner:
    """Run an ONNX file on exactly the inputs that the tokenizer beside it makes.

    Raises ExportError where it takes others.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent)
    run = evaluation.onnx_runner(file, 1, tokenizer.model_input_names)
    try:
        run(dict(tokenizer(["a text", "another"], padding=True, return_tensors="np")))
    except Exception as error:  # the library's exceptions have no base of their own
        raise ExportError(f"{file.name} does not take what its tokenizer makes: {error}") from None
    return run


def check_int4(model: nn.Module, file: Path, batches: Batches) -> dict[str, Any]:
    """Raise ExportError unless the file computes what the trained model does, ties rounded alike.

    Returns the figures of the comparison.
    """
    unforced = evaluation.predict(evaluation.torch_runner(model), batches())
    exported = evaluation.predict(tokenizer_runner(file), batches())
    trained, rounding_excess = predict_with_onnx_levels(model, batches())
    if not rounding_excess <= TIE_TOLERANCE:
        raise ExportError(
            f"--to onnx-int4: an activation is rounded to a level {0.5 + rounding_excess:.3f} away from the"
            " trained model's: the file does not compute what was trained"
        )
    found, problem = check_agreement("onnx-int4", trained, exported), problems.of_model(model)
    return found | {
        f"fake_quant_{problem.headline}": problem.score(problem.evidence(unforced)),
        f"exported_{problem.headline}": problem.score(problem.evidence(exported)),
        "rounding_doubt": rounding_excess,
        "max_logit_difference_with_ties": float(np.abs(unforced.logits - exported.logits).max()),
        "predictions_changed_by_ties": int((unforced.predicted_labels != exported.predicted_labels).sum()),
    }


def export_transformers(final: Path, folder: Path) -> None:
    """Copy the files of final/ that transformers reads."""
    for file in final.iterdir():
        if file.name in (*SIDE_FILES, "model.safetensors") or file.suffix == ".py":
            shutil.copy(file, folder)


def export_dense(model: Any, final: Path, folder: Path) -> None:
    """A folder that any transformers opens without custom code: the family's own model of the unpruned size,
    zeros where something was removed, which gives the same logits.
    """
    import torch
    from safetensors.torch import save_model
    from transformers import AutoConfig, AutoModelForSequenceClassification

    values = model.config.to_dict()
    for name in (*CUSTOM_CODE, "architectures"):
        values.pop(name, None)
    kind = values.pop("model_type")
    dense_model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **values)).eval()
    pruned_weights = model.state_dict()
    with torch.no_grad():
        for name, target in dense_model.state_dict().items():
            target.zero_()
            target[tuple(slice(n) for n in pruned_weights[name].shape)].copy_(pruned_weights[name])
    save_model(dense_model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    for name in SIDE_FILES[1:]:
        shutil.copy(final / name, folder)
    config = json.loads((final / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in CUSTOM_CODE}
    config["architectures"] = [type(dense_model).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def export_onnx(model: Any, final: Path, folder: Path) -> Path:
    """The fp32 graph, and beside it the tokenizer and the classes' names. Returns the ONNX file."""
    config = model.config.to_dict()
    small = sum(p.numel() for p in model.parameters()) < MOST_WEIGHTS_OF_A_FILE
    known = config["model_type"] in encoders.FAMILIES
    if known and small and onnx_graph.activation_of(config) in onnx_graph.ACTIVATIONS:
        onnx_graph.write_onnx(model, folder / ONNX_FILE)
    else:
        trace_onnx(model, folder / ONNX_FILE)
    for name in SIDE_FILES:
        shutil.copy(final / name, folder)
    return folder / ONNX_FILE


def trace_onnx(model: Any, file: Path) -> None:
    """Write a classifier of any family in fp32, as PyTorch traces its forward.

    Raises UserError without onnxscript, and ExportError for a model that cannot be traced.
    """
    import torch

    need("onnxscript", "--to onnx of this model")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it misses torchvision
    names = saving.model_input_names(model.config.to_dict())
    example = torch.ones(2, 8, dtype=torch.int64)
    example[1, 5:] = 0  # a mask without padding would be left out

    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    model.config.use_cache = False  # logits alone
    try:
        program = torch.onnx.export(
            model.eval(),
            kwargs={name: example.clone() for name in names},  # one tensor twice would be one input
            dynamo=True,
            verbose=False,
            input_names=names,
            output_names=["logits"],
            dynamic_shapes=dict.fromkeys(names, sizes),
        )
    except Exception as error:  # of PyTorch's compiler and of the model's own code
        kind, reason = model.config.model_type, str(error).strip().partition("\n")[0]
        raise ExportError(f"--to onnx: PyTorch cannot trace a {kind} ({reason}): use --to hf") from None
    assert program is not None, "dynamo gives a program"
    program.save(file)
