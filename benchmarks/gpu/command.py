"""`python -m benchmarks gpu`: what a GPU should show first, and a table with a row for each part.

The parts take 26.5 minutes together. Every row is written as soon as it is there, so that the same command,
stopped or killed wherever it was, goes on there: three commands of `--seconds 570` are enough for all. A row
of older code stays and is shown as such; `--again` measures all anew. With a card for a quarter of an hour:
first what is right, in three commands side by side with a KEEP of their own, each of a few trials (`--trial
demo --trial "stop, resume, verify"`), for starting takes most of their time; then alone what is fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.benchmarks import child_process, report
from isobatch.benchmarks.gpu import runner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from isobatch.benchmarks.gpu.runner import Part, Results
    from isobatch.benchmarks.report import Row

PARTS = {
    "1": "smoke:PART",
    "2": "calibration:CONSTANTS",
    "3": "scratch:SPEED",
    "4": "scratch:PEERS",
    "5": "calibration:MEMORY",
    "6": "profiler:PART",
    "7": "worlds:PART",
    "8": "suite:PART",
}
"""Number -> where its `Part` is: right results first, then what the planner needs, the tests last."""


def main(words: Sequence[str]) -> int:
    """Run the parts that are asked for; 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on any machine; keeps no results")
    parser.add_argument("--part", choices=[*PARTS], help="one part alone")
    parser.add_argument("--trial", action="append", help="a trial's name: only those named so are run")
    parser.add_argument("--again", action="store_true", help="measure anew what is there already")
    parser.add_argument("--out", type=Path, help="folder of the results; by default benchmarks/results")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so long, at a row's end")
    asked = parser.parse_args(words)
    end = time.monotonic() + asked.seconds
    machine, has_gpu = report.machine(), _has_gpu()
    if not (has_gpu or asked.quick):
        print("benchmarks gpu: there is no CUDA GPU here: --quick tries what runs without", file=sys.stderr)
        return 2
    parts = {n: part_of(n) for n in ([asked.part] if asked.part else PARTS)}
    if asked.trial:
        parts = {
            n: found for n, part in parts.items() if (found := only(part, asked.trial)).trials(asked.quick)
        }
    print(f"{machine['device']}, torch {machine['torch']}", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the trial at work ends, too
    with tempfile.TemporaryDirectory() as temporary:
        place = os.environ.setdefault(runner.FOLDER, temporary)
        os.environ |= {"ISOBATCH_CACHE": f"{place}/cache", "ISOBATCH_STATE": f"{place}/state"}
        file = report.result_file("gpu-quick" if asked.quick else "gpu", machine["device"])
        folder = asked.out or (Path(temporary) if asked.quick else file.parent)
        results = runner.Results(folder.absolute() / file.name, machine)
        table = run_all(parts, results, asked, has_gpu, end)
    print(report.table(table))
    return int(any(row["failed"] for row in table))


def part_of(number: str) -> Part:
    module, _, name = PARTS[number].partition(":")
    found: Part = getattr(importlib.import_module(f"isobatch.benchmarks.gpu.{module}"), name)
    return found


def only(part: Part, names: Sequence[str] | None) -> Part:
    """The part with its trials of these names alone, or all of them."""
    chosen = lambda quick: [t for t in part.trials(quick) if not names or t.name in names]  # noqa: E731
    return dataclasses.replace(part, trials=chosen)


def run_all(
    parts: Mapping[str, Part], results: Results, asked: argparse.Namespace, has_gpu: bool, end: float
) -> list[Row]:
    """A line for each part: each in its time, and then in what is left those that were not through."""
    runner.end_leftovers(results)
    for runs in Path(os.environ[runner.FOLDER]).glob(f"{runner.PREFIX}*"):
        shutil.rmtree(runs, ignore_errors=True)
    warm = child_process.call("gpu.runner:warm_up")
    print(f"imports: {warm['imported']} libraries", file=sys.stderr, flush=True)
    table = {n: run(n, part, results, asked, has_gpu, end) for n, part in parts.items()}
    asked.again = False
    for n, part in parts.items():
        if "not run" in table[n]["came to"] and end - time.monotonic() > runner.LEAST_SECONDS:
            table[n] = run(n, part, results, asked, has_gpu, end, capped=False)
    print(f"written: {results.file}", file=sys.stderr)
    return [*table.values()]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _calibration(results: Results) -> dict[str, float]:
    from isobatch.benchmarks.gpu.calibration import calibration
    from isobatch.engine.machine.detect import detect

    rows = [row for part in ("2", "5") for row in results.parts.get(part, [])]
    found: dict[str, float] = {}
    for gpu in detect().gpus[:1]:
        if peak := gpu.peak_flops["bf16"]:
            found = calibration(rows, peak, gpu.memory_bandwidth)
    return found


def run(
    number: str,
    part: Part,
    results: Results,
    asked: argparse.Namespace,
    has_gpu: bool,
    end: float,
    capped: bool = True,
) -> Row:
    """Run a part, print its rows, and return its line of the last table."""
    print(f"\npart {number}: {part.title}", file=sys.stderr, flush=True)
    began = time.monotonic()
    rows = runner.run_part(number, part, results, asked.quick, asked.again, has_gpu, end, capped)
    if found := _calibration(results):
        results.calibration |= found
        results.write()
    hidden = ("outcome", "why", "code")
    done = [row for row in rows if row["outcome"] == "done"]
    print(report.table([{k: v for k, v in row.items() if k not in hidden} for row in done]), flush=True)
    seconds = round(time.monotonic() - began)
    return {"part": number, "what": part.title, **summary(rows, part), "seconds": seconds}


def summary(rows: Sequence[Row], part: Part) -> Row:
    """How many trials came to what, the part's headline, and the first failure or what was not run."""
    counted = Counter(row["outcome"] for row in rows)
    done = [row for row in rows if row["outcome"] == "done"]
    remarks = [f"{r['trial']}: {r['why']}" for r in rows if r["outcome"] == "failed"][:1]
    remarks += [f"{older} rows of older code"] if (older := sum("from" in row for row in done)) else []
    remarks += sorted({f"{r['outcome']}: {r['why']}" for r in rows if r["outcome"] in ("skipped", "not run")})
    found = [part.headline(done)] if done else []
    return {
        "done": f"{counted['done']}/{len(rows)}",
        "failed": counted["failed"],
        "came to": "; ".join(filter(None, [*found, *remarks])),
    }
