"""Tests of engine/distributed/communicator.py: rank and world size, and worlds that are refused."""

from __future__ import annotations

import pytest

from isobatch.core.errors import UserError
from isobatch.engine.distributed.communicator import (
    broadcast_choice_before_planning,
    check_world,
    rank_and_world_size,
)


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


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_processes_that_nobody_joined_are_refused(name: str) -> None:
    with pytest.raises(UserError) as refused:
        rank_and_world_size({name: "2"})
    message = str(refused.value)
    assert message.startswith(f"2 processes were started ({name}=2) but no world was formed")
    assert "each would train alone" in message
    assert "accelerate launch" in message  # the way out


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


def test_the_planned_world_is_welcome() -> None:
    check_world(3, 3)


def test_one_process_agrees_with_itself_without_a_process_group() -> None:
    assert broadcast_choice_before_planning(lambda: "here", 0, 1, cpu=True, timeout=1) == "here"


def test_ranks_that_agree_get_what_rank_0_has(run_ranks) -> None:  # type: ignore[no-untyped-def]
    """The stand-in that other tests use exchanges values as a world does."""
    import torch

    def part(world):  # type: ignore[no-untyped-def]
        total = world.all_reduce_sum(torch.tensor([float(world.rank + 1)]))
        return (
            total.item(),
            world.all_gather_objects(world.rank),
            world.broadcast_object(world.rank),
            world.is_main,
        )

    outcome = run_ranks(3, part)
    assert outcome.values == [(6.0, [0, 1, 2], 0, rank == 0) for rank in range(3)]  # 1 + 2 + 3


def test_an_error_on_one_rank_ends_all(run_ranks) -> None:  # type: ignore[no-untyped-def]
    def part(world):  # type: ignore[no-untyped-def]
        if world.rank == 1:
            raise UserError("rank 1 gave up")
        world.barrier()

    with pytest.raises(UserError, match="rank 1 gave up"):
        run_ranks(3, part)
