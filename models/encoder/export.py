"""A finished classifier in the forms that others open, each checked against the model that was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.errors import ExportError
from isobatch.models.base import Batch
from isobatch.models.encoder import encoders, evaluation, onnx_graph
from isobatch.models.encoder.evaluation import Answers

if TYPE_CHECKING:
    from torch import nn

TOLERANCE = 1e-3
"""Largest difference of a logit."""
TIE = 1e-2
"""How near to the middle between two levels, in levels, float noise may round either way."""
ONNX, ONNX_INT4 = "model.onnx", "model-int4.onnx"
TEXTS = ("config.json", "tokenizer.json", "tokenizer_config.json")
Batches = Callable[[], Iterable[Batch]]


def dense(model: Any) -> Any:
    """The family's own model of the unpruned size, zeros where something was removed: the same answers."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    values = model.config.to_dict()
    for name in ("per_layer_config", "auto_map", "architectures"):
        values.pop(name, None)
    kind = values.pop("model_type")
    whole = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **values)).eval()
    mine = model.state_dict()
    with torch.no_grad():
        for name, target in whole.state_dict().items():
            target.zero_()
            target[tuple(slice(n) for n in mine[name].shape)].copy_(mine[name])
    return whole


def check(kind: str, trained: Answers, exported: Answers) -> dict[str, Any]:
    """Raise ExportError unless two models answer alike; how far apart they are at most."""
    apart = np.abs(trained.logits - exported.logits).max(1)
    other = np.flatnonzero(trained.predicted != exported.predicted)
    worst = int(other[0]) if len(other) else int(apart.argmax())
    if len(other) or not apart[worst] <= TOLERANCE:  # not a number is no agreement either
        raise ExportError(
            f"--to {kind}: held-out sample {worst} is answered {exported.logits[worst].round(4).tolist()},"
            f" and by the trained model {trained.logits[worst].round(4).tolist()} (difference"
            f" {apart[worst]:.2g}, at most {TOLERANCE:g}; {len(other)} predictions differ): do not use it"
        )
    return {"max_logit_difference": float(apart.max()), "samples": len(apart)}


def roundings_alike(model: nn.Module, exposed: Path, batches: Iterable[Batch]) -> tuple[Answers, float]:
    """The trained model's answers where its activations are rounded as onnxruntime rounded them.

    A value halfway between two levels goes up or down by float noise of 1e-7; that one step then moves many
    others. So each rounding of the file is compared with the model's own value, in levels, and then taken.
    Returns the answers, and by how much more than half a level a rounding was off at most.
    """
    import torch

    session = evaluation.onnx_session(exposed, threads=1)
    wanted = {i.name for i in session.get_inputs()}
    places = in_order(model)
    logits, labels = [], []
    run = evaluation.torch_runner(model)
    for batch in batches:
        given = evaluation.inputs(batch)
        _, *levels = session.run(None, {k: v for k, v in given.items() if k in wanted})
        for place, told in zip(places, levels, strict=True):
            place.told = torch.from_numpy(told).float()
        logits.append(run(given))
        labels.append(np.asarray(batch["label"]))
    for place in places:
        place.told = None
    return Answers(np.concatenate(logits), np.concatenate(labels)), float(np.max([p.doubt for p in places]))


def in_order(model: Any) -> list[Any]:
    """The quantizers in the order in which a forward meets them."""
    found = []
    for layer in encoders.layers(model):
        if layer.query.out_features:
            found += [layer.query.reads, layer.output.reads]
        found += [layer.up.reads, layer.down.reads]
    inner = encoders.inner_head(model)
    return [*found, model.get_submodule(inner).reads]


def check_int4(model: nn.Module, file: Path, pairs: bool, batches: Batches) -> dict[str, Any]:
    """Raise ExportError unless the file computes what the trained model does, all but ties rounded alike."""
    free = evaluation.answers(evaluation.torch_runner(model), batches())
    exported = evaluation.answers(evaluation.onnx_runner(file, threads=1), batches())
    exposed = file.with_name(f".{file.name}.roundings")
    try:
        onnx_graph.write(model, exposed, pairs, roundings=True)
        trained, doubt = roundings_alike(model, exposed, batches())
    finally:
        exposed.unlink(missing_ok=True)
    if not doubt <= TIE:
        raise ExportError(
            f"--to onnx-int4: an activation is rounded to a level {0.5 + doubt:.3f} away from the trained"
            " model's: the file does not compute what was trained"
        )
    found = check("onnx-int4", trained, exported)
    return found | {
        "fake_quant_accuracy": float(free.right.mean()),
        "exported_accuracy": float(exported.right.mean()),
        "rounding_doubt": doubt,
        "max_logit_difference_with_ties": evaluation.furthest(free, exported),
        "predictions_changed_by_ties": int((free.predicted != exported.predicted).sum()),
    }


def as_folder(final: Path, folder: Path) -> None:
    """What final/ holds for transformers."""
    for file in final.iterdir():
        if file.name in (*TEXTS, "model.safetensors") or file.suffix == ".py":
            shutil.copy(file, folder)


def as_dense(model: Any, final: Path, folder: Path) -> None:
    """A folder that any transformers opens, without code of its own."""
    from safetensors.torch import save_model

    whole = dense(model)
    save_model(whole, str(folder / "model.safetensors"), metadata={"format": "pt"})
    for name in TEXTS[1:]:
        shutil.copy(final / name, folder)
    config = json.loads((final / "config.json").read_text())
    for name in ("per_layer_config", "auto_map"):
        config.pop(name, None)
    config["architectures"] = [type(whole).__name__]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def as_onnx(model: Any, final: Path, folder: Path, pairs: bool) -> Path:
    """The fp32 graph with what a program needs beside it: the tokenizer, and the classes' names."""
    onnx_graph.refuse(model.config.to_dict())
    onnx_graph.write(model, folder / ONNX, pairs)
    for name in TEXTS:
        shutil.copy(final / name, folder)
    return folder / ONNX
