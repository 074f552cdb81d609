"""Speed on one thread and peak memory of a finished classifier, measured alone in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.measures import peak_resident_bytes
from isobatch.models.encoder import encoders, evaluation

BATCHES = (1, 16)


def measure(runtime: str, model_path: str, vocabulary: int, pairs: bool) -> dict[str, Any]:
    """Quantiles of milliseconds for batches of 1 and 16 texts, texts per second, peak bytes."""
    if runtime == "onnx":
        run = evaluation.onnx_runner(Path(model_path), threads=1)
    else:
        import torch

        torch.set_num_threads(1)
        run = evaluation.torch_runner(encoders.open_classifier(model_path))
    found: dict[str, Any] = {"threads": 1, "tokens": evaluation.LATENCY_TOKENS}
    for rows in BATCHES:
        times = evaluation.time_runs_ms(run, evaluation.example_inputs(rows, vocabulary, pairs))
        quantiles = np.percentile(times, (25, 50, 75, 95)).round(4).tolist()
        found[f"batch_{rows}"] = dict(zip(("p25", "p50", "p75", "p95"), quantiles, strict=True))
    found["samples_per_second"] = round(BATCHES[-1] / found[f"batch_{BATCHES[-1]}"]["p50"] * 1e3, 2)
    found["peak_memory_bytes"] = peak_resident_bytes()
    return found
