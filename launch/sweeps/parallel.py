"""`--parallel N`: runs of a sweep at once, each in a process of its own on its share of the machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.core.flags import flags_of, value_text
from isobatch.core.package import own_command
from isobatch.core.plan import PlanOptions
from isobatch.core.terminal.status import doing
from isobatch.engine import consent
from isobatch.engine.machine.detect import detect

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.runs.run_folder import RunFolder

LOOK_SECONDS = 0.2
HOST_MEMORY_PERCENT = 80
OUTPUT = "output.txt"
"""What the process of a run printed, in the run's folder."""
Share = tuple[list[int], list[int]]
"""Numbers of GPUs and of cores."""


def shares_of_machine(parallel: int) -> list[Share]:
    """The GPUs and cores of each of so many runs. Raises UserError where there are fewer."""
    gpus = list(range(len(detect().gpus)))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    there, what = (len(gpus), "GPUs") if gpus else (len(cores), "cores")
    if parallel > there:
        raise UserError(f"--parallel {parallel}: this machine has {there} {what}: give at most {there}")
    return [(gpus[slot::parallel], cores[slot::parallel]) for slot in range(parallel)]


def train_in_parallel(runs: Sequence[RunFolder], plan: PlanOptions, shares: Sequence[Share]) -> list[int]:
    """Train runs that are made, so many at once as there are shares; their exit codes.

    At a signal waits until they have saved, and raises it again; Ctrl-C reaches all processes by itself.
    """
    words = _plan_words(plan)
    if not shares[0][0] and "--memory-limit" not in words:  # host memory is one for all
        words += ["--memory-limit", f"{HOST_MEMORY_PERCENT // len(shares)}%"]
    codes: list[int | None] = [None] * len(runs)
    waiting, free = list(range(len(runs))), list(range(len(shares)))
    active: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
    try:
        while waiting or active:
            while waiting and free:
                number, slot = waiting.pop(0), free.pop(0)
                active[number] = slot, _start(runs[number], words, shares[slot])
            for number, (slot, process) in list(active.items()):
                if (code := process.poll()) is not None:
                    codes[number] = code
                    del active[number]
                    free.append(slot)
            doing(f"training, {len(active)} at once", sum(code is not None for code in codes), len(runs))
            time.sleep(LOOK_SECONDS)
    except BaseException as error:
        for _, process in active.values():
            if not isinstance(error, KeyboardInterrupt):
                process.terminate()
        for _, process in active.values():
            process.wait()
        raise
    return [code or 0 for code in codes]


def _plan_words(plan: PlanOptions) -> list[str]:
    """The plan's flags that were given, as words."""
    given = ((flag, getattr(plan, name)) for name, flag in flags_of(PlanOptions, "plan").items())
    return [word for flag, v in given if v != flag.default for word in (flag.spelling, value_text(v))]


def _start(run: RunFolder, words: Sequence[str], share: Share) -> subprocess.Popen[bytes]:
    gpus, cores = share
    environment = {**os.environ, **consent.environment()}
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(gpu) for gpu in range(max(gpus) + 1)]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in gpus)
    with (run.folder / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            own_command("resume", str(run.folder.resolve()), *words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=partial(_keep_to, cores),
        )


def _keep_to(cores: Sequence[int]) -> None:
    """In the child: run on these cores alone, so that it plans for them."""
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)
