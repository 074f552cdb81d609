"""Starts the worker processes under accelerate launch, forwards signals to them and relays their output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from isobatch.core import atomic_files, terminal
from isobatch.core.package import LAUNCHER_SCRIPT, ROOT
from isobatch.core.plan import Plan
from isobatch.engine import consent
from isobatch.engine.distributed.stop_signals import STOP_SIGNALS, signals_to_catch
from isobatch.launch.local.interfaces import loopback_interfaces

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 120
"""How long workers may take to save after a signal before they are killed."""


def launch_workers(
    plan: Plan, words: Sequence[str], folder: Path, own: Mapping[str, str] = {}, forward_signals: bool = True
) -> tuple[int, bool]:
    """Run a script and its arguments in the plan's processes; writes launcher.log to `folder`.

    Returns (the launcher's exit code, whether a signal that asks for a stop was forwarded to it).

    `own`: variables of the processes.
    With `forward_signals` the first stop signal of each kind goes to the workers, and a second SIGINT ends
    them. Without, handlers stay as they are, and a KeyboardInterrupt asks the workers to save and stop.
    """
    config = ROOT / "configs" / "accelerate" / ("cpu.yaml" if plan.device == "cpu" else "multi_gpu.yaml")
    launcher = [sys.executable, "-P", str(LAUNCHER_SCRIPT), "accelerate.commands.launch"]
    launcher += ["--config_file", str(config), f"--num_processes={plan.processes}"]
    environment = {
        **os.environ,
        # Without these accelerate launch dies on SIGUSR1 and kills its workers 30 s after a signal.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS),
        # torchrun binds a free port itself; a port that was probed and released may be taken meanwhile.
        "PET_STANDALONE": "1",
        # All processes are on this machine: nothing of theirs is offered to another.
        "PET_LOCAL_ADDR": "127.0.0.1",
        **loopback_interfaces(),
        "OMP_NUM_THREADS": str(max(1, plan.threads)),
        **consent.environment(),
        **own,
        **({terminal.RELAY_VARIABLE: "1"} if terminal.on_terminal() else {}),
    }
    terminal.doing(f"starting {plan.processes} processes")
    forwarded: set[int] = set()

    def forward(number: int, _: FrameType | None) -> None:
        if number in forwarded and number == signal.SIGINT:
            _kill_all(child.pid)
        elif number not in forwarded:
            forwarded.add(number)
            child.send_signal(number)

    log_path = folder / "launcher.log"
    with atomic_files.explain_write_errors(log_path), log_path.open("ab", buffering=0) as log:
        child = subprocess.Popen(
            [*launcher, *words],
            env=environment,
            start_new_session=True,
            stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        caught = signals_to_catch() if forward_signals else []
        before = {number: signal.signal(number, forward) for number in caught}
        try:
            relay_output(child, log)
            return child.wait(), bool(forwarded)
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            relay_output(child, log)
            child.wait()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _kill_all(number: int) -> None:
    """Kill the launcher and its workers, which are in sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process(number)
        for process in (*launcher.children(recursive=True), launcher):
            process.kill()


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """In the child, on Linux: get a signal, to save and stop, where the parent process is killed."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def ignore_stop_signals() -> None:
    """In the child: a launcher, and its workers until they install handlers, ignore stop signals."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def relay_output(child: subprocess.Popen[bytes], log: Any) -> None:
    """Print the run's own lines, which have a mark; write all others, with any traceback, to `log`."""
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith(terminal.LINE_MARK.encode()):
            if not terminal.on_terminal():  # the workers say themselves what takes long
                terminal.doing()
            with contextlib.suppress(OSError):  # the terminal may be closed; training goes on
                said = line[len(terminal.LINE_MARK.encode()) :].decode(errors="replace")
                sys.stderr.write(terminal.on_screen(said, sys.stderr))
                sys.stderr.flush()
        elif line.startswith(terminal.STATUS_MARK.encode()):
            terminal.show_status_of_child(line.decode(errors="replace"))
        else:
            with contextlib.suppress(OSError):  # a full disk must not end the run because of its log
                log.write(line)
