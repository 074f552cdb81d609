"""Speed of finished classifiers on one thread, measured in turn, and the memory that each takes alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isobatch.core.measures import peak_resident_bytes
from isobatch.models.encoder import encoders, evaluation

if TYPE_CHECKING:
    from isobatch.models.encoder.evaluation import Runner

BATCHES = (1, 16)
ROUNDS = 9
"""Odd. Models take turns: a round has each of them, so that what slows the machine down slows all."""
ROUND_SECONDS = 0.12
MIN_RUNS, WARM_UP = 3, 2
"""Runs of a round: those that are timed, and those before them."""
Model = dict[str, Any]
"""runtime (torch or onnx), model_path, vocabulary."""


def measure(models: list[Model]) -> list[dict[str, Any]]:
    """Per model and batch of 1 and 16 texts: quantiles of ms, and the median of each round; texts a second.

    `waited`: share of the time in which other programs had the processor. The ms are the thread's own.
    """
    runners = [_open(model) for model in models]
    found: list[dict[str, Any]] = [{"threads": 1, "tokens": evaluation.LATENCY_TOKENS} for _ in models]
    began, used = time.perf_counter(), time.thread_time()
    for rows in BATCHES:
        times = _in_turn(runners, [_inputs(model, rows) for model in models])
        for one, of_model in zip(found, times, strict=True):
            quantiles = np.percentile(np.concatenate(of_model), (25, 50, 75, 95)).round(4).tolist()
            one[f"batch_{rows}"] = {
                **dict(zip(("p25", "p50", "p75", "p95"), quantiles, strict=True)),
                "rounds": [round(float(np.median(part)), 4) for part in of_model],
            }
    waited = 1 - (time.thread_time() - used) / (time.perf_counter() - began)
    for one in found:
        one["samples_per_second"] = round(BATCHES[-1] / one[f"batch_{BATCHES[-1]}"]["p50"] * 1e3, 2)
        one["waited"] = round(max(0.0, waited), 3)
    return found


def peak_memory(model: Model) -> int:
    """Bytes that a process takes which opens this model alone and runs it. Call it in a new process."""
    run = _open(model)
    for rows in BATCHES:
        for _ in range(MIN_RUNS):
            run(_inputs(model, rows))
    return peak_resident_bytes()


def _in_turn(runners: list[Runner], inputs: list[dict[str, np.ndarray]]) -> list[list[np.ndarray]]:
    """Model -> round -> ms of its runs."""
    times: list[list[np.ndarray]] = [[] for _ in runners]
    for _ in range(ROUNDS):
        for run, given, of_model in zip(runners, inputs, times, strict=True):
            of_model.append(evaluation.time_runs_ms(run, given, ROUND_SECONDS, MIN_RUNS, WARM_UP))
    return times


def _inputs(model: Model, rows: int) -> dict[str, np.ndarray]:
    return evaluation.example_inputs(rows, model["vocabulary"])


def _open(model: Model) -> Runner:
    if model["runtime"] == "onnx":
        return evaluation.onnx_runner(Path(model["model_path"]), threads=1)
    import torch

    torch.set_num_threads(1)
    return evaluation.torch_runner(encoders.open_classifier(model["model_path"]))
