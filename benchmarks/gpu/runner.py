"""Trials of a part, each in a process of its own with a time limit; a row is kept as soon as it is there.

What a trial leaves running is ended after it, and what a killed command left when the next one begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from isobatch.benchmarks import child_process
from isobatch.benchmarks.report import Row
from isobatch.core.package import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

GPU = "a GPU"
"""A need that is no library."""
COMMAND_LINE = ("accelerate", "filelock", "fire", "safetensors", "tokenizers", "transformers")
"""What every run of the command line needs."""
LEAST_SECONDS = 20.0
"""With less left of a part's time no trial is begun."""
PATIENCE = 10
"""How many times its limit a trial of a rehearsal may take."""
PREFIX = "trial-"
OVER = "the time is over: the same command goes on here"
FOLDER = "ISOBATCH_BENCHMARK_FOLDER"
"""Environment variable with the folder of one `make gpu`, for what its trials share."""
RUNS = "ISOBATCH_BENCHMARK_RUNS"
"""Environment variable with the folder of one trial's runs, which are removed after it: they fill a disk."""
TRIAL = "ISOBATCH_TRIAL_OF"
"""Environment variable of a trial and of all that it starts: the file of its results."""
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "datasets")
Outcome = Literal["done", "failed", "skipped", "not run"]


@dataclass(frozen=True, slots=True)
class Trial:
    """One row of a part: a function of strings that runs in a process of its own and returns figures."""

    name: str
    place: str
    """The function, such as `gpu.smoke:resume`."""
    words: tuple[str, ...] = ()
    """Its arguments."""
    seconds: int = 120
    """After so long it is killed."""
    needs: tuple[str, ...] = COMMAND_LINE
    """Libraries by the names of their imports, and perhaps `GPU`."""


@dataclass(frozen=True, slots=True)
class Part:
    """Trials on one question."""

    title: str
    trials: Callable[[bool], Sequence[Trial]]
    """`quick` -> trials, the most telling first."""
    headline: Callable[[Sequence[Row]], str]
    """Its finished rows in a few words."""
    seconds: int = 480
    """No trial lasts beyond this, over all commands; what is left out is run where time is left."""


def missing(names: Iterable[str], has_gpu: bool) -> list[str]:
    """Which of these needs the machine does not meet."""
    return [n for n in names if not (has_gpu if n == GPU else importlib.util.find_spec(n))]


class Results:
    """The rows of all parts on one machine, in one file."""

    def __init__(self, file: Path, machine: Mapping[str, Any]) -> None:
        self.file, self.machine = file, machine
        found = json.loads(file.read_text()) if file.exists() else {}
        self.parts: dict[str, list[Row]] = found.get("parts", {})
        self.calibration: dict[str, float] = found.get("calibration", {})

    def rows(self, part: str) -> dict[str, Row]:
        """Trial -> its row, of this code or an older one."""
        return {row["trial"]: row for row in self.parts.get(part, [])}

    def keep(self, part: str, row: Row) -> None:
        """Put the row in the place of an earlier one of its trial, and write the file."""
        rows = self.parts.setdefault(part, [])
        rows[:] = [*(r for r in rows if r["trial"] != row["trial"]), row]
        self.write()

    def write(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        values = {"machine": self.machine, "parts": self.parts, "calibration": self.calibration}
        written = self.file.with_suffix(".new")
        written.write_text(json.dumps(values, indent=1) + "\n")
        written.replace(self.file)


def code_hash() -> str:
    """Names the code that results come from: the package, these benchmarks and their tests."""
    rooms = ("core", "data", "models", "engine", "launch", "benchmarks/gpu", "tests/gpu")
    found = hashlib.sha256()
    for file in sorted(f for room in rooms for f in (ROOT / room).rglob("*.py")):
        found.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return found.hexdigest()[:12]


def run_part(
    name: str,
    part: Part,
    results: Results,
    quick: bool,
    again: bool,
    has_gpu: bool,
    end: float = math.inf,
    capped: bool = True,
) -> list[Row]:
    """The rows of all trials of a part, until `end` on the monotonic clock.

    Finished ones are not run again, those of older code neither; failed ones are, after those never tried.
    """
    code, known = code_hash(), {} if again else results.rows(name)
    rows = {trial: row for trial, row in known.items() if row["outcome"] == "done"}
    if capped and not quick:
        spent = sum(row.get("seconds", 0) for row in rows.values() if row["code"] == code)
        end = min(end, time.monotonic() + part.seconds - spent)
    trials = part.trials(quick)
    if quick:  # a rehearsal measures nothing, and the machine may be busy
        trials = [replace(trial, seconds=PATIENCE * trial.seconds) for trial in trials]
    for trial in sorted(trials, key=lambda t: t.name in known):
        if trial.name not in rows:
            row = {"trial": trial.name, **_run(trial, end - time.monotonic(), has_gpu, results), "code": code}
            if row["outcome"] in ("done", "failed"):
                results.keep(name, row)
            print(f"  {trial.name}: {_told(row)}", file=sys.stderr, flush=True)
            rows[trial.name] = row
    found = [rows[trial.name] for trial in trials]
    return [{**row, "from": "older code"} if row["code"] != code else row for row in found]


def _run(trial: Trial, left: float, has_gpu: bool, results: Results) -> Row:
    if lacks := missing(trial.needs, has_gpu):
        return _ended("skipped", f"needs {', '.join(lacks)}")
    if left < LEAST_SECONDS:
        return _ended("not run", OVER)
    began, limit = time.monotonic(), min(left, trial.seconds)
    runs = tempfile.mkdtemp(prefix=PREFIX, dir=os.environ.get(FOLDER))
    environment = {**os.environ, TRIAL: str(results.file), RUNS: runs}
    try:
        figures: Row = child_process.call(trial.place, *trial.words, environment=environment, timeout=limit)
    except RuntimeError as error:
        if limit < trial.seconds and time.monotonic() - began >= limit:
            return _ended("not run", OVER)
        print(error, file=sys.stderr)
        return {**_ended("failed", _last_line(str(error))), "seconds": round(time.monotonic() - began)}
    finally:
        end_leftovers(results)
        shutil.rmtree(runs, ignore_errors=True)
    return {**_ended("done", ""), "seconds": round(time.monotonic() - began), **figures}


def end_leftovers(results: Results) -> None:
    """Kill what trials with these results left running: it would keep its part of the card."""
    import psutil

    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(TRIAL) == str(results.file):
                left.append(process)
    child_process.end(*left)


def warm_up() -> Row:
    """Import every library and begin with the card once: the first time takes a minute on a cold disk."""
    import torch

    found = [name for name in LIBRARIES if not missing([name], has_gpu=True)]
    for name in found:
        with contextlib.suppress(Exception):  # the trials that need it will say so
            importlib.import_module(name)
    ones = torch.ones(64, 64, device="cuda" if torch.cuda.is_available() else "cpu")
    return {"imported": len(found), "sum": float((ones @ ones).sum())}


def _ended(outcome: Outcome, why: str) -> Row:
    return {"outcome": outcome, "why": why}


def _last_line(error: str) -> str:
    """What happened, and the last line that says something."""
    first, *others = [line.strip() for line in error.splitlines() if line.strip()]
    return f"{first} {others[-1]}"[:300] if others else first


def _told(row: Row) -> str:
    hidden = ("trial", "outcome", "why", "code")
    figures = ", ".join(f"{name} {value}" for name, value in row.items() if name not in hidden)
    return f"{row['outcome']}: {row['why'] or figures}"
