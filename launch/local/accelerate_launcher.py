"""Worker processes under accelerate: started, signalled, listened to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.package import ROOT
from isobatch.core.plan import Plan
from isobatch.engine.runs.console import LINE_MARK

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 120
"""How long children may take to save after a signal before they are killed."""


def launch_workers(
    plan: Plan,
    script: Path,
    arguments: list[str],
    folder: Path,
    extra: Mapping[str, str] | None = None,
    forward_signals: bool = True,
) -> LauncherExit:
    """Run `script` in the plan's world under accelerate; config and launcher.log go to `folder`.

    With `forward_signals` this process's SIGTERM, SIGINT and SIGUSR1 go to the workers. Without, its handlers
    stay as they are, and a KeyboardInterrupt asks the workers to save and stop.
    """
    config = write_config(folder, plan)
    launcher = [sys.executable, "-P", "-m", "accelerate.commands.launch"]
    command = [*launcher, "--config_file", str(config), str(script)]
    environment = {
        **os.environ,
        # Without these accelerate launch dies on SIGUSR1 and kills its workers 30 s after a signal.
        "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
        "PET_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS),
        # torchrun binds a free port itself; a port that was probed and released may be taken meanwhile.
        "PET_STANDALONE": "1",
        "OMP_NUM_THREADS": str(max(1, plan.threads)),
        **(extra or {}),
    }
    return _wait([*command, *arguments], environment, folder, forward_signals)


@dataclass(frozen=True, slots=True)
class LauncherExit:
    """How a launcher ended."""

    code: int
    stop_requested: bool
    """Whether a signal that asks for a stop was passed on to it."""


def _wait(
    command: list[str], environment: dict[str, str], folder: Path, forward_signals: bool
) -> LauncherExit:
    """Run the launcher in a session of its own; pass every first signal on; keep its noise in a log."""
    log = folder / "launcher.log"
    with atomic_files.explain_write_errors(log), log.open("ab", buffering=0) as noise:
        child = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stderr=subprocess.PIPE,
            preexec_fn=_die_with_parent,
        )
        seen: set[int] = set()

        def forward(number: int, frame: FrameType | None) -> None:
            if number in seen and number == signal.SIGINT:
                _kill_all(child.pid)
            elif number not in seen:
                seen.add(number)
                child.send_signal(number)

        caught = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1) if forward_signals else ()
        before = {n: signal.signal(n, forward) for n in caught}
        try:
            relay_output(child, noise)
            return LauncherExit(child.wait(), bool(seen))
        except KeyboardInterrupt:
            child.send_signal(signal.SIGINT)
            relay_output(child, noise)
            child.wait()
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _kill_all(number: int) -> None:
    """The launcher and its workers, which lead sessions of their own."""
    import psutil

    with contextlib.suppress(psutil.Error):
        launcher = psutil.Process(number)
        for process in (*launcher.children(recursive=True), launcher):
            process.kill()


def _die_with_parent() -> None:
    """In the child, on Linux: be told to stop (and save) should the command that waits for us be killed."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def relay_output(child: subprocess.Popen[bytes], noise: Any) -> None:
    """Show what the run says; keep the launcher's own chatter, and any traceback, in launcher.log."""
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith(LINE_MARK.encode()):
            sys.stderr.write(line[len(LINE_MARK.encode()) :].decode(errors="replace"))
            sys.stderr.flush()
        else:
            with contextlib.suppress(OSError):  # a full disk must not end what it only describes
                noise.write(line)


def write_config(folder: Path, plan: Plan) -> Path:
    """The accelerate config of this plan, rendered from configs/accelerate."""
    import yaml

    template = ROOT / "configs" / "accelerate" / ("cpu.yaml" if plan.device == "cpu" else "multi_gpu.yaml")
    config = yaml.safe_load(template.read_text())
    config.update(num_processes=plan.processes, num_machines=plan.nodes)
    path = folder / "accelerate.yaml"
    atomic_files.write_text(path, yaml.safe_dump(config))
    return path
