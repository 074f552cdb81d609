"""Step time, file size and latency of pruning and of 4-bit training.

python -m benchmarks compression --data SST2_FOLDER --model MINILM_FOLDER

Files and latency are of a DistilBERT shape with random weights: neither depends on the values. Latency is of
one text of 32 tokens on one thread: processor time, lower quartile, so that other processes do not count.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from isobatch.benchmarks.sessions import make_session, prepare_workload
from isobatch.engine.training.train_step import Stepper
from isobatch.models.encoder import (
    encoders,
    evaluation,
    onnx_graph,
    quantization,
    weight_surgery,
)
from isobatch.models.encoder.importance import KeepMasks

if TYPE_CHECKING:
    from collections.abc import Callable

    from isobatch.benchmarks.report import Row
    from isobatch.engine.training.session import ActivePhase

SHAPES = {0: (12, 3072), 20: (10, 2432), 50: (6, 1536), 75: (3, 768)}
"""Per cent removed -> heads and neurons of each layer, of 12 and 3072."""
LAYERS, HEAD, VOCABULARY = 6, 64, 30522
WARM = 4


def measure(quick: bool, data: str, model: str) -> list[Row]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = files_and_latency(quick)
    torch.set_num_threads(threads)
    return [*rows, *steps(quick, data, model)]


def distilbert(heads: int, neurons: int) -> Any:
    """A random DistilBERT cut to these sizes."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=VOCABULARY)).eval()
    _cut(model, heads, neurons, HEAD)
    return model


def _cut(model: Any, heads: int, neurons: int, head: int) -> None:
    layers = encoders.layers(model)
    kept = KeepMasks(
        [torch.arange(layer.query.out_features // head) < heads for layer in layers],
        [torch.arange(layer.up.out_features) < neurons for layer in layers],
    )
    weight_surgery.set_masks(layers, kept, head)
    weight_surgery.remove_masked(layers)


def files_and_latency(quick: bool) -> list[Row]:
    rows: list[Row] = []
    given = evaluation.example_inputs(1, VOCABULARY)
    with tempfile.TemporaryDirectory() as place:
        runners: dict[tuple[int, str], evaluation.Runner] = {}
        sizes: dict[tuple[int, str], float] = {}
        for percent, (heads, neurons) in SHAPES.items():
            for form, run, size in _forms(Path(place), percent, heads, neurons):
                runners[percent, form], sizes[percent, form] = run, size
        seconds: dict[Any, list[float]] = {key: [] for key in runners}
        for _ in range(2 if quick else 5):  # in turn, so that other load affects all alike
            for key, run in runners.items():
                seconds[key].append(_processor_seconds(run, given, 10 if quick else 40))
    dense = seconds[0, "torch fp32"]
    for (percent, form), found in seconds.items():
        ratio = median(a / b for a, b in zip(dense, found, strict=True))
        rows.append(
            {
                "removed %": percent,
                "form": form,
                "file MB": round(sizes[percent, form] / 1e6, 2),
                "ms": round(median(found) * 1e3, 3),
                "faster than dense torch": round(ratio, 2),
            }
        )
    return rows


def _forms(place: Path, percent: int, heads: int, neurons: int) -> list[tuple[str, evaluation.Runner, float]]:
    model = distilbert(heads, neurons)
    bytes_ = 4 * sum(p.numel() for p in model.parameters())
    found = [("torch fp32", evaluation.torch_runner(model), float(bytes_))]
    plain = place / f"{percent}.onnx"
    onnx_graph.write_onnx(model, plain)
    found.append(("onnxruntime fp32", evaluation.onnx_runner(plain, 1), float(plain.stat().st_size)))
    for bits in (8, 4):
        small, file = distilbert(heads, neurons), place / f"{percent}-{bits}.onnx"
        quantization.quantize_model(small, 4, bits)
        run, inputs = evaluation.torch_runner(small), [evaluation.example_inputs(4, VOCABULARY)]
        quantization.calibrate(small, map(run, inputs))
        onnx_graph.write_onnx(small, file)
        name = f"onnxruntime 4-bit, {bits}-bit embeddings"
        found.append((name, evaluation.onnx_runner(file, 1), float(file.stat().st_size)))
    return found


def _processor_seconds(run: evaluation.Runner, given: dict[str, np.ndarray], times: int) -> float:
    run(given)
    found = []
    for _ in range(times):
        began = time.process_time()
        run(given)
        found.append(time.process_time() - began)
    return float(np.quantile(found, 0.25))


def steps(quick: bool, data: str, model: str) -> list[Row]:
    """Seconds of optimizer steps: plain, with distillation, pruning, pruned, and 4-bit."""
    count = 12 if quick else 48
    with tempfile.TemporaryDirectory() as place:
        teacher = _teacher(Path(place), data, model)
        common = {"data": data, "batch_size": 32, "steps": WARM + 2 * count, "max_length": 128}
        tasks = {
            "plain": "classifier",
            "4-bit with cached distillation": "qat",
            "half of it removed": "classifier",
        }
        with contextlib.ExitStack() as stack:
            phases: dict[str, ActivePhase] = {}
            for name, task in tasks.items():
                session = stack.enter_context(make_session(task, {**common, "model": teacher}))
                if name == "half of it removed":
                    _cut_in_half(session.model)
                phases[name] = stack.enter_context(session.phase(session.schedules[0]))
            found = _interleaved(phases, count)
        base = found["plain"]
        rows = [
            {
                "step": name,
                "ms": round(median(times) * 1e3, 1),
                "over plain": round(sum(times) / sum(base), 3),
            }
            for name, times in found.items()
        ]
        return [*rows, *_overhead(teacher, data, count)]


def _cut_in_half(model: Any) -> None:
    sizes = encoders.sizes_from_config(model.config.to_dict(), model.config.name_or_path)
    _cut(model, sizes.heads // 2, sizes.neurons // 2, sizes.hidden // sizes.heads)


def _teacher(folder: Path, data: str, model: str) -> str:
    """A finished classifier: the encoder with a random head for this data's classes."""
    recipe, task, facts, _ = prepare_workload("classifier", {"data": data, "model": model, "max_length": 128})
    made = folder / "teacher"
    made.mkdir()
    torch.manual_seed(recipe.seed)
    task.export(task.build_model(facts), made, facts)
    return str(made)


def _interleaved(phases: dict[str, ActivePhase], count: int) -> dict[str, list[float]]:
    """Seconds of the same steps of each, one after the other."""
    batches = {name: active.batches(0, WARM + count) for name, active in phases.items()}
    found: dict[str, list[float]] = {name: [] for name in phases}
    for number in range(WARM + count):
        for name, active in phases.items():
            loaded = next(batches[name])
            began = time.perf_counter()
            active.step(loaded)
            if number >= WARM:
                found[name].append(time.perf_counter() - began)
    return found


def _overhead(teacher: str, data: str, count: int) -> list[Row]:
    """Share of a pruning phase's time that importance scores, and events and cuts, take."""
    every = 40 if count > 12 else 4
    values = {"data": data, "teacher": teacher, "batch_size": 32, "sparsity": 0.5, "max_length": 128}
    session = make_session("pruning", {**values, "steps": 2 * 5 * every, "prune_every": every})
    spent = {"importance": 0.0, "optimizer steps": 0.0, "whole steps": 0.0}
    with (
        session,
        session.phase(session.schedules[0]) as active,
        mock.patch.object(session.task, "observe", _timed(session.task.observe, spent, "importance")),
        mock.patch.object(Stepper, "run", _timed(Stepper.run, spent, "optimizer steps")),
    ):
        step = _timed(active.step, spent, "whole steps")
        began = time.perf_counter()
        for loaded in active.batches(0, active.schedule.steps):
            step(loaded)
        total = time.perf_counter() - began
    # After its optimizer step, a phase's step only asks the task for events and cuts the model.
    parts = {
        "importance": spent["importance"],
        "events and cuts": spent["whole steps"] - spent["optimizer steps"],
    }
    return [{"part of a pruning phase": k, "share": round(v / total, 4)} for k, v in parts.items()]


def _timed(function: Callable[..., Any], spent: dict[str, float], name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        began = time.perf_counter()
        found = function(*arguments)
        spent[name] += time.perf_counter() - began
        return found

    return call
