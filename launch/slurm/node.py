"""`node RUN NONCE`: one per node of a step; starts that node's workers and passes a stop on to them."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from isobatch.core.errors import BUG, DONE, WRONG_INPUT, UserError
from isobatch.core.package import TRAIN_SCRIPT
from isobatch.core.plan import Plan
from isobatch.engine.distributed.stop_signals import STOP_SIGNALS, StopFlag
from isobatch.engine.runs.run_folder import NONCE, RunFolder, Verdict
from isobatch.launch.local.accelerate_launcher import relay_output
from isobatch.launch.slurm.rendezvous import NodePlace, is_loopback, own_address, rendezvous

REPEAT_SIGNAL_SECONDS = 2.0
"""Between two words to stop: one that comes while a worker still starts is not heard."""
JOIN_SECONDS = 120
CLOSE_SECONDS = 20
"""How long torchrun waits for the workers beside one that died."""


def node(words: Sequence[str]) -> int:
    """Usage: node RUN NONCE, in a step that `job` started."""
    if len(words) != 2:
        raise UserError("node: is started by `job`, inside Slurm")
    run, nonce = RunFolder(Path(words[0])), words[1]
    os.environ[NONCE] = nonce
    place = NodePlace.of(os.environ)
    with StopFlag() as stop:
        try:
            data = Path(run.facts.folder) if place.rank == 0 or run.folder.is_dir() else Path()
            with rendezvous(place, run.folder, nonce, data) as (host, port):
                own = own_address(host, port)
                command = _torchrun(run.plan, place, host, port, own, nonce, run.folder)
                return _train(command, _environment(run.plan, own), stop)
        except UserError as error:
            with contextlib.suppress(UserError, OSError):  # a node that does not see the folder cannot say so
                run.write_exit(Verdict(WRONG_INPUT, str(error)))
            raise


def _torchrun(
    plan: Plan, place: NodePlace, host: str, port: int, own: str, nonce: str, folder: Path
) -> list[str]:
    """torchrun itself: accelerate would probe the port, and take ours for someone else's."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(place.nodes)}",
        f"--nproc-per-node={plan.processes // len(place.nodes)}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{port}",
        f"--rdzv-id={nonce}",
        f"--rdzv-conf=is_host=0,join_timeout={JOIN_SECONDS}",
        *([] if is_loopback(own) else [f"--local-addr={own}"]),
        "--",  # or --run would be short for two of torchrun's own
        str(TRAIN_SCRIPT),
        "--run",
        str(folder),
    ]


def _environment(plan: Plan, own: str) -> dict[str, str]:
    # Gloo would listen at the address of the host's own name, which may be a loopback.
    interface = {} if is_loopback(own) else {"GLOO_SOCKET_IFNAME": _interface(own)}
    return {
        **interface,
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, plan.threads)),
        "PET_SHUTDOWN_TIMEOUT": str(CLOSE_SECONDS),
        # Slurm signals every process of a step. torchrun, told to handle these, would end its workers.
        "PET_SIGNALS_TO_HANDLE": "SIGHUP",
    }


def _interface(address: str) -> str:
    """The name of the network interface that has an address."""
    import psutil

    found = psutil.net_if_addrs().items()
    return next(name for name, held in found if any(a.address == address for a in held))


def _train(command: list[str], environment: dict[str, str], stop: StopFlag) -> int:
    child = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, preexec_fn=_ignore)
    log = io.FileIO(2, "wb", closefd=False)  # a node that is killed has said what it had to say
    copying = threading.Thread(target=relay_output, args=(child, log), daemon=True)
    copying.start()
    while child.poll() is None:
        if stop.requested:
            _tell(child.pid)
            time.sleep(REPEAT_SIGNAL_SECONDS)
        time.sleep(0.1)
    copying.join(timeout=5)
    return DONE if child.returncode == 0 else BUG


def _ignore() -> None:
    """In torchrun, and in its workers until they listen: a signal then is not the end of them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _tell(pid: int) -> None:
    """Ask the workers to stop; to be asked twice is nothing to them."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for worker in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGUSR1)
