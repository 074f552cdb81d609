"""`python -m benchmarks gpu`: what a GPU should show first, and a table with a row for each part.

The parts take at most 8 minutes each, the first four 25 together. Every row is written as soon as it is
there, so that the same command goes on where it was stopped. A row is measured anew when the code has
changed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.benchmarks import report
from isobatch.benchmarks.gpu import runner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.benchmarks.gpu.runner import Part, Results
    from isobatch.benchmarks.report import Row

PARTS = {
    "1": "smoke",
    "2": "suite",
    "3": "scratch",
    "4": "profiler",
    "5": "seven_billion",
    "6": "worlds",
    "7": "calibration",
}
"""Number -> module with a `PART`, the most telling first."""
WHEELS = {
    "isal": "isal",
    "fire": "fire",
    "peft": "peft",
    "bitsandbytes": "bitsandbytes",
    "deepspeed": "deepspeed",
    "datasets": "datasets",
    "nvidia-ml-py": "pynvml",
    "pytest": "pytest",
    "hypothesis": "hypothesis",
}
"""Wheel that a machine may lack -> the name of its import."""
BESIDE = {"datasets": "data from the hub", "pynvml": "utilisation and power in metrics"}
"""Import -> what is missing without it, beside trials."""


def main(words: Sequence[str]) -> int:
    """Run the parts that are asked for; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on any machine; keeps no results")
    parser.add_argument("--part", choices=[*PARTS], help="one part alone")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    asked = parser.parse_args(words)
    machine = report.machine()
    has_gpu = _has_gpu()
    if not (has_gpu or asked.quick):
        print("benchmarks gpu: there is no CUDA GPU here: --quick tries what runs without", file=sys.stderr)
        return 2
    numbers = [asked.part] if asked.part else [*PARTS]
    parts = {n: importlib.import_module(f"isobatch.benchmarks.gpu.{PARTS[n]}").PART for n in numbers}
    print(f"{machine['device']}, torch {machine['torch']}", file=sys.stderr)
    for line in missing_wheels(parts, asked.quick):
        print(line, file=sys.stderr)
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {runner.FOLDER: place, "ISOBATCH_CACHE": f"{place}/cache"}
        file = report.result_file("gpu", machine["device"])
        results = runner.Results(Path(place) / "quick.json" if asked.quick else file, machine)
        table = [run(n, part, results, asked.quick, asked.again, has_gpu) for n, part in parts.items()]
        if not asked.quick:
            results.calibration |= _calibration(results)
            results.write()
            print(f"written: {file}", file=sys.stderr)
    print(report.table(table))
    return int(any(row["failed"] for row in table))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _calibration(results: Results) -> dict[str, float]:
    from isobatch.benchmarks.gpu.calibration import calibration
    from isobatch.engine.machine.detect import detect

    gpu, rows = detect().gpu, results.parts.get("7", [])
    peak = gpu.peak_flops["bf16"]
    return calibration(rows, peak, gpu.memory_bandwidth) if peak else {}


def missing_wheels(parts: Mapping[str, Part], quick: bool) -> list[str]:
    """A line for each wheel that is not here: the trials that it costs."""
    lines = []
    for wheel, name in WHEELS.items():
        if not runner.missing([name], has_gpu=True):
            continue
        costs = [BESIDE[name]] if name in BESIDE else []
        for number, part in parts.items():
            trials = part.trials(quick)
            lost = [t.name for t in trials if name in t.needs]
            if lost:
                costs.append(f"part {number} ({'all' if len(lost) == len(trials) else ', '.join(lost)})")
        lines.append(f"missing: {wheel}; it costs {'; '.join(costs) or 'no trial'}")
    return lines


def run(number: str, part: Part, results: Results, quick: bool, again: bool, has_gpu: bool) -> Row:
    """Run a part, print its rows, and return its line of the last table."""
    print(f"\npart {number}: {part.title}", file=sys.stderr, flush=True)
    began = time.monotonic()
    rows = runner.run_part(number, part, results, quick, again, has_gpu)
    seconds = round(time.monotonic() - began)
    hidden = ("outcome", "why", "code")
    done = [row for row in rows if row["outcome"] == "done"]
    print(report.table([{k: v for k, v in row.items() if k not in hidden} for row in done]), flush=True)
    return {"part": number, "what": part.title, **summary(rows, part), "seconds": seconds}


def summary(rows: Sequence[Row], part: Part) -> Row:
    """How many trials came to what, the part's headline, and the first failure or what was not run."""
    counted = Counter(row["outcome"] for row in rows)
    done = [row for row in rows if row["outcome"] == "done"]
    remarks = [f"{r['trial']}: {r['why']}" for r in rows if r["outcome"] == "failed"][:1]
    remarks += sorted({f"{r['outcome']}: {r['why']}" for r in rows if r["outcome"] in ("skipped", "not run")})
    found = [part.headline(done)] if done else []
    return {
        "done": f"{counted['done']}/{len(rows)}",
        "failed": counted["failed"],
        "came to": "; ".join(filter(None, [*found, *remarks])),
    }
