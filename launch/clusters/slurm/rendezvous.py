"""The rendezvous of a step's nodes, by files in the run's folder: this also checks that all nodes share it.

The first node binds a port, keeps it, and writes its addresses; every node answers with a file of its own.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.launch.clusters.slurm import client
from isobatch.launch.local.interfaces import is_loopback, local_address, serve_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

ANSWER_SECONDS = 90.0
"""How long the first node waits: a shared file system may take a minute to show a new file to other nodes."""
JOIN_EXTRA_SECONDS = 30.0
"""The other nodes wait longer, so that the first node reports which are missing."""
REACH_SECONDS = 30.0
JOB_GONE_SECONDS = 4.0
"""So long nothing answers where the job runs, before it is taken for gone."""
STEP_FILE = "step.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepNode:
    """This node among the nodes of its step. The job names them in the folder of the rendezvous: Slurm's own
    commands are missing in a container.
    """

    rank: int
    nodes: tuple[str, ...]
    addresses: tuple[str, ...] = ()
    """At which Slurm reaches the first node."""
    job_port: int = 0
    """Of the job's own process, on the first node."""

    @classmethod
    def find(cls, environment: Mapping[str, str], run_folder: Path, nonce: str) -> StepNode:
        """This process's node. Raises UserError outside a step, and where the run's folder is not shared."""
        name = environment.get("SLURMD_NODENAME", "")
        if "SLURM_STEP_ID" not in environment or not name:
            raise UserError("node: runs in a step of a Slurm job, which `job` starts")
        path = rendezvous_folder(run_folder, nonce) / STEP_FILE
        if not wait_for(path.is_file, ANSWER_SECONDS + JOIN_EXTRA_SECONDS):
            raise UserError(
                f"{name} does not see in {run_folder / 'slurm'} what the job wrote there: choose an --out on"
                " a file system that all nodes share"
            )
        step = atomic_files.read_json(path)
        nodes = tuple(step["nodes"])
        return cls(
            rank=nodes.index(name),
            nodes=nodes,
            addresses=tuple(step["addresses"]),
            job_port=int(step["job_port"]),
        )

    @property
    def name(self) -> str:
        return self.nodes[self.rank]


def announce(folder: Path, nodes: Sequence[str], job_port: int) -> None:
    """The job's part, before the step begins: name its nodes, and a port that it keeps open on the first."""
    address = client.address_of(nodes[0]) if len(nodes) > 1 else ""
    step = {"nodes": list(nodes), "addresses": [address] if address else [], "job_port": job_port}
    atomic_files.write_json(folder / STEP_FILE, step)


def job_is_there(node: StepNode) -> bool:
    """Whether the job's process is still on the first node. Nothing reads from its port."""
    hosts = [*node.addresses, node.nodes[0]]
    return wait_for(lambda: any(local_address(h, node.job_port) for h in hosts), JOB_GONE_SECONDS, pause=1.0)


def rendezvous_folder(run_folder: Path, nonce: str) -> Path:
    """Of one attempt: no file of an earlier one can be taken for its own."""
    return run_folder / "slurm" / f"meeting-{nonce}"


@contextlib.contextmanager
def rendezvous(node: StepNode, run_folder: Path, nonce: str, data: Path) -> Iterator[tuple[str, int]]:
    """(host, port) of a TCPStore that the first node keeps open inside the block.

    `data`: the folder of prepared data. Raises UserError where a node does not see the run's folder or the
    data, or cannot reach the port.
    """
    folder = rendezvous_folder(run_folder, nonce)
    if node.rank:
        yield join(node, folder, data)
        return
    alone = len(node.nodes) == 1
    addresses = ["127.0.0.1"] if alone else [socket.gethostname(), *node.addresses]
    store = serve_store(alone)
    _write_json(folder / "call.json", {"addresses": [a for a in addresses if a], "port": store.port})
    _write_answer(node, folder, data)
    wait_for_answers(node, folder, data)
    yield _reachable_address(node, addresses, store.port)
    del store


def _write_json(path: Path, value: dict[str, Any]) -> None:
    try:
        atomic_files.write_json(path, value)
    except (UserError, OSError) as error:
        raise UserError(f"{path.parent} cannot be written: {error}") from None


def _write_answer(node: StepNode, folder: Path, data: Path) -> None:
    sees_data = (data / "facts.json").is_file()
    _write_json(folder / f"{node.rank}.json", {"node": node.name, "sees_data": sees_data})


def wait_for_answers(node: StepNode, folder: Path, data: Path) -> None:
    """On the first node: wait until every node has answered. Raises UserError for those that have not."""
    wait_for(lambda: len(_answers(node, folder)) == len(node.nodes), ANSWER_SECONDS)
    answers = _answers(node, folder)
    if missing := [name for rank, name in enumerate(node.nodes) if rank not in answers]:
        raise UserError(
            f"{', '.join(missing)} did not see in {ANSWER_SECONDS:.0f} s what {node.name} wrote to"
            f" {folder.parent.parent}: choose an --out on a file system that all nodes share"
        )
    if unseen := [answer["node"] for answer in answers.values() if not answer["sees_data"]]:
        raise UserError(
            f"{', '.join(unseen)} cannot see the prepared data in {data}: point ISOBATCH_CACHE to a folder"
            " that all nodes share, and submit again"
        )


def _answers(node: StepNode, folder: Path) -> dict[int, dict[str, Any]]:
    found = {rank: folder / f"{rank}.json" for rank in range(len(node.nodes))}
    return {rank: atomic_files.read_json(path) for rank, path in found.items() if path.is_file()}


def join(node: StepNode, folder: Path, data: Path) -> tuple[str, int]:
    """On the other nodes: answer the first; (host, port). Raises UserError where its file does not appear."""
    path = folder / "call.json"
    if not wait_for(path.is_file, ANSWER_SECONDS + JOIN_EXTRA_SECONDS):
        raise UserError(
            f"{node.name} does not see in {folder.parent.parent} what {node.nodes[0]} wrote there: choose"
            " an --out on a file system that all nodes share"
        )
    _write_answer(node, folder, data)
    call = atomic_files.read_json(path)
    return _reachable_address(node, call["addresses"], int(call["port"]))


def _reachable_address(node: StepNode, addresses: list[str], port: int) -> tuple[str, int]:
    """(host, port) that can be reached from here, a loopback last: on some systems the host name is one."""
    found: dict[str, str] = {}

    def find_reachable() -> bool:
        found.update({a: local for a in addresses if (local := local_address(a, port))})
        return bool(found)

    if not wait_for(find_reachable, REACH_SECONDS):
        where = ", ".join(f"{a}:{port}" for a in addresses)
        raise UserError(f"{node.name} cannot reach {node.nodes[0]} at {where}: is there a firewall?")
    return min(found, key=lambda address: is_loopback(found[address])), port


def wait_for(done: Callable[[], bool], seconds: float, pause: float = 0.1) -> bool:
    """Poll `done` until it is true or the time is over, in seconds; whether it became true."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
