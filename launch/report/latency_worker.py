"""The child that measures a finished model alone in a process: speed on one thread, and memory.

isobatch latency torch|onnx PLACE VOCABULARY PAIRS
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isobatch.core.package import own_command

BATCHES = (1, 16)


def measured(kind: str, place: Path, vocabulary: int, pairs: bool) -> dict[str, Any]:
    """Milliseconds and bytes of a model on this machine, from a process of its own."""
    asked = [kind, str(place.resolve()), str(vocabulary), str(int(pairs))]
    ended = subprocess.run(own_command("latency", *asked), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"measuring {place} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def latency(words: Sequence[str]) -> int:
    """Usage: latency torch|onnx PLACE VOCABULARY PAIRS, in a process that `report` starts."""
    kind, place, vocabulary, pairs = words
    from isobatch.models.encoder import evaluation

    if kind == "onnx":
        run = evaluation.onnx_runner(Path(place), threads=1)
    else:
        import torch

        from isobatch.models.encoder import encoders

        torch.set_num_threads(1)
        run = evaluation.torch_runner(encoders.open_classifier(place))
    found: dict[str, Any] = {"threads": 1, "tokens": evaluation.LATENCY_TOKENS}
    for rows in BATCHES:
        times = evaluation.time_runs_ms(run, evaluation.example_inputs(rows, int(vocabulary), pairs == "1"))
        quantiles = np.percentile(times, (25, 50, 75, 95)).round(4).tolist()
        found[f"batch_{rows}"] = dict(zip(("p25", "p50", "p75", "p95"), quantiles, strict=True))
    found["samples_per_second"] = round(BATCHES[-1] / found[f"batch_{BATCHES[-1]}"]["p50"] * 1e3, 2)
    found["peak_memory_bytes"] = _peak_bytes()
    print(json.dumps(found))
    return 0


def _peak_bytes() -> int:
    """Of this program alone: ru_maxrss of a started process begins with what its parent held."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024  # type: ignore[index]
