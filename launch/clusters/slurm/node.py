"""`node RUN NONCE NODES PORT [ADDRESS]`: one per node of a step; it meets the others, runs torchrun for the
node's workers, and forwards a stop.

Nodes meet by a file in the run's folder, which also checks that all of them share it: the first binds a port,
keeps it, and writes its addresses there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from isobatch.core import atomic_files
from isobatch.core.errors import BUG, DONE, WRONG_INPUT, UserError
from isobatch.core.measures import wait_for
from isobatch.core.package import LAUNCHER_SCRIPT, TRAIN_SCRIPT
from isobatch.core.plan import Plan
from isobatch.core.terminal import print_lines
from isobatch.engine.distributed.stop_signals import StopFlag
from isobatch.engine.runs.run_folder import NONCE, RunFolder, Verdict
from isobatch.launch.clusters.slurm.step import ORPHANED
from isobatch.launch.local.accelerate_launcher import ignore_stop_signals, relay_output
from isobatch.launch.local.interfaces import gloo_interface, is_loopback, local_address, serve_store

MEETING = "meeting-"
"""Before the nonce of a step: the folder in which its nodes meet."""
REPEAT_SIGNAL_SECONDS = 2.0
"""Between two stop signals: one that comes while a worker still starts is ignored."""
JOIN_SECONDS = 120
SHUTDOWN_SECONDS = 20
"""How long torchrun waits for the other workers after one has died."""
ANSWER_SECONDS = 90.0
"""A shared file system may take a minute to show a new file to other nodes."""
REACH_SECONDS = 30.0
JOB_GONE_SECONDS = 4.0
"""So long nothing answers where the job runs, before it is taken for gone."""


def node(words: Sequence[str]) -> int:
    """Usage: node RUN NONCE NODES PORT [ADDRESS], in a step that `job` started."""
    name = os.environ.get("SLURMD_NODENAME", "")
    if len(words) < 4 or not name or "SLURM_STEP_ID" not in os.environ:
        raise UserError("node: runs in a step of a Slurm job, which `job` starts")
    run, os.environ[NONCE] = RunFolder(Path(words[0])), words[1]
    nodes = tuple(words[2].split(","))
    folder = run.folder / "slurm" / f"{MEETING}{words[1]}"
    meeting = Meeting(folder, nodes, nodes.index(name), int(words[3]), tuple(words[4:]))
    with StopFlag() as stop:
        try:
            code = _train(run, meeting, stop)
        except UserError as error:
            with contextlib.suppress(UserError, OSError):  # a node that does not see the folder cannot say so
                run.write_exit(Verdict(WRONG_INPUT, str(error)))
            raise
    if code == DONE or meeting.rank == 0 or meeting.job_is_there():
        return code
    with contextlib.suppress(OSError):  # srun, which reads what is printed, is gone as well
        print_lines(f"isobatch: {nodes[0]} is gone, and the job's script with it")
    return ORPHANED


@dataclass(frozen=True, slots=True)
class Meeting:
    """This node among the nodes of its step. The job names them: a container has none of Slurm's commands."""

    folder: Path
    nodes: tuple[str, ...]
    rank: int
    job_port: int = 0
    """Of the job's own process, on the first node."""
    addresses: tuple[str, ...] = ()
    """At which Slurm reaches the first node."""

    @property
    def name(self) -> str:
        return self.nodes[self.rank]

    def job_is_there(self) -> bool:
        """Whether the job's process is still on the first node. Nothing reads from its port."""
        hosts = [*self.addresses, self.nodes[0]]
        return wait_for(lambda: any(local_address(h, self.job_port) for h in hosts), JOB_GONE_SECONDS, 1.0)

    @contextlib.contextmanager
    def hold(self) -> Iterator[tuple[str, int]]:
        """(host, port) of a TCPStore that the first node keeps open inside the block.

        Raises UserError where a node does not see what the first one writes, or cannot reach the port.
        """
        store: Any = None
        if self.rank == 0:
            alone = len(self.nodes) == 1
            store = serve_store(alone)
            addresses = ["127.0.0.1"] if alone else [socket.gethostname(), *self.addresses]
            atomic_files.write_json(self.folder / "call.json", {"addresses": addresses, "port": store.port})
        if not wait_for((self.folder / "call.json").is_file, ANSWER_SECONDS):
            unseen = f"{self.name} does not see what {self.nodes[0]} wrote in {self.folder.parent.parent}"
            raise UserError(f"{unseen}: choose an --out on a file system that all nodes share")
        found = atomic_files.read_json(self.folder / "call.json")
        yield self._reachable_address(found["addresses"], found["port"])
        del store

    def _reachable_address(self, addresses: Sequence[str], port: int) -> tuple[str, int]:
        """(host, port) that can be reached from here, a loopback last: the host name may be one."""
        found: dict[str, str] = {}

        def find_reachable() -> bool:
            found.update({a: local for a in addresses if (local := local_address(a, port))})
            return bool(found)

        if not wait_for(find_reachable, REACH_SECONDS):
            where = ", ".join(f"{a}:{port}" for a in addresses)
            raise UserError(f"{self.name} cannot reach {self.nodes[0]} at {where}: is there a firewall?")
        return min(found, key=lambda address: is_loopback(found[address])), port


def _train(run: RunFolder, meeting: Meeting, stop: StopFlag) -> int:
    with (
        meeting.hold() as (host, port),
        (run.folder / "slurm" / f"node-{meeting.name}.log").open("ab", buffering=0) as log,
    ):
        command = _torchrun_command(run, meeting, f"{host}:{port}")
        environment = _environment(run.plan, local_address(host, port), len(meeting.nodes) == 1)
        return _run_torchrun(command, environment, log, stop)


def _torchrun_command(run: RunFolder, meeting: Meeting, endpoint: str) -> list[str]:
    """The torchrun command. accelerate would probe the port and find it in use, by our own store."""
    return [
        *(sys.executable, "-P", str(LAUNCHER_SCRIPT), "torch.distributed.run"),
        f"--nnodes={len(meeting.nodes)}",
        f"--node-rank={meeting.rank}",
        f"--nproc-per-node={run.plan.processes // len(meeting.nodes)}",
        "--rdzv-backend=static",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={os.environ[NONCE]}",
        f"--rdzv-conf=timeout={JOIN_SECONDS}",
        "--",  # else torchrun takes --run for an abbreviation of two of its own flags
        *(str(TRAIN_SCRIPT), "--run", str(run.folder)),
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
    import psutil

    child = subprocess.Popen(
        command, env=environment, stdout=log, stderr=subprocess.PIPE, preexec_fn=ignore_stop_signals
    )
    relay = threading.Thread(target=relay_output, args=(child, log), daemon=True)
    relay.start()
    while child.poll() is None:
        if stop.requested:
            with contextlib.suppress(psutil.NoSuchProcess):  # those behind it are told the next time
                for worker in psutil.Process(child.pid).children():
                    worker.send_signal(signal.SIGUSR1)
            time.sleep(REPEAT_SIGNAL_SECONDS)
        time.sleep(0.1)
    relay.join(timeout=5)
    return DONE if child.returncode == 0 else BUG
