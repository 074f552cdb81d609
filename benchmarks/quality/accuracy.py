"""Accuracy lost by pruning and 4-bit training of a classifier on real text, at several sparsities.

python -m benchmarks accuracy --data SST2_FOLDER --model MINILM_FOLDER

Runs are kept in benchmarks/runs (not in the repository): given again, a stopped command continues. Latency is
a run's own measurement, p50 of one text of 32 tokens on one thread, in torch, or in onnxruntime for qat.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.package import ROOT, own_command

if TYPE_CHECKING:
    from isobatch.benchmarks.report import Row

RUNS = ROOT / "benchmarks" / "runs"
BASELINE = "A0"
STAGES = {
    BASELINE: "--task classifier --epochs 3 --lr 5e-5 --group-by-length on",
    "p20": "--task pruning --teacher A0 --sparsity 0.2 --epochs 1",
    "p50": "--task pruning --teacher A0 --sparsity 0.5 --epochs 2",
    "p75": "--task pruning --teacher A0 --sparsity 0.75 --epochs 3",
    "p20fast": "--task pruning --teacher A0 --fast",
    "q20": "--task qat --pruned p20 --epochs 1 --train-fraction 0.3",
    "q50": "--task qat --pruned p50 --epochs 1 --train-fraction 0.3",
}
"""Run -> its flags. Shorter than the full mode's 8 and 2 epochs: two cores then need only hours."""


def measure(quick: bool, data: str, model: str) -> list[Row]:
    if not quick:
        return train_and_compare(STAGES, RUNS, data, model)
    with tempfile.TemporaryDirectory() as place:
        short = {name: re.sub(r" --epochs \d+", "", flags) for name, flags in STAGES.items()}
        stages = {name: f"{flags} --steps 20" for name, flags in short.items()}
        return train_and_compare(stages, Path(place), data, model)


def train_and_compare(stages: dict[str, str], runs: Path, data: str, model: str) -> list[Row]:
    """The figures of a run per stage, in the folder `runs`; what is finished there is not trained again."""
    for name, flags in stages.items():
        _train(name, flags.split(), runs, data, model)
    baseline = _summary(runs / BASELINE)
    return [_row(name, _summary(runs / name), baseline) for name in stages]


def _train(name: str, flags: list[str], runs: Path, data: str, model: str) -> None:
    placed = [str(runs / word) if (runs / word).is_dir() else word for word in flags]
    given = ["--model", model] if name == BASELINE else []
    words = ["auto", *placed, *given, "--data", data, "--out", str(runs), "--name", name, "--quiet"]
    subprocess.run(own_command(*words), cwd=ROOT, check=True)


def _row(name: str, found: dict[str, Any], baseline: dict[str, Any]) -> Row:
    metrics = found["metrics"]
    points = 100 * (metrics["accuracy"] - baseline["metrics"]["accuracy"])
    return {
        "run": name,
        "accuracy %": round(100 * metrics["accuracy"], 2),
        "against A0": round(points, 2),
        "McNemar p": round(metrics.get("mcnemar_p", 1.0), 3),
        "sparsity": round(metrics.get("sparsity", 0.0), 3),
        "ms": metrics.get("latency_ms_p50", "-"),
        "file MB": round(metrics.get("file_bytes", 4 * found["parameters"]) / 1e6, 2),
        "minutes": round(found["train_seconds"] / 60, 1),
        "samples": found["samples_seen"],
    }


def _summary(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return found
