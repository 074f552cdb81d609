"""Classifiers rounded to 8 bits after training, by onnxruntime's own quantizer; embeddings too.

dynamic: activations get their scale at each run. static: from training texts, once; a little faster, since no
run looks for its largest values. Both take any family whose fp32 graph onnxruntime runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from isobatch.core.errors import ExportError, UserError
from isobatch.core.facts import Facts
from isobatch.models.encoder import evaluation, export, problems
from isobatch.models.encoder.evaluation import Predictions
from isobatch.models.encoder.problems import Problem
from isobatch.models.protocols import Batches

DYNAMIC, STATIC = "onnx-dynamic", "onnx-static"
CALIBRATION_TEXTS, LEAST_TEXTS = 256, 32
"""Training texts that the ranges of activations are taken from, and the fewest that are enough."""
MOST_LOST = 0.01
"""Of the headline figure. What loses more, and clearly so, is no export."""


def check_calibration(kind: str, facts: Facts) -> None:
    """Raise UserError where there are too few training texts for a static export."""
    count = facts.samples["train"]
    if kind == STATIC and count < LEAST_TEXTS:
        raise UserError(
            f"--to {kind}: {count} training texts are too few to choose ranges from, {LEAST_TEXTS} are the"
            f" least: --to {DYNAMIC} needs none"
        )


def export_int8(kind: str, model: Any, final: Path, folder: Path, batches: Batches) -> dict[str, Any]:
    """Write the file, and what it needs beside it, into a folder; returns how it stands to the trained model.

    Raises ExportError where it is clearly worse.
    """
    fp32, file = export.export_onnx(model, final, folder), folder / export.ONNX_FILES[kind]
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # onnxruntime advises its users through the root logger
    try:
        quantize(kind, fp32, file, batches)
    finally:
        logging.disable(before)
    for part in folder.glob(f"{fp32.name}*"):  # large weights lie beside it
        part.unlink()
    trained = evaluation.predict(evaluation.torch_runner(model), batches())
    exported = evaluation.predict(export.tokenizer_runner(file), batches())
    return check_rounded(kind, problems.of_model(model), trained, exported)


def check_rounded(kind: str, problem: Problem, trained: Predictions, exported: Predictions) -> dict[str, Any]:
    """Raise ExportError where rounding loses more than MOST_LOST and the paired test says that it does.

    Returns the headline figure of both, its test, the share of equal answers and the largest difference of a
    logit.
    """
    difference = float(np.abs(trained.logits - exported.logits).max())
    before, after = (problem.evidence(found) for found in (trained, exported))
    test = problem.difference(after, before)
    figures = [problem.score(one) for one in (before, after)]
    if not np.isfinite(difference) or (figures[0] - figures[1] > MOST_LOST and test.p < problems.SIGNIFICANT):
        raise ExportError(
            f"--to {kind}: {problem.title} on held-out samples falls from {100 * figures[0]:.1f} to"
            f" {100 * figures[1]:.1f} % ({problem.test_name} {test.p:.2g}), and at most"
            f" {100 * MOST_LOST:g} points may go: `auto --task qat` trains a model to be rounded"
        )
    found = {f"trained_{problem.headline}": figures[0], f"exported_{problem.headline}": figures[1]}
    found |= {problem.test_name: test.p, "max_logit_difference": difference, "samples": len(exported.labels)}
    return found | {"agreement": 1 - len(trained.differing(exported)) / len(exported.labels)}


def quantize(kind: str, fp32: Path, file: Path, batches: Batches) -> None:
    """Write an fp32 ONNX file again with 8 bits. Raises ExportError where a family's cannot be."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    model = onnx.load(fp32)
    del model.graph.value_info[:]  # of weights that are transposed on the way
    if kind == DYNAMIC:
        quantize_dynamic(model, file, weight_type=QuantType.QInt8)
    else:
        inputs = training_texts([value.name for value in model.graph.input], batches)
        quantize_static(
            model,
            file,
            SimpleNamespace(get_next=lambda: next(inputs, None)),  # all that is asked of a data reader
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            nodes_to_quantize=_fusible_nodes(model),
            extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul"]},
        )
    written = onnx.load(file)
    del written.graph.value_info[:]  # with it onnxruntime fuses sums and norms to a slower kernel
    onnx.save(written, file)


def _fusible_nodes(model: Any) -> list[str]:
    """Products with weights that onnxruntime runs as integers, and embeddings.

    It would unpack the weights of a Gemm at each run. Raises ExportError where most products are such.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    place = {"MatMul": 1, "Gather": 0}
    found = [n for n in model.graph.node if n.op_type in place and n.input[place[n.op_type]] in weights]
    if 2 * sum(node.op_type == "Gemm" for node in model.graph.node) > len(found):
        raise ExportError(f"--to {STATIC}: this family's products do not run so: use --to {DYNAMIC}")
    return [node.name for node in found]


def training_texts(names: list[str], batches: Batches) -> Iterator[dict[str, np.ndarray]]:
    """(1, T) inputs of CALIBRATION_TEXTS training texts, evenly from all."""
    count = sum(len(batch["length"]) for batch in batches("train"))
    wanted = set(np.linspace(0, count - 1, min(count, CALIBRATION_TEXTS)).astype(int).tolist())
    place = 0
    for batch in batches("train"):
        inputs = evaluation.named_inputs(names, evaluation.model_inputs(batch))
        for row, length in enumerate(np.asarray(batch["length"]).tolist()):
            if place in wanted:
                yield {name: values[row : row + 1, :length] for name, values in inputs.items()}
            place += 1
