"""`node RUN NONCE`: one per node of a step; runs torchrun for the node's workers, forwards a stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from isobatch.core.errors import BUG, DONE, WRONG_INPUT, UserError
from isobatch.core.package import TORCHRUN_SCRIPT, TRAIN_SCRIPT
from isobatch.engine.distributed.stop_signals import STOP_SIGNALS, StopFlag
from isobatch.engine.runs.run_folder import NONCE, RunFolder, Verdict
from isobatch.launch.clusters.slurm.rendezvous import StepNode, job_is_there, rendezvous
from isobatch.launch.clusters.slurm.step import ORPHANED
from isobatch.launch.local.accelerate_launcher import relay_output
from isobatch.launch.local.interfaces import gloo_interface, local_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.core.plan import Plan

REPEAT_SIGNAL_SECONDS = 2.0
"""Between two stop signals: one that comes while a worker still starts is ignored."""
JOIN_SECONDS = 120
SHUTDOWN_SECONDS = 20
"""How long torchrun waits for the other workers after one has died."""


def node(words: Sequence[str]) -> int:
    """Usage: node RUN NONCE, in a step that `job` started."""
    if len(words) != 2:
        raise UserError("node: is started by `job`, inside Slurm")
    run, nonce = RunFolder(Path(words[0])), words[1]
    os.environ[NONCE] = nonce
    with StopFlag() as stop:
        try:
            this_node = StepNode.find(os.environ, run.folder, nonce)
            code = _train(run, nonce, this_node, stop)
        except UserError as error:
            with contextlib.suppress(UserError, OSError):  # a node that does not see the folder cannot say so
                run.write_exit(Verdict(WRONG_INPUT, str(error)))
            raise
    if code == DONE or this_node.rank == 0 or job_is_there(this_node):
        return code
    with contextlib.suppress(OSError):  # srun, which reads what is printed, is gone as well
        print(f"isobatch: {this_node.nodes[0]} is gone, and the job's script with it", file=sys.stderr)
    return ORPHANED


def _train(run: RunFolder, nonce: str, this_node: StepNode, stop: StopFlag) -> int:
    data = Path(run.facts.folder) if this_node.rank == 0 or run.folder.is_dir() else Path()
    with (
        rendezvous(this_node, run.folder, nonce, data) as (host, port),
        (run.folder / "slurm" / f"node-{this_node.name}.log").open("ab", buffering=0) as log,
    ):
        command = _torchrun_command(run.plan, this_node, host, port, nonce, run.folder)
        environment = _environment(run.plan, local_address(host, port), len(this_node.nodes) == 1)
        return _run_torchrun(command, environment, log, stop)


def _torchrun_command(
    plan: Plan, this_node: StepNode, host: str, port: int, nonce: str, folder: Path
) -> list[str]:
    """The torchrun command. accelerate would probe the port and find it in use, by our own rendezvous."""
    return [
        *(sys.executable, "-P", str(TORCHRUN_SCRIPT)),
        f"--nnodes={len(this_node.nodes)}",
        f"--node-rank={this_node.rank}",
        f"--nproc-per-node={plan.processes // len(this_node.nodes)}",
        "--rdzv-backend=static",
        f"--rdzv-endpoint={host}:{port}",
        f"--rdzv-id={nonce}",
        f"--rdzv-conf=timeout={JOIN_SECONDS}",
        "--",  # else torchrun takes --run for an abbreviation of two of its own flags
        str(TRAIN_SCRIPT),
        "--run",
        str(folder),
    ]


def _environment(plan: Plan, local: str, alone: bool) -> dict[str, str]:
    return {
        **gloo_interface(local, alone),
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, plan.threads)),
        "PET_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS),
        # Slurm signals every process of a step; at any of these torchrun would end its workers.
        "PET_SIGNALS_TO_HANDLE": "SIGHUP",
    }


def _run_torchrun(command: list[str], environment: dict[str, str], log: IO[bytes], stop: StopFlag) -> int:
    """Run torchrun for this node's workers: its marked lines go to the job's output, others to `log`."""
    child = subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.PIPE, preexec_fn=_ignore_stop_signals
    )
    relay = threading.Thread(target=relay_output, args=(child, log), daemon=True)
    relay.start()
    while child.poll() is None:
        if stop.requested:
            _signal_workers(child.pid)
            time.sleep(REPEAT_SIGNAL_SECONDS)
        time.sleep(0.1)
    relay.join(timeout=5)
    return DONE if child.returncode == 0 else BUG


def _ignore_stop_signals() -> None:
    """In the child: torchrun, and its workers until they install handlers, ignore stop signals."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _signal_workers(pid: int) -> None:
    """Send SIGUSR1 to the workers; a repeated one has no effect."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        for worker in psutil.Process(pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGUSR1)
