"""Tests of engine/distributed/numa.py, on a made-up sysfs."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from isobatch.engine.distributed.numa import bind_to_node_of, cores_to_use

if TYPE_CHECKING:
    from pathlib import Path

GPU = "0000:dc:00.0"


def sysfs(root: Path, node: str, *cpulists: str) -> Path:
    """A machine whose nodes have these cores, and its GPU on `node`."""
    for number, cores in enumerate(cpulists):
        folder = root / "devices" / "system" / "node" / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    place = root / "bus" / "pci" / "devices" / GPU
    place.mkdir(parents=True)
    (place / "numa_node").write_text(f"{node}\n")
    return root


@pytest.mark.parametrize(
    ("node", "cpulists", "allowed", "cores"),
    [
        ("1", ("0-3,8-11", "4-7,12-15"), range(16), {4, 5, 6, 7, 12, 13, 14, 15}),
        ("0", ("0-3", "4-7"), range(2, 6), {2, 3}),  # half of what the container allows
        ("0", ("0-3", "4-7"), [3, 4, 5, 6, 7], set()),  # 1 of 5: it would lose the other 4
        ("0", ("0-3", "4-7"), range(4, 8), set()),  # all of its cores are elsewhere
        ("0", ("0-3", "4-7"), [1, 2], {1, 2}),  # bound there already
        ("0", ("0-7",), range(8), set()),  # one node
        ("0", ("0-7", ""), range(8), set()),  # the other has memory alone
        ("-1", ("0-3", "4-7"), range(8), set()),  # the machine does not say
        ("7", ("0-3", "4-7"), range(8), set()),
    ],
)
def test_cores_of_the_gpus_node_that_may_be_used(
    node: str, cpulists: tuple[str, ...], allowed: list[int], cores: set[int], tmp_path: Path
) -> None:
    assert cores_to_use(GPU, set(allowed), sysfs(tmp_path, node, *cpulists)) == cores


def test_a_device_that_sysfs_does_not_know_is_bound_nowhere(tmp_path: Path) -> None:
    assert cores_to_use("0000:01:00.0", {0, 1}, sysfs(tmp_path, "0", "0", "1")) == set()
    assert cores_to_use(GPU, {0, 1}, tmp_path / "no sysfs") == set()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no processes")
def test_the_process_and_its_threads_are_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    root = sysfs(tmp_path, "1", "0-1", "2-3")
    assert bind_to_node_of(torch.device("cpu"), root) == set()
    assert not bound
    assert bind_to_node_of(torch.device("cuda", 0), root) == {2, 3}
    assert bound[os.getpid()] == {2, 3}
    assert set(map(frozenset, bound.values())) == {frozenset({2, 3})}
