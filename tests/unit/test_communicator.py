"""Tests of engine/distributed/communicator.py: rank and world size, and worlds that are refused."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.engine.distributed.communicator import Communicator, broadcast_choice_before_planning
from isobatch.engine.machine.detect import check_world, node_and_nodes, rank_and_world_size
from isobatch.launch.local.process_state import preserve_process_state
from isobatch.tests.unit.helpers import plan

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8)),  # torchrun, accelerate
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "2"}, (0, 1)),  # one launcher per node
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, (0, 1)),  # within an allocation, not a step
        ({"SLURM_STEP_NUM_TASKS": ""}, (0, 1)),
        ({"WORLD_SIZE": "4"}, (0, 1)),  # an exported leftover names no rank
    ],
)
def test_the_world_that_a_launcher_formed(environment: dict[str, str], found: tuple[int, int]) -> None:
    assert rank_and_world_size(environment) == found


@pytest.mark.parametrize(
    ("planned", "actual", "start"),
    [
        (4, 2, "the plan is for 4 processes and this world has 2: start it with 4, or plan anew"),
        (1, 2, "the plan is for 1 process and this world has 2: start it with 1, or plan anew"),
    ],
)
def test_another_world_than_planned_is_refused_with_both_numbers(
    planned: int, actual: int, start: str
) -> None:
    with pytest.raises(UserError) as refused:
        check_world(planned, actual)
    assert str(refused.value).startswith(start)
    assert f"--processes {actual}" in str(refused.value)


class _FormedGroupError(Exception):
    """In place of a process group."""


@pytest.fixture
def group_arguments(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """In a world of two that torchrun started on GPUs: what reaches init_process_group is put here."""
    import torch

    found: dict[str, Any] = {}

    def init_process_group(**arguments: Any) -> None:
        found.update(arguments)
        raise _FormedGroupError

    with preserve_process_state():
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
        yield found


@pytest.mark.parametrize(("hang_timeout", "seconds"), [(1800, 1860), (1, 61), (0, 10**6)])
@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("planned", [True, False])
def test_the_backend_waits_longer_than_the_watchdog(
    group_arguments: dict[str, Any], hang_timeout: int, seconds: int, cpu: bool, planned: bool
) -> None:
    """Also where the group is formed before there is a plan, as under torchrun."""
    two = plan(processes=2, strategy="ddp", device="cpu" if cpu else "cuda")

    def form() -> Any:
        if planned:
            return Communicator(two, hang_timeout)
        return broadcast_choice_before_planning(lambda: "here", 0, cpu, hang_timeout)

    with pytest.raises(_FormedGroupError):
        form()
    assert group_arguments["timeout"] == datetime.timedelta(seconds=seconds)
    # Host tensors and objects need gloo beside NCCL.
    assert group_arguments["backend"] == ("gloo" if cpu else "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize(
    ("words", "rank", "size", "expected"),
    [
        ("", 0, 1, (0, 1)),
        ("", 3, 4, (3, 4)),  # nobody says: a node per rank
        ("LOCAL_WORLD_SIZE=8", 17, 32, (2, 4)),
        ("LOCAL_WORLD_SIZE=8 GROUP_RANK=1 GROUP_WORLD_SIZE=4", 17, 32, (1, 4)),  # as torchrun numbers them
        ("LOCAL_WORLD_SIZE=2 NODE_RANK=1", 2, 4, (1, 2)),
        ("LOCAL_WORLD_SIZE=2 GROUP_RANK=0 GROUP_WORLD_SIZE=1", 1, 2, (0, 1)),
    ],
)
def test_the_launcher_says_on_which_node_a_rank_is(
    words: str, rank: int, size: int, expected: tuple[int, int]
) -> None:
    environment = dict(word.split("=") for word in words.split())
    assert node_and_nodes(environment, rank, size) == expected


def test_a_process_may_train_in_one_precision_after_another() -> None:
    """As --task compress does where its stages are planned in several."""
    with preserve_process_state():
        for precision, mixed in (("bf16", "bf16"), ("fp32", "no")):
            assert Communicator(plan(precision=precision)).accelerator.mixed_precision == mixed
