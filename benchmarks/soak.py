"""Faults at random moments, until there were enough: what they did to a run that must not notice.

A run of two processes, or one, is killed, stopped, starved and robbed of checkpoints while it trains; what
ended is resumed under a strategy drawn at random. A run that is done must have every sample once in its
ledger, the losses of an undisturbed run, and pass `verify`; no process may be left over. Where Slurm's
daemons are installed, a job on two nodes gets its share of faults, with those that only a cluster has.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from isobatch.core.package import ROOT, own_command

TASK = f"{ROOT}/tests/tasks/troubled.py:SlowHungry"
STEPS = 240
BOUND_SECONDS = 120
"""Longer without a new step, or an end, is a hang."""
ON_A_CLUSTER = 25
LAYOUTS = (("1", "single"), ("2", "ddp"), ("2", "zero1"), ("2", "zero2"))


class Progress:
    """Whether a run took a step; a resume first cuts its metrics back."""

    def __init__(self, run: Path) -> None:
        self.path, self.size = run / "metrics.jsonl", 0

    def moved(self) -> bool:
        size = self.path.stat().st_size if self.path.exists() else 0
        grew, self.size = size > self.size, size
        return grew


@dataclass
class Times:
    """Seconds that faults cost."""

    to_exit: list[float] = field(default_factory=list)
    """From a signal that asks for a stop to the end of all."""
    to_step: list[float] = field(default_factory=list)
    """From the start of a command, or of a requeued job, to its first new step."""

    def row(self) -> dict[str, Any]:
        return {
            "signals": len(self.to_exit),
            "slowest_signal_to_exit_seconds": round(max(self.to_exit, default=0), 1),
            "median_start_to_step_seconds": round(median(self.to_step), 1) if self.to_step else 0,
            "slowest_start_to_step_seconds": round(max(self.to_step, default=0), 1),
        }


@dataclass
class Soak:
    """One run under fire."""

    folder: Path
    draw: random.Random
    counts: dict[str, int]
    wanted: int
    times: Times
    ends: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None
    began: float | None = None
    """When the command was started; None once it took a step."""
    asked: float | None = None
    """When it was asked to stop, if that is all that befell it."""

    def __post_init__(self) -> None:
        self.progress = Progress(self.run)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def until_done(self) -> None:
        first = ["auto", "--task", TASK, "--name", "run", "--steps", str(STEPS)]
        first += ["--ledger", "--save-every", "15", "--keep", "3"]
        while True:
            # From the second on by `resume`, which may choose another world and strategy.
            self._start(["resume", str(self.run)] if (self.run / "recipe.json").exists() else first)
            code = self._under_fire()
            self.ends.append(str(code))
            if self.asked is not None:
                self.times.to_exit.append(time.monotonic() - self.asked)
            print(f"ended with {code}", file=sys.stderr)
            if code == 1:
                print((self.folder / "err.txt").read_text()[-3000:], file=sys.stderr)
            (self.folder / "runs" / "ballast").unlink(missing_ok=True)
            if code == 0:
                return

    def _start(self, words: list[str]) -> None:
        processes, strategy = self.draw.choice(LAYOUTS)
        plan = ["--processes", processes, "--strategy", strategy, "--micro-batch", "2"]
        run = ["--hang-timeout", "30", "--max-restarts", "1000", "--quiet"]
        self.began, self.asked = time.monotonic(), None
        self.process = subprocess.Popen(
            own_command(*words, *plan, *run),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "err.txt").open("a"),
            text=True,
        )

    def _under_fire(self) -> int:
        assert self.process is not None
        while True:
            ended = self._trains_for(self.draw.uniform(0.2, 2.5))
            if ended is not None:
                return ended
            if sum(self.counts.values()) >= self.wanted:
                continue
            kind = self.draw.choice(list(FAULTS))
            at = time.monotonic()
            if FAULTS[kind](self):
                self.asked = at if kind in SIGNALS and self.asked is None else None
                self.counts[kind] = self.counts.get(kind, 0) + 1
                print(f"fault {sum(self.counts.values())}: {kind}", file=sys.stderr)

    def _trains_for(self, seconds: float) -> int | None:
        """Wait for a first step and this long, or for the end; its code, then."""
        assert self.process is not None
        began, moved = time.monotonic(), None
        while self.process.poll() is None:
            if self.progress.moved() and moved is None:
                moved = time.monotonic()
                if self.began is not None:
                    self.times.to_step.append(moved - self.began)
                    self.began = None
            if moved is not None and time.monotonic() - moved > seconds:
                return None
            if time.monotonic() - began > BOUND_SECONDS:
                raise RuntimeError(f"hangs: {(self.folder / 'err.txt').read_text()[-2000:]}")
            time.sleep(0.02)
        return self.process.returncode

    def below(self, mark: str) -> list[psutil.Process]:
        assert self.process is not None
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
            return [p for p in found if mark in " ".join(p.cmdline())]
        except psutil.Error:
            return []

    def ranks(self) -> list[psutil.Process]:
        return [p for p in self.below("launch/train.py") if p not in self.below("accelerate.commands")]


def _signal(number: int) -> Callable[[Soak], bool]:
    def fault(soak: Soak) -> bool:
        assert soak.process is not None
        soak.process.send_signal(number)
        return True

    return fault


def _kill_one(mark: str) -> Callable[[Soak], bool]:
    def fault(soak: Soak) -> bool:
        found = soak.ranks() if mark == "rank" else soak.below(mark)
        if found:
            soak.draw.choice(found).kill()
        return bool(found)

    return fault


def _kill_all(soak: Soak) -> bool:
    assert soak.process is not None
    for p in [*soak.below(""), soak.process]:
        p.kill()
    return True


def _checkpoints(soak: Soak) -> list[Path]:
    return sorted(soak.run.glob("checkpoints/[!.]*/rank-*.safetensors"), key=lambda p: p.stat().st_mtime)


def _damage(how: str) -> Callable[[Soak], bool]:
    """The newest checkpoint loses its end or a bit, and then all processes die."""

    def fault(soak: Soak) -> bool:
        # Never the only one: a run without any begins anew, which is right but proves nothing.
        folders = {p.parent for p in _checkpoints(soak)}
        if len(folders) < 2:
            return False
        path = _checkpoints(soak)[-1]
        content = bytearray(path.read_bytes())
        if how == "truncate":
            del content[len(content) // 2 :]
        else:
            content[soak.draw.randrange(len(content))] ^= 1 << soak.draw.randrange(8)
        path.write_bytes(content)
        return _kill_all(soak)

    return fault


def _fill_disk(soak: Soak) -> bool:
    if not os.path.ismount(soak.folder / "runs"):
        return False
    try:
        with (soak.folder / "runs" / "ballast").open("wb", buffering=0) as stream:
            while True:
                stream.write(b"\0" * 65536)
    except OSError:
        return True


def _starve(soak: Soak) -> bool:
    """One rank may not map another byte."""
    import resource

    found = [
        *soak.ranks(),
        *([psutil.Process(soak.process.pid)] if soak.process and not soak.ranks() else []),
    ]
    try:
        victim = soak.draw.choice(found)
        victim.rlimit(psutil.RLIMIT_AS, (victim.memory_info().vms, resource.RLIM_INFINITY))
    except psutil.Error:
        return False
    return True


SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1, "SIGINT": signal.SIGINT}
FAULTS: dict[str, Callable[[Soak], bool]] = {
    "SIGKILL of a rank": _kill_one("rank"),
    "SIGKILL of accelerate": _kill_one("accelerate.commands"),
    "SIGKILL of the command": _signal(signal.SIGKILL),
    "SIGKILL of all": _kill_all,
    **{name: _signal(number) for name, number in SIGNALS.items()},
    "checkpoint truncated": _damage("truncate"),
    "checkpoint bit flipped": _damage("flip"),
    "disk full": _fill_disk,
    "out of memory": _starve,
}


def measure(quick: bool, seed: int = 0) -> list[dict[str, Any]]:
    """A row per kind of fault, and one of what was checked, on this machine and on a cluster."""
    from isobatch.benchmarks import soak_cluster

    expected = undisturbed()
    rows = under_fire(lambda *fire: _one_run(*fire, expected), 6 if quick else 105, seed)
    if soak_cluster.available():
        run = soak_cluster.run_under_fire
        rows += under_fire(
            lambda *fire: run(*fire, expected), 3 if quick else ON_A_CLUSTER, seed, "2 nodes under Slurm"
        )
    return rows


OneRun = Callable[[random.Random, dict[str, int], int, Times], dict[str, Any]]


def under_fire(one_run: OneRun, wanted: int, seed: int, where: str = "1 machine") -> list[dict[str, Any]]:
    """Runs, one after the other, until there were as many faults as wanted."""
    counts: dict[str, int] = {}
    runs, times, began = [], Times(), time.monotonic()
    while sum(counts.values()) < wanted:
        runs.append(one_run(random.Random(seed + len(runs)), counts, wanted, times))
    checks = {
        "where": where,
        "runs": len(runs),
        "faults": sum(counts.values()),
        "largest_loss_difference": max(r["difference"] for r in runs),
        "samples_lost_or_repeated": sum(r["odd"] for r in runs),
        "verified": all(r["verified"] for r in runs),
        "left_over_processes": sum(r["left"] for r in runs),
        "ends": " ".join(sorted({e for r in runs for e in r["ends"]})),
        **times.row(),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    return [*({"where": where, "fault": kind, "times": n} for kind, n in sorted(counts.items())), checks]


def undisturbed() -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        words = ["auto", "--task", TASK.replace("SlowHungry", "Line"), "--name", "run", "--steps", str(STEPS)]
        subprocess.run(own_command(*words), cwd=name, check=True, capture_output=True)
        return _losses(Path(name) / "runs" / "run")


def _one_run(
    draw: random.Random, counts: dict[str, int], wanted: int, times: Times, expected: list[float]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "runs").mkdir()
        small = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", f"{name}/runs"]
        mounted = subprocess.run(small, capture_output=True, check=False).returncode == 0
        try:
            soak = Soak(Path(name), draw, counts, wanted, times)
            soak.until_done()
            return {**checked(soak.run, expected), "ends": soak.ends}
        finally:
            if mounted:
                subprocess.run(["umount", "-l", f"{name}/runs"], check=False)


def checked(run: Path, expected: list[float]) -> dict[str, Any]:
    """What a run that is done came to."""
    ledger = [json.loads(line)["step"] for line in (run / "samples.jsonl").read_text().splitlines()]
    found = _losses(run)
    verify = own_command("verify", str(run))
    done = subprocess.run(verify, cwd=run, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or [])]
    for p in left:
        print(f"left over: {p.info['cmdline']}", file=sys.stderr)
    return {
        "difference": max(abs(a - b) for a, b in zip(found, expected, strict=True)),
        "odd": len(set(ledger) ^ set(range(1, STEPS + 1))) + len(ledger) - len(set(ledger)),
        "verified": done.returncode == 0,
        "left": len(left),
    }


def _losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in rows if "lr" in r]
