"""Faults at random moments, until there were enough: what they did to a run that must not notice.

A run of two processes, or one, is killed, stopped, starved and robbed of checkpoints while it trains; what
ended is resumed under a strategy drawn at random. A run that is done must have every sample once in its
ledger, the losses of an undisturbed run, and pass `verify`; no process may be left over.
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
from typing import Any

import psutil

HOME = Path(__file__).resolve().parent.parent
TASK = f"{HOME}/tests/tasks/troubled.py:SlowHungry"
STEPS = 240
BOUND_SECONDS = 120
"""Longer without a new step, or an end, is a hang."""
LAYOUTS = (("1", "single"), ("2", "ddp"), ("2", "zero1"), ("2", "zero2"))


@dataclass
class Soak:
    """One run under fire."""

    folder: Path
    draw: random.Random
    counts: dict[str, int]
    wanted: int
    ends: list[str] = field(default_factory=list)
    process: subprocess.Popen[str] | None = None

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
        self.process = subprocess.Popen(
            [sys.executable, "-m", "launch", *words, *plan, *run],
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
            if FAULTS[kind](self):
                self.counts[kind] = self.counts.get(kind, 0) + 1
                print(f"fault {sum(self.counts.values())}: {kind}", file=sys.stderr)

    def _trains_for(self, seconds: float) -> int | None:
        """Wait for a first step and this long, or for the end; its code, then."""
        assert self.process is not None
        metrics, began = self.run / "metrics.jsonl", time.monotonic()
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        moved: float | None = None
        while self.process.poll() is None:
            if moved is None and metrics.exists() and metrics.stat().st_mtime_ns != before:
                moved = time.monotonic()
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


FAULTS: dict[str, Callable[[Soak], bool]] = {
    "SIGKILL of a rank": _kill_one("rank"),
    "SIGKILL of accelerate": _kill_one("accelerate.commands"),
    "SIGKILL of the command": _signal(signal.SIGKILL),
    "SIGKILL of all": _kill_all,
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGUSR1": _signal(signal.SIGUSR1),
    "SIGINT": _signal(signal.SIGINT),
    "checkpoint truncated": _damage("truncate"),
    "checkpoint bit flipped": _damage("flip"),
    "disk full": _fill_disk,
    "out of memory": _starve,
}


def measure(quick: bool, seed: int = 0) -> list[dict[str, Any]]:
    """A row per kind of fault, and one of what was checked."""
    wanted = 6 if quick else 105
    counts: dict[str, int] = {}
    runs, began = [], time.monotonic()
    expected = _undisturbed()
    while sum(counts.values()) < wanted:
        runs.append(_one_run(random.Random(seed + len(runs)), counts, wanted, expected))
    checks = {
        "runs": len(runs),
        "faults": sum(counts.values()),
        "largest_loss_difference": max(r["difference"] for r in runs),
        "samples_lost_or_repeated": sum(r["odd"] for r in runs),
        "verified": all(r["verified"] for r in runs),
        "left_over_processes": sum(r["left"] for r in runs),
        "ends": " ".join(sorted({e for r in runs for e in r["ends"]})),
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    return [*({"fault": kind, "times": count} for kind, count in sorted(counts.items())), checks]


def _undisturbed() -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        words = ["auto", "--task", TASK.replace("SlowHungry", "Line"), "--name", "run", "--steps", str(STEPS)]
        subprocess.run([sys.executable, "-m", "launch", *words], cwd=name, check=True, capture_output=True)
        return _losses(Path(name) / "runs" / "run")


def _one_run(
    draw: random.Random, counts: dict[str, int], wanted: int, expected: list[float]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "runs").mkdir()
        small = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", f"{name}/runs"]
        mounted = subprocess.run(small, capture_output=True, check=False).returncode == 0
        try:
            soak = Soak(Path(name), draw, counts, wanted)
            soak.until_done()
            return {**_checked(soak, expected), "ends": soak.ends}
        finally:
            if mounted:
                subprocess.run(["umount", "-l", f"{name}/runs"], check=False)


def _checked(soak: Soak, expected: list[float]) -> dict[str, Any]:
    ledger = [json.loads(line)["step"] for line in (soak.run / "samples.jsonl").read_text().splitlines()]
    found = _losses(soak.run)
    verify = [sys.executable, "-m", "launch", "verify", str(soak.run)]
    checked = subprocess.run(verify, cwd=soak.folder, capture_output=True, text=True, check=False)
    if checked.returncode:
        print(checked.stdout + checked.stderr, file=sys.stderr)
    left = [p for p in psutil.process_iter(["cmdline"]) if str(soak.run) in " ".join(p.info["cmdline"] or [])]
    for p in left:
        print(f"left over: {p.info['cmdline']}", file=sys.stderr)
    return {
        "difference": max(abs(a - b) for a, b in zip(found, expected, strict=True)),
        "odd": len(set(ledger) ^ set(range(1, STEPS + 1))) + len(ledger) - len(set(ledger)),
        "verified": checked.returncode == 0,
        "left": len(left),
    }


def _losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in rows if "lr" in r]
