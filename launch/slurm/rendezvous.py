"""How the nodes of a step find each other: in the run's folder, which proves that all of them see it.

The first node binds a port, keeps it, and writes where it is; every node answers with a file of its own.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.launch.slurm import client

ANSWER_SECONDS = 90.0
"""A shared file system may take a minute to show one node what another wrote."""
JOIN_EXTRA_SECONDS = 30.0
"""The others wait longer than the first node, which names those that are missing."""
REACH_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """This node among those of its step. The job may have more: its own variables would mislead."""

    rank: int
    nodes: tuple[str, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> NodePlace:
        if "SLURM_STEP_NODELIST" not in environment:
            raise UserError("node: runs in a step of a Slurm job, which `job` starts")
        nodes = client.hostnames(environment["SLURM_STEP_NODELIST"])
        return cls(rank=int(environment["SLURM_NODEID"]), nodes=nodes)

    @property
    def name(self) -> str:
        return self.nodes[self.rank]


def rendezvous_folder(folder: Path, nonce: str) -> Path:
    """Of one attempt: no file of an earlier one can be taken for its own."""
    return folder / "slurm" / f"meeting-{nonce}"


@contextlib.contextmanager
def rendezvous(place: NodePlace, folder: Path, nonce: str, data: Path) -> Iterator[tuple[str, int]]:
    """(host, port) of the rendezvous, which the first node holds as long as the block lasts."""
    meeting = rendezvous_folder(folder, nonce)
    if place.rank:
        yield _join(place, meeting, data)
        return
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    addresses = [socket.gethostname(), client.address_of(place.name)]
    _write(meeting / "call.json", {"addresses": [a for a in addresses if a], "port": store.port})
    _answer_call(place, meeting, data)
    _wait_for_answers(place, meeting, data)
    yield _reachable(place, addresses, store.port)
    del store


def _write(path: Path, value: dict[str, Any]) -> None:
    try:
        atomic_files.write_json(path, value)
    except (UserError, OSError) as error:
        raise UserError(f"{path.parent} cannot be written: {error}") from None


def _answer_call(place: NodePlace, meeting: Path, data: Path) -> None:
    seen = (data / "facts.json").is_file()
    _write(meeting / f"{place.rank}.json", {"node": place.name, "sees_data": seen})


def _wait_for_answers(place: NodePlace, meeting: Path, data: Path) -> None:
    """The first node waits for an answer of every other."""
    wait_for(lambda: len(_answers(place, meeting)) == len(place.nodes), ANSWER_SECONDS)
    answers = _answers(place, meeting)
    if missing := [name for rank, name in enumerate(place.nodes) if rank not in answers]:
        raise UserError(
            f"{', '.join(missing)} did not see in {ANSWER_SECONDS:.0f} s what {place.name} wrote to"
            f" {meeting.parent.parent}: choose an --out on a file system that all nodes share"
        )
    if blind := [answer["node"] for answer in answers.values() if not answer["sees_data"]]:
        raise UserError(
            f"{', '.join(blind)} cannot see the prepared data in {data}: point ISOBATCH_CACHE to a folder"
            " that all nodes share, and submit again"
        )


def _answers(place: NodePlace, meeting: Path) -> dict[int, dict[str, Any]]:
    found = {rank: meeting / f"{rank}.json" for rank in range(len(place.nodes))}
    return {rank: atomic_files.read_json(path) for rank, path in found.items() if path.is_file()}


def _join(place: NodePlace, meeting: Path, data: Path) -> tuple[str, int]:
    """Every other node answers the first."""
    path = meeting / "call.json"
    if not wait_for(path.is_file, ANSWER_SECONDS + JOIN_EXTRA_SECONDS):
        raise UserError(
            f"{place.name} does not see in {meeting.parent.parent} what {place.nodes[0]} wrote there: choose"
            " an --out on a file system that all nodes share"
        )
    _answer_call(place, meeting, data)
    call = atomic_files.read_json(path)
    return _reachable(place, call["addresses"], int(call["port"]))


def _reachable(place: NodePlace, addresses: list[str], port: int) -> tuple[str, int]:
    """The first of the addresses that answers from here, but for a loopback: on some systems a host's own
    name is one."""
    found: dict[str, str] = {}

    def look() -> bool:
        found.update({a: own for a in addresses if (own := own_address(a, port))})
        return bool(found)

    if not wait_for(look, REACH_SECONDS):
        where = ", ".join(f"{a}:{port}" for a in addresses)
        raise UserError(f"{place.name} cannot reach {place.nodes[0]} at {where}: is there a firewall?")
    return min(found, key=lambda address: is_loopback(found[address])), port


def own_address(host: str, port: int) -> str:
    """Where another machine is reached from, numerically; empty where nothing answers."""
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def wait_for(done: Callable[[], bool], seconds: float, pause: float = 0.1) -> bool:
    """Whether it came to be within the time."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
