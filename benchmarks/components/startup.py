"""Seconds that `--help` takes, and from a command to its first step: `python -m benchmarks startup`.

The run is one step of the causal-lm demo, first with an empty cache and then with prepared data.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

from isobatch.benchmarks.report import Row, interleaved, middle
from isobatch.core.package import ROOT, own_command

CASES = {
    "cold": "demo, data prepared first (corpus, tokenizer, tokens)",
    "warm": "demo, prepared data in the cache",
}


def measure(quick: bool) -> list[Row]:
    """Medians; the whole run includes its checkpoint and export."""
    repeats = 1 if quick else 3
    helped = interleaved({"help": lambda: _timed(["--help"], {})}, 3 if quick else 15)["help"]
    rows: list[Row] = [{"what": "--help", "seconds": round(middle(helped, "outside"), 3)}]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        found = interleaved({name: lambda n=name: _demo(n, folder) for name in CASES}, repeats)  # type: ignore[misc]
    for name, runs in found.items():
        rows.append(
            {
                "what": CASES[name],
                "to the first step, its own clock": round(middle(runs, "startup"), 2),
                "to the first step, from outside": round(middle(runs, "first row"), 2),
                "whole run of one step": round(middle(runs, "outside"), 2),
            }
        )
    return rows


def _demo(name: str, folder: Path) -> Row:
    """A run of one step. `cold` makes a new cache, which the following `warm` finds."""
    number = len(list(folder.glob("cache-*"))) + (name == "cold")
    out = folder / f"runs-{name}-{number}"
    words = ["auto", "--task", "causal-lm", "--steps", "1", "--generate-tokens", "0"]
    row = _timed([*words, "--out", str(out)], {"ISOBATCH_CACHE": str(folder / f"cache-{number}")}, out)
    (summary,) = out.glob("*/summary.json")
    return {**row, "startup": json.loads(summary.read_text())["startup_seconds"]}


def _timed(words: list[str], environment: dict[str, str], out: Path | None = None) -> Row:
    began = time.perf_counter()
    child = subprocess.Popen(
        own_command(*words),
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    first = 0.0
    while child.poll() is None:
        if out is not None and not first and any(p.stat().st_size for p in out.glob("*/metrics.jsonl")):
            first = time.perf_counter() - began
        time.sleep(0.002)
    if child.returncode:
        raise RuntimeError(f"launch {' '.join(words)} ended with {child.returncode}")
    return {"outside": time.perf_counter() - began, "first row": first}
