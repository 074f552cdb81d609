"""Kubernetes as a cluster, and `pod`, which a pod runs: torchrun for its processes, and then the exit code
that the Job acts on.

torchrun itself ends with 0 where all processes were asked to save and stop: the Job would take the run for
done.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import BUG, DONE, FAILED, STOPPED, WRONG_INPUT, OutOfMemoryError, UserError
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.clusters.local.here import Local
from isobatch.launch.local.arguments import parse_request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from isobatch.engine.runs.run_folder import Verdict

LINGER_SECONDS = 10.0
"""How long torchrun may wait for those of other pods, where all processes of this one have saved: it would
wait for five minutes where another pod is evicted."""
INDEX = "JOB_COMPLETION_INDEX"
"""Environment variable with a pod's number, from 0; Kubernetes sets it."""
POLL_SECONDS = 0.5
FOR_GOOD = ("", OutOfMemoryError.cause)
"""Causes of a failure that another start would not mend."""


class Kubernetes(Local):
    """Kubernetes. An attempt is what a pod runs; the cluster makes the next one, and `kubectl` ends it."""

    config: str
    """The file with the recipe, in a pod."""
    world: Sequence[str]
    """torchrun's words for the pods of the run."""

    @staticmethod
    def submit(words: Sequence[str]) -> int:
        """Usage: k8s --task TASK --image IMAGE --claim CLAIM --nodes N --gpus-per-node G [flags] [--submit]

        flags: --cpu --cpus N --mem 64Gi --node-selector gpu=h100 --namespace NAME --secret NAME, and those of
               `auto`; --data is a path under /isobatch, where pods see the claim, or a name on the hub
        """
        from isobatch.launch.clusters.kubernetes.command import k8s

        return k8s(words)

    def attempt(self, run: RunFolder) -> Verdict | None:
        before = _verdict_time(run)
        with StopFlag() as stop:
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=static"),
                *(f"--node-rank={os.environ[INDEX]}", *self.world),
                *("-m", "isobatch.launch.train", "--config", self.config),
                *("--out", str(run.folder.parent), "--name", run.folder.name),
            ]
            _run_torchrun(command, stop, lambda: _verdict_time(run) != before)
        return run.read_exit() if _verdict_time(run) != before else None


def pod(words: Sequence[str]) -> int:
    """Usage: pod RUN CONFIG WORDS, in a pod of a job that `k8s` made; WORDS: those of torchrun"""
    if len(words) < 2 or INDEX not in os.environ:
        raise UserError("pod: runs in a pod of a Kubernetes job; `k8s` makes one")
    cluster, run = Kubernetes(), RunFolder(Path(words[0]))
    cluster.config, cluster.world = words[1], words[2:]
    parse_request(["--config", cluster.config], "pod")  # what is wrong is said before torch is imported
    return exit_code(run, cluster.attempt(run))


def _run_torchrun(command: list[str], stop: StopFlag, has_verdict: Callable[[], bool]) -> None:
    """Run torchrun to its end, pass a request to stop on to it, and end it where it only waits for others."""
    import psutil

    child = subprocess.Popen(command)
    idle_since: float | None = None
    while child.poll() is None:
        if stop.requested:
            child.send_signal(signal.SIGTERM)  # it hands that on, and waits until they have saved
            child.wait()
            return
        idle = has_verdict() and not psutil.Process(child.pid).children()
        idle_since = (idle_since or time.monotonic()) if idle else None
        if idle_since is not None and time.monotonic() - idle_since > LINGER_SECONDS:
            child.kill()  # it is blocked where it answers no other signal, and has no processes any more
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)


def exit_code(run: RunFolder, verdict: Verdict | None) -> int:
    """What the Job acts on: done; wrong input and failures that another start would not mend; asked to stop;
    else a failure after which the pod is replaced. `verdict`: of this attempt.
    """
    if run.status_or_none() == "done":
        return DONE
    if verdict is None:
        return BUG
    is_for_good = verdict.code in (WRONG_INPUT, FAILED) and verdict.cause in FOR_GOOD
    return verdict.code if is_for_good or verdict.code == STOPPED else BUG


def _verdict_time(run: RunFolder) -> int:
    """When exit.json was written; 0 where there is none."""
    path = run.folder / "exit.json"
    return path.stat().st_mtime_ns if path.exists() else 0
