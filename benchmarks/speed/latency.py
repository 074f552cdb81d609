"""Forms of one classifier in onnxruntime, and the clock of `report` against a plain loop.

`python -m benchmarks latency --data FOLDER --model FOLDER`: texts of the data's own lengths. The model is cut
to half its heads and neurons with a new head: what it answers is worth nothing, its speed is that of a
trained one. `ratio` is over the dense fp32 graph as torch.onnx.export writes it, `plain` the same by a loop
around `session.run` with the clock, `off` how far the two are apart.
"""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isobatch.models.encoder import encoders, evaluation, int8, latency, onnx_graph, quantization
from isobatch.models.encoder.importance import HeadsAndNeurons
from isobatch.models.encoder.last_layer import compute_first_alone
from isobatch.models.encoder.weight_surgery import remove_masked, set_masks

if TYPE_CHECKING:
    from isobatch.benchmarks.report import Row

TEXTS, QUICK_TEXTS = 256, 64
NAMES = (
    "dense, torch.onnx.export",
    "dense, export --to onnx",
    "half, torch.onnx.export",
    "half, its quantize_dynamic",
    "half, export --to onnx",
    "half, onnx-dynamic",
    "half, onnx-static",
    "half, onnx-int4",
)


def measure(quick: bool, data: str, model: str) -> list[Row]:
    """A row for each form, number of threads and batch."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    dense = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2).eval()
    batch = _tokens(tokenizer, Path(data), QUICK_TEXTS if quick else TEXTS)
    with tempfile.TemporaryDirectory() as folder:
        forms = _write(dense, Path(folder), batch)
        sizes = {name: file.stat().st_size for name, file in forms.items()}
        lengths = latency.drawn_lengths([batch])
        shared = {"vocabulary": len(tokenizer), "lengths": lengths}
        found = latency.measure_speed([{**shared, "model_path": str(file)} for file in forms.values()])
        rows = []
        for ending, threads in (("", 1), (latency.ALL_THREADS, found[0]["all_threads"])):
            for texts in latency.BATCHES:
                inputs = latency.texts(lengths, len(tokenizer), texts)
                plain = {name: _plain_ms(file, threads, inputs) for name, file in forms.items()}
                first = next(iter(forms))
                times = [one[f"batch_{texts}{ending}"] for one in found]
                for name, own in zip(forms, times, strict=True):
                    ratio, low, high = latency.speedup(own, times[0])
                    by_loop = plain[first] / plain[name]
                    rows.append(
                        {
                            "form": name,
                            "MB": round(sizes[name] / 1e6, 1),
                            "threads": threads,
                            "texts": texts,
                            "tokens": found[0]["tokens"],
                            "ms": own["p50"],
                            "ratio": ratio,
                            "low": low,
                            "high": high,
                            "plain": by_loop,
                            "off": abs(by_loop / ratio - 1),
                        }
                    )
        return rows


def _tokens(tokenizer: Any, data: Path, count: int) -> Any:
    """The first texts of train.tsv, padded, as a batch of prepared data."""
    lines = (data / "train.tsv").read_text(encoding="utf-8").splitlines()[1 : 1 + count]
    found = tokenizer([line.split("\t")[0] for line in lines], padding=True, return_tensors="np")
    return {"tokens": found["input_ids"], "length": found["attention_mask"].sum(1), "label": np.zeros(count)}


def _write(dense: Any, folder: Path, batch: Any) -> dict[str, Path]:
    """Name of a form -> its file; the first is what the others are compared with."""
    files = {name: folder / f"{number}.onnx" for number, name in enumerate(NAMES)}
    plain_dense, ours, plain_half, half_dynamic, half_file, dynamic, static, four = files.values()
    _trace(dense, plain_dense)
    half = copy.deepcopy(dense)
    layers = encoders.layers(half)
    sizes = encoders.heads_and_neurons(half)
    heads, neurons = ([torch.arange(size) % 2 == 0 for size in part] for part in zip(*sizes, strict=True))
    set_masks(layers, HeadsAndNeurons(list(heads), list(neurons)))
    remove_masked(layers)
    _trace(half, plain_half)
    for model, file in ((dense, ours), (half, half_file)):
        compute_first_alone(model)  # as a saved one is opened
        onnx_graph.classifier_program(model).save(file)
    for kind, source, file in (
        (int8.DYNAMIC, half_file, dynamic),
        (int8.STATIC, half_file, static),
    ):
        int8.quantize(kind, source, file, lambda _: [batch])
    _quantize_as_users_do(plain_half, half_dynamic)
    quantization.quantize_model(half, bits=4, embedding_bits=8)
    inputs = {name: torch.from_numpy(value) for name, value in evaluation.model_inputs(batch).items()}
    with torch.no_grad():
        quantization.calibrate(half, (half(**inputs) for _ in range(1)))
    onnx_graph.classifier_program(half.eval()).save(four)
    return files


def _trace(model: Any, file: Path) -> None:
    """As a user of PyTorch alone writes it."""
    example = torch.ones(2, 8, dtype=torch.int64)
    example[1, 5:] = 0
    names = ("input_ids", "attention_mask")
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.onnx.export(
        model,
        kwargs={name: example.clone() for name in names},
        dynamo=True,
        verbose=False,
        input_names=list(names),
        output_names=["logits"],
        dynamic_shapes=dict.fromkeys(names, sizes),
    )
    assert program is not None, "dynamo gives a program"
    program.save(file)


def _quantize_as_users_do(source: Path, file: Path) -> None:
    import onnx
    from onnxruntime.quantization import quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]  # else it fails: of weights that are transposed on the way
    quantize_dynamic(model, file)


def _plain_ms(file: Path, threads: int, inputs: latency.Inputs) -> float:
    """Of a batch, by a loop as anyone writes it: alone, one model after the other, the fastest of 7 loops."""
    run = evaluation.onnx_runner(file, threads)
    for given in inputs[:3]:
        run(given)
    loops = []
    for _ in range(7):
        began = time.perf_counter()
        for given in inputs:
            run(given)
        loops.append((time.perf_counter() - began) / len(inputs) * 1e3)
    return min(loops)
