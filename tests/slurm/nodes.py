"""A Slurm of two nodes on this machine, and jobs on it."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from isobatch.tests.integration.helpers import ROOT, command, launch, ledger, losses, rows, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCRIPT = Path(__file__).with_name("cluster.sh")
SAMPLES, BATCH = 64, 8
TASKS = f"{ROOT}/tests/tasks/failing.py"


def wait_for(done: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.2)


@dataclass(frozen=True)
class Job:
    """A job submitted for one run."""

    cluster: Cluster
    number: str
    run: Path

    def shown(self, what: str) -> str:
        words = self.cluster.ask("scontrol", "show", "job", self.number, "-o").split()
        return next((w.partition("=")[2] for w in words if w.startswith(f"{what}=")), "")

    def steps(self) -> int:
        return len(rows(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def reach(self, step: int, seconds: float = 60) -> None:
        wait_for(lambda: self.steps() >= step, seconds)

    def finish(self, seconds: float) -> None:
        """Until the job is over, done."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_for(lambda: self.shown("JobState") in over, seconds)
        assert self.shown("JobState") == "COMPLETED", self.said()

    def output(self) -> str:
        """What the job has printed, in all legs."""
        path = self.run / "slurm" / f"{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def script(self) -> psutil.Process:
        """The process that the job's script is."""
        words = ["job", str(self.run)]
        return next(p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-2:] == words)

    def said(self) -> str:
        logs = sorted((self.run / "slurm").glob("*.*"))
        return "".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}\n" for p in logs)


@dataclass(frozen=True)
class Cluster:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *words: str) -> str:
        return command(list(words), self.folder, 30, **self.environment).stdout

    def kill_node(self, name: str) -> None:
        """As when its power fails: its daemon, its step daemons and all they started.

        All stand still before the first is killed: srun, or a step's daemon, would tell others of its end.
        """
        found = [p for p in psutil.process_iter() if self._has(p) and _node_of(p) == name]
        found += [p for p in {child.parent() for child in found} if p and p.name().startswith("slurmstepd")]
        daemon = self.folder / f"slurmd.{name}.pid"
        for end in (psutil.Process.suspend, psutil.Process.kill):
            for process in [psutil.Process(int(daemon.read_text())), *found]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(process)
        daemon.unlink()

    def _has(self, process: psutil.Process) -> bool:
        """Whether a process belongs to a job here: other clusters may be up on this machine."""
        with contextlib.suppress(psutil.Error):
            return process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]
        return False

    def start_node(self, name: str) -> None:
        self.ask("slurmd", "-N", name)

    def start_missing_daemons(self) -> None:
        """What a test that failed has left dead."""
        if not (self.folder / "slurmctld.pid").exists():
            self.start_controller()
        for name in ("n1", "n2"):
            if not (self.folder / f"slurmd.{name}.pid").exists():
                self.start_node(name)

    def stop_controller(self) -> None:
        pid = self.folder / "slurmctld.pid"
        os.kill(int(pid.read_text()), signal.SIGTERM)
        wait_for(lambda: not pid.exists(), 20)

    def start_controller(self) -> None:
        self.ask("slurmctld")
        wait_for(lambda: "UP" in self.ask("scontrol", "ping"), 20)

    @contextlib.contextmanager
    def hidden(self, name: str, folder: Path) -> Iterator[None]:
        """A node on which a folder is empty, for as long as this lasts."""
        self._restart_node(
            name, "unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder)
        )
        try:
            yield
        finally:
            self._restart_node(name)

    @contextlib.contextmanager
    def clock_ahead(self, name: str, seconds: int) -> Iterator[None]:
        """A node whose processes read a clock that is ahead, for as long as this lasts."""
        library = self.folder / "clock_ahead.so"
        source = Path(__file__).with_name("clock_ahead.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        prolog = self.folder / f"prolog.{name}"
        prolog.write_text(f"export CLOCK_AHEAD={seconds}\nexport LD_PRELOAD={library}\n")
        try:
            yield
        finally:
            prolog.unlink()

    def _restart_node(self, name: str, *under: str) -> None:
        pid = self.folder / f"slurmd.{name}.pid"
        os.kill(int(pid.read_text()), signal.SIGTERM)
        wait_for(lambda: not pid.exists(), 20)
        self.ask(*under, "slurmd", "-N", name)
        wait_for(lambda: self.ask("sinfo", "-h", "-N", "-n", name, "-p", "debug", "-o", "%t") == "idle\n", 20)

    def slurm(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return launch("slurm", *words, cwd=cwd, timeout=240, **self.environment)

    def submit(self, task: str, *words: str, cwd: Path, limit: str = "00:05:00") -> Job:
        flags = ["--task", f"{TASKS}:{task}", "--cpu", "--time", limit, "--name", "r", "--ledger", *words]
        done = self.slurm(*flags, "--submit", cwd=cwd)
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip(), cwd / "runs" / "r")


def _node_of(process: psutil.Process) -> str:
    """The node on which Slurm started a process; empty for others."""
    with contextlib.suppress(psutil.Error):
        return process.environ().get("SLURMD_NODENAME", "")
    return ""


def launchers(run: Path) -> dict[str, psutil.Process]:
    """The launcher of each node that trains a run."""
    found = psutil.process_iter(["cmdline"])
    pair = ("node", str(run))
    return {_node_of(p): p for p in found if pair in itertools.pairwise(p.info["cmdline"] or [])}


def ranks(run: Path) -> list[psutil.Process]:
    """The processes that train a run, without their launchers."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run) in words and "torch.distributed.run" not in words and "train.py" in " ".join(words):
            found.append(process)
    return found


def refuse_loss_or_repeat(run: Path, steps: int) -> None:
    """By the ledger: every step once and in order, every sample once an epoch."""
    kept = ledger(run)
    assert [r["step"] for r in kept] == list(range(1, steps + 1))
    assert len(losses(run)) == steps
    for first in range(0, steps - SAMPLES // BATCH + 1, SAMPLES // BATCH):
        epoch = [s for r in kept[first : first + SAMPLES // BATCH] for s in r["samples"]]
        assert sorted(epoch) == list(range(SAMPLES))


def refuse_wrong_end(job: Job, steps: int) -> None:
    assert summary(job.run)["status"] == "done"
    refuse_loss_or_repeat(job.run, steps)
    checked = launch("verify", str(job.run), cwd=job.run)
    assert checked.returncode == 0, checked.stderr + checked.stdout
    assert not ranks(job.run), "no process outlives its job"


def available() -> bool:
    return os.geteuid() == 0 and shutil.which("slurmctld") is not None


@contextlib.contextmanager
def up() -> Iterator[Cluster]:
    """Root, and Debian's packages slurm-wlm and munge, for as long as this lasts."""
    folder = Path(tempfile.mkdtemp(prefix="slurm"))  # short: a socket's path may have 107 characters
    subprocess.run([SCRIPT, "up", folder], check=True, timeout=60)
    try:
        yield Cluster(folder)
    finally:
        subprocess.run([SCRIPT, "down", folder], check=True, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
