"""Faults of a run on this machine: signals, kills, damaged checkpoints, a full disk, no more memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from isobatch.benchmarks.soak.checks import STEPS, Disturbed, Tally, check_run
from isobatch.core.package import ROOT, own_command

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

TASK = f"{ROOT}/tests/tasks/failing.py:SlowHungry"
LAYOUTS = (("1", "single"), ("2", "ddp"), ("2", "zero1"), ("2", "zero2"))
"""(processes, strategy) of which each start and resume draws one."""


def run(rng: random.Random, tally: Tally, expected: list[float]) -> dict[str, Any]:
    """One run until it is done; its folder is a small disk of its own where this user may mount one."""
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "runs").mkdir()
        small = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", f"{name}/runs"]
        mounted = subprocess.run(small, capture_output=True, check=False).returncode == 0
        try:
            disturbed = DisturbedRun(Path(name), rng, tally)
            disturbed.until_done()
            return {**check_run(disturbed.run, expected), "ends": disturbed.ends}
        finally:
            if mounted:
                subprocess.run(["umount", "-l", f"{name}/runs"], check=False)


class DisturbedRun(Disturbed):
    """A run that gets faults, is resumed when it ended, and so on until it is done."""

    process: subprocess.Popen[str]

    def __init__(self, folder: Path, rng: random.Random, tally: Tally) -> None:
        super().__init__(folder / "runs" / "run", rng, tally)
        self.folder = folder
        self.ends: list[str] = []
        self.asked_to_stop: float | None = None
        """When a signal asked it to stop, if it got no other fault since."""

    def until_done(self) -> None:
        first = ["auto", "--task", TASK, "--name", "run", "--steps", str(STEPS)]
        first += ["--ledger", "--save-every", "15", "--keep", "3"]
        while True:
            # From the second start on by `resume`, with another world and strategy drawn.
            self._start(["resume", str(self.run)] if (self.run / "recipe.json").exists() else first)
            self.inject_faults(FAULTS)
            code = self.process.returncode
            self.ends.append(str(code))
            if self.asked_to_stop is not None:
                self.tally.to_exit.append(time.monotonic() - self.asked_to_stop)
            print(f"ended with {code}", file=sys.stderr)
            if code == 1:
                print(self.said()[-3000:], file=sys.stderr)
            (self.folder / "runs" / "ballast").unlink(missing_ok=True)
            if code == 0:
                return

    def _start(self, words: list[str]) -> None:
        processes, strategy = self.rng.choice(LAYOUTS)
        plan = ["--processes", processes, "--strategy", strategy, "--micro-batch", "2"]
        run = ["--hang-timeout", "30", "--max-restarts", "1000", "--quiet"]
        self.began, self.asked_to_stop = time.monotonic(), None
        self.process = subprocess.Popen(
            own_command(*words, *plan, *run),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "err.txt").open("a"),
            text=True,
        )

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def said(self) -> str:
        return (self.folder / "err.txt").read_text()

    def after_fault(self, kind: str, began: float) -> None:
        self.asked_to_stop = began if kind in SIGNALS and self.asked_to_stop is None else None

    def descendants(self, mark: str) -> list[psutil.Process]:
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
            return [p for p in found if mark in " ".join(p.cmdline())]
        except psutil.Error:
            return []

    def ranks(self) -> list[psutil.Process]:
        launchers = self.descendants("accelerate.commands")
        return [p for p in self.descendants("launch/train.py") if p not in launchers]


def _signal(number: int) -> Callable[[DisturbedRun], bool]:
    def fault(target: DisturbedRun) -> bool:
        target.process.send_signal(number)
        return True

    return fault


def _kill_one(mark: str) -> Callable[[DisturbedRun], bool]:
    def fault(target: DisturbedRun) -> bool:
        found = target.ranks() if mark == "rank" else target.descendants(mark)
        if found:
            target.rng.choice(found).kill()
        return bool(found)

    return fault


def _kill_all(target: DisturbedRun) -> bool:
    for p in target.descendants(""):
        p.kill()
    target.process.kill()
    return True


def _checkpoints(target: DisturbedRun) -> list[Path]:
    return sorted(target.run.glob("checkpoints/[!.]*/node-*.safetensors"), key=lambda p: p.stat().st_mtime)


def _damage(how: str) -> Callable[[DisturbedRun], bool]:
    """Truncate the newest checkpoint or flip a bit of it, then kill all processes."""

    def fault(target: DisturbedRun) -> bool:
        # Not the only one: a run without a checkpoint starts again, which is right but proves nothing.
        folders = {p.parent for p in _checkpoints(target)}
        if len(folders) < 2:
            return False
        path = _checkpoints(target)[-1]
        content = bytearray(path.read_bytes())
        if how == "truncate":
            del content[len(content) // 2 :]
        else:
            content[target.rng.randrange(len(content))] ^= 1 << target.rng.randrange(8)
        path.write_bytes(content)
        return _kill_all(target)

    return fault


def _fill_disk(target: DisturbedRun) -> bool:
    if not os.path.ismount(target.folder / "runs"):
        return False
    try:
        with (target.folder / "runs" / "ballast").open("wb", buffering=0) as stream:
            while True:
                stream.write(b"\0" * 65536)
    except OSError:
        return True


def _starve(target: DisturbedRun) -> bool:
    """Set one rank's limit of address space to what it has."""
    import resource

    try:
        victim = target.rng.choice(target.ranks() or [psutil.Process(target.process.pid)])
        victim.rlimit(psutil.RLIMIT_AS, (victim.memory_info().vms, resource.RLIM_INFINITY))
    except psutil.Error:
        return False
    return True


SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGUSR1": signal.SIGUSR1, "SIGINT": signal.SIGINT}
FAULTS: dict[str, Callable[[DisturbedRun], bool]] = {
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
