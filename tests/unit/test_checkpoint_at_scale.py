"""Tests of the files of a checkpoint: one per node, read once for all; up to 512 ranks, simulated."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from isobatch.core.errors import TrainingError
from isobatch.engine.checkpointing import checkpoint, portable_state, writer
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, SharedReader, open_on_all
from isobatch.engine.checkpointing.portable_state import PortableState, TensorPiece
from isobatch.tests.opens import OPENS
from isobatch.tests.unit.helpers import same, save_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

FACTS = {"progress": {"phase": "train", "step": 3}}
RANKS_A_NODE = 8


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {f"weight/{n}.w": torch.randn(32, 16, generator=generator) for n in range(2)}
    found |= {f"moment/exp_avg/{n}.w": torch.randn(32, 16, generator=generator) for n in range(2)}
    found["weight/negative zero"] = torch.full((5,), -0.0)
    found["weight/half"] = torch.randn(7, generator=generator).bfloat16()
    found["moment/count"] = torch.tensor(2**40)
    return found


def rows_of(tensors: dict[str, Tensor], rank: int, world: int) -> PortableState:
    """As ZeRO-3 deals them: a part of every tensor to every rank."""
    pieces = []
    for name, tensor in tensors.items():
        count = tensor.numel()
        low, high = count * rank // world, count * (rank + 1) // world
        if low < high:
            pieces.append(TensorPiece(name, low, tensor.reshape(-1)[low:high]))
    return PortableState({n: portable_state.tensor_entry(t) for n, t in tensors.items()}, pieces)


@pytest.mark.parametrize("ranks", [64, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("deal", [portable_state.rank_share, rows_of], ids=["replicated", "sharded"])
def test_many_ranks_write_one_file_a_node_and_open_few(
    deal: Any, ranks: int, run_ranks: Any, tmp_path: Path
) -> None:
    wanted, folder = tensors(), tmp_path / "train-3"

    def save(world: Any) -> None:
        world.on_nodes_of(RANKS_A_NODE)
        save_checkpoint(folder, deal(wanted, world.rank, world.size), FACTS, world)

    def load(world: Any) -> dict[str, Tensor]:
        world.on_nodes_of(RANKS_A_NODE)
        threading.current_thread().name = f"rank {world.rank}"
        saved = open_on_all(folder, world)
        saved.verify_checksums(world.rank, world.size)
        if deal is rows_of:  # each reads its own
            pieces = rows_of(wanted, world.rank, world.size).pieces
            return {p.name: saved.read_slice(p.name, p.start, p.start + len(p.values)) for p in pieces}
        world.all_reduce_sum = lambda values: values  # what it gives is tested below, with fewer threads
        whole = SharedReader(saved, world)
        return {name: whole.read(name) for name in whole.entries}

    run_ranks(ranks, save)
    with OPENS.within(folder) as opens:
        found = run_ranks(ranks, load).values
    if deal is rows_of:
        for rank in (0, 1, ranks // 2 - 1, ranks - 1):
            pieces = {p.name: p.values for p in rows_of(wanted, rank, ranks).pieces}
            assert same(found[rank], pieces)
    else:
        for name in wanted:
            bits = [f[name].reshape(-1).view(torch.uint8) for f in found]
            assert torch.equal(torch.stack(bits).sum(0), wanted[name].reshape(-1).view(torch.uint8)), name
    assert len(list(folder.iterdir())) == ranks // RANKS_A_NODE + len(("index", "state", "checksums"))
    assert sorted(opens) == sorted(f"rank {rank}" for rank in range(ranks))
    read_by_main = 1 if deal is rows_of else ranks // RANKS_A_NODE
    assert opens.pop("rank 0") == 3 + read_by_main  # the three texts, and files
    assert set(opens.values()) == {1}


@pytest.mark.parametrize("ranks_a_node", [1, 2, 3, 5])
@pytest.mark.parametrize("deal", [portable_state.rank_share, rows_of], ids=["replicated", "sharded"])
def test_files_are_read_by_safetensors(deal: Any, ranks_a_node: int, run_ranks: Any, tmp_path: Path) -> None:
    wanted = tensors()

    def part(world: Any) -> None:
        world.on_nodes_of(ranks_a_node)
        save_checkpoint(tmp_path / "train-3", deal(wanted, world.rank, world.size), FACTS, world)

    run_ranks(5, part)
    found: dict[str, dict[int, Tensor]] = {name: {} for name in wanted}
    for file in (tmp_path / "train-3").glob("*.safetensors"):
        for key, values in load_file(file).items():
            name, _, start = key.rpartition("@")
            if name == "filling":
                assert not values.any()
            else:
                found[name][int(start)] = values
    whole = {n: torch.cat([v for _, v in sorted(p.items())]).view(wanted[n].shape) for n, p in found.items()}
    assert same(whole, wanted)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_another_world_reads_what_nodes_wrote_once_for_all(size: int, run_ranks: Any, tmp_path: Path) -> None:
    wanted = tensors()

    def save(world: Any) -> None:
        world.on_nodes_of(2)
        save_checkpoint(tmp_path / "train-3", rows_of(wanted, world.rank, world.size), FACTS, world)

    def load(world: Any) -> dict[str, Tensor]:
        world.on_nodes_of(1)
        whole = SharedReader(open_on_all(tmp_path / "train-3", world), world)
        return {name: whole.read(name) for name in whole.entries}

    run_ranks(5, save)
    for found in run_ranks(size, load).values:
        assert same(found, wanted)
        assert found["weight/negative zero"].signbit().all()


def test_damage_that_the_main_rank_sees_is_raised_on_all(run_ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "train-3"
    run_ranks(2, lambda w: save_checkpoint(folder, rows_of(tensors(), w.rank, w.size), FACTS, w))
    (folder / "node-00000.safetensors").unlink()

    def part(world: Any) -> None:
        with pytest.raises(TrainingError, match="is damaged"):
            open_on_all(folder, world)

    run_ranks(3, part)


def test_an_index_that_names_a_file_elsewhere_is_damage(run_ranks: Any, tmp_path: Path) -> None:
    folder = tmp_path / "train-3"
    run_ranks(1, lambda w: save_checkpoint(folder, rows_of(tensors(), 0, 1), FACTS, w))
    index = (folder / "index.json").read_text().replace("node-00000", "../node-00000")
    (folder / "index.json").write_text(index)
    sums = checkpoint.atomic_files.read_json(folder / "checksums.json")
    sums["index.json"] = checkpoint.bytes_digest(folder / "index.json")
    checkpoint.atomic_files.write_json(folder / "checksums.json", sums)
    with pytest.raises(TrainingError, match="a file elsewhere"):
        SavedCheckpoint(folder)


def test_new_entries_are_exchanged_and_the_same_are_not(run_ranks: Any, tmp_path: Path) -> None:
    first, second = tensors(), {**tensors(), "moment/later": torch.ones(9)}

    def part(world: Any) -> list[int]:
        saving, counts = writer.CheckpointWriter(world), []
        for step, state in enumerate([first, first, second]):
            before = len(world.calls)
            saving.start(tmp_path / f"train-{step}", rows_of(state, world.rank, world.size), FACTS)
            counts.append(len(world.calls) - before)
        saving.wait()
        return counts

    ends = len(("gather", "barrier"))
    assert run_ranks(2, part).values == [[1, ends, ends + 1]] * 2
    saved = SavedCheckpoint(tmp_path / "train-2")
    assert same({name: saved.read(name) for name in saved.entries}, second)
