"""What each Ray worker does: it starts our processes, and ends when they have ended.

They are processes of their own, as under every launcher: signals reach only the main thread of a process, and
training does not run in that of a Ray worker; and what ends a process must not end Ray's. The group that
Ray's workers form only tells them where our processes meet: two groups in one store take each other's keys.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchConfig

from isobatch.core.errors import BUG
from isobatch.core.measures import wait_for
from isobatch.core.package import TRAIN_SCRIPT
from isobatch.engine.machine.detect import GRANTED_CPUS
from isobatch.engine.runs.run_folder import NONCE, RunFolder, Verdict
from isobatch.launch.local.accelerate_launcher import die_with_parent, ignore_stop_signals, relay_output
from isobatch.launch.local.interfaces import gloo_interface, local_address, loopback_interfaces, serve_store

POLL_SECONDS = 0.5
REPEAT_SIGNAL_SECONDS = 2.0
"""Between two stop signals: one that comes while a process still starts is ignored."""
SHUTDOWN_SECONDS = 20.0
"""How long the others of a worker may live after one has failed: their peer monitor ends them earlier."""
VERDICT_SECONDS = 5.0
"""How long rank 0 may take to say why another process has failed."""
RELAY = "relay"
OF_RAYS_GROUP = ("ACCELERATE_TORCH_DEVICE", "OMP_NUM_THREADS")
"""Variables that Ray sets for code in its workers."""


@dataclass
class HostGroup(TorchConfig):
    """Ray's workers meet on their hosts: a GPU belongs to the process that trains on it."""

    backend: str | None = "gloo"

    @property
    def train_func_context(self) -> Any:
        return contextlib.nullcontext


def work(order: dict[str, Any]) -> None:
    """Train in this worker's processes until they end. Raises RuntimeError where one has failed.

    `order`: what the driver says of this attempt.
    """
    run = RunFolder(Path(order["run"]))
    if not run.folder.is_dir():
        raise RuntimeError(f"{socket.gethostname()} does not see {run.folder}: all nodes have to")
    os.environ[NONCE] = order["nonce"]
    rank = ray.train.get_context().get_world_rank()
    with _meeting() as meeting, (run.folder / "ray" / f"worker-{rank}.log").open("ab", buffering=0) as log:
        children = [_start(order, index, meeting, log) for index in range(order["processes"])]
        codes = _wait(children, (run.folder / "ray" / f"stop-{order['nonce']}").exists)
    _report(run, rank * order["processes"], codes)


@contextlib.contextmanager
def _meeting() -> Iterator[dict[str, str]]:
    """Variables that name the store in which all processes meet; the first worker serves it in the block."""
    from torch import distributed

    context = ray.train.get_context()
    alone = context.get_local_world_size() == context.get_world_size()
    store = serve_store(alone) if context.get_world_rank() == 0 else None
    box: list[int] = [store.port if store else 0]
    distributed.broadcast_object_list(box, src=0)
    host, port = "127.0.0.1" if alone else os.environ["MASTER_ADDR"], box[0]
    interfaces = loopback_interfaces() if alone else gloo_interface(local_address(host, port), alone)
    store_at = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    yield interfaces | store_at
    del store


def _start(order: dict[str, Any], index: int, meeting: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
    """Start one process; its marked lines go to Ray's log of this worker, others to `log`."""
    context, each = ray.train.get_context(), order["processes"]
    world = {  # of this worker's `index`th process, in the words of torchrun
        "RANK": context.get_world_rank() * each + index,
        "WORLD_SIZE": context.get_world_size() * each,
        "LOCAL_RANK": context.get_local_rank() * each + index,
        "LOCAL_WORLD_SIZE": context.get_local_world_size() * each,
        **({GRANTED_CPUS: order["cpus"] * context.get_local_world_size()} if order["cpus"] else {}),
    }
    inherited = {name: value for name, value in os.environ.items() if name not in OF_RAYS_GROUP}
    plan = ("--plan", order["plan"]) if order["plan"] else ()
    child = subprocess.Popen(
        [sys.executable, "-P", str(TRAIN_SCRIPT), "--run", order["run"], *plan],
        env={**inherited, **order["environment"], **{k: str(v) for k, v in world.items()}, **meeting},
        cwd=order["folder"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.PIPE,
        preexec_fn=_prepare_child,
    )
    threading.Thread(target=relay_output, args=(child, log), name=RELAY, daemon=True).start()
    return child


def _prepare_child() -> None:
    """In the child: end with this worker, and ignore stop signals until it handles them.

    By SIGKILL: until a world is formed, a process is blocked where it answers no other signal.
    """
    die_with_parent(signal.SIGKILL)
    ignore_stop_signals()


def _wait(children: Sequence[subprocess.Popen[bytes]], asked_to_stop: Callable[[], bool]) -> list[int]:
    """Wait for a worker's processes and pass a request to stop on to them; their exit codes."""
    failed, signalled = math.inf, -math.inf
    while running := [child for child in children if child.poll() is None]:
        now, number = time.monotonic(), None
        if any(child.returncode for child in children):
            failed = min(failed, now)
        if now - failed > SHUTDOWN_SECONDS:
            number = signal.SIGKILL
        elif now - signalled > REPEAT_SIGNAL_SECONDS and asked_to_stop():
            signalled, number = now, signal.SIGUSR1
        if number is not None:
            for child in running:
                child.send_signal(number)
        time.sleep(POLL_SECONDS)
    for relay in (thread for thread in threading.enumerate() if thread.name == RELAY):
        relay.join(timeout=5)  # their last words
    return [child.returncode for child in children]


def _report(run: RunFolder, first: int, codes: list[int]) -> None:
    """Raise RuntimeError where a process has failed, and leave a verdict where none of them could.

    `first`: the rank of this worker's first process.
    """
    failed = {first + index: code for index, code in enumerate(codes) if code}
    if not failed:
        return
    rank, code = next(iter(failed.items()))
    if code < 0:
        raise RuntimeError(f"rank {rank} was ended by signal {-code}")
    wait_for(run.has_verdict, VERDICT_SECONDS)
    run.write_exit(Verdict(BUG, f"rank {rank} ended with exit code {code}"))
    raise RuntimeError(f"rank {rank} ended with exit code {code}")
