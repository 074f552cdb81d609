"""Tests of engine/checkpointing/checkpoint.py: asynchronous, atomic, read by any world, damage detected."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isobatch.core.errors import TrainingError, UserError
from isobatch.engine.checkpointing import checkpoint, portable_state, writer
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint, temporary_of
from isobatch.engine.checkpointing.layout import Layout
from isobatch.engine.checkpointing.portable_state import PortableState, TensorPiece
from isobatch.engine.checkpointing.writer import CheckpointWriter
from isobatch.tests.unit.helpers import same, save_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FACTS = {"progress": {"phase": "train", "step": 3}}
DAMAGED = r"checkpoint .*train-3 is damaged: "
PATIENCE = 20.0
WRITE = CheckpointWriter._write  # noqa: SLF001


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight/a": torch.randn(7, 3, generator=generator),
        "weight/b.c": torch.randn(5, generator=generator),
        "weight/half": torch.randn(4, generator=generator).bfloat16(),
        "weight/none": torch.empty(0, 3),
        "moment/step/a": torch.tensor(17.0),
        "moment/count": torch.tensor([2**40, -1]),
        "weight/strided": torch.randn(6, 4, generator=generator).t(),
    }


def share(world: Any) -> PortableState:
    return portable_state.rank_share(tensors(), world.rank, world.size)


def save(
    run_ranks: Any, folder: Path, size: int = 2, facts: dict[str, Any] | None = None, ranks_a_node: int = 64
) -> Path:
    def part(world: Any) -> None:
        world.on_nodes_of(ranks_a_node)
        save_checkpoint(folder, share(world), facts or FACTS, world)

    run_ranks(size, part)
    return folder


def load(folder: Path) -> dict[str, Tensor]:
    """Every tensor, every byte checked."""
    saved = SavedCheckpoint(folder)
    saved.verify_checksums()
    return {name: saved.read(name) for name in saved.entries}


def steps(folder: Path) -> int:
    return int(SavedCheckpoint(folder).state["progress"]["step"])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_what_any_world_saved_is_loaded(size: int, run_ranks: Any, tmp_path: Path) -> None:
    folder = save(run_ranks, tmp_path / "it's 日本" / "train-3", size)
    assert same(load(folder), tensors())
    assert SavedCheckpoint(folder).state == FACTS
    assert [p.name for p in folder.glob("*.safetensors")] == ["node-00000.safetensors"]
    assert not list(folder.parent.glob(".*"))  # nothing half-written is left


def test_saving_again_replaces_the_whole_folder(run_ranks: Any, tmp_path: Path) -> None:
    save(run_ranks, tmp_path / "train-3", 5)
    folder = save(run_ranks, tmp_path / "train-3", 1, {"progress": {"step": 4}})
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert same(load(folder), tensors())
    assert SavedCheckpoint(folder).state == {"progress": {"step": 4}}


Gate = dict[int, threading.Event]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Rank -> what holds its writes back until it is set."""
    gates = {rank: threading.Event() for rank in range(3)}
    write = CheckpointWriter._write  # noqa: SLF001

    def held(this: CheckpointWriter, *arguments: Any) -> None:
        assert gates[this.world.rank].wait(PATIENCE)
        write(this, *arguments)

    monkeypatch.setattr(CheckpointWriter, "_write", held)
    yield gates
    for event in gates.values():
        event.set()


def failing(monkeypatch: pytest.MonkeyPatch, rank: int, error: BaseException) -> None:
    """From here on this rank cannot write."""
    write = CheckpointWriter._write  # noqa: SLF001

    def fail(this: CheckpointWriter, *arguments: Any) -> None:
        def refuse(*_: Any) -> None:
            raise error

        if this.world.rank == rank:
            monkeypatch.setattr(this._buffer, "write", refuse)  # noqa: SLF001
            WRITE(this, *arguments)
        else:
            write(this, *arguments)

    monkeypatch.setattr(CheckpointWriter, "_write", fail)


def votes(world: Any, writer: CheckpointWriter) -> list[float]:
    """All ranks', added up."""
    return world.all_reduce_sum(torch.tensor(writer.rank_flags())).tolist()


def complete_if_written(world: Any, writer: CheckpointWriter, counted: list[float]) -> None:
    """As the loop does in a pause that these votes ask for."""
    written, failed = counted
    if failed or written == world.size:
        writer.complete()


def await_vote(writer: CheckpointWriter) -> list[float]:
    """This rank's, once its writing has ended."""
    until = time.monotonic() + PATIENCE
    while not writer.rank_flags()[0]:
        assert time.monotonic() < until
        time.sleep(0.001)
    return writer.rank_flags()


def test_a_checkpoint_is_complete_only_when_every_rank_has_voted(
    run_ranks: Any, tmp_path: Path, gate: Gate
) -> None:
    folder = tmp_path / "train-3"

    def part(world: Any) -> list[list[float]]:
        writer, counted = CheckpointWriter(world), []
        writer.start(folder, share(world), FACTS)
        assert writer.rank_flags() == [0.0, 0.0]  # it has returned, and no rank may write yet
        for slow in (0, 2, 1):
            counted.append(votes(world, writer))
            complete_if_written(world, writer, counted[-1])
            world.barrier()
            assert not folder.exists()
            gate[slow].set()
            if world.rank == slow:
                await_vote(writer)
        counted.append(votes(world, writer))
        complete_if_written(world, writer, counted[-1])
        complete_if_written(world, writer, counted[-1])  # as the next step does, whose votes were cast before
        return counted

    assert run_ranks(3, part).values == [[[0.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]] * 3
    assert same(load(folder), tensors())


def test_what_changes_after_begin_is_not_written(run_ranks: Any, tmp_path: Path, gate: Gate) -> None:
    def part(world: Any) -> None:
        held = tensors()
        writer = CheckpointWriter(world)
        writer.start(tmp_path / "train-3", portable_state.rank_share(held, world.rank, world.size), FACTS)
        for tensor in held.values():
            tensor.zero_()
        gate[world.rank].set()
        writer.wait()

    run_ranks(3, part)
    assert same(load(tmp_path / "train-3"), tensors())


def test_a_writer_issues_the_same_collectives_on_every_rank(
    run_ranks: Any, tmp_path: Path, gate: Gate
) -> None:
    def part(world: Any) -> list[list[Any]]:
        writer, calls = CheckpointWriter(world), []

        def record(call: Callable[..., None], *words: Any) -> None:
            before = len(world.calls)
            call(*words)
            calls.append([name for (name,) in world.calls[before:]])

        record(writer.wait)
        record(writer.complete)
        record(writer.start, tmp_path / "train-3", share(world), FACTS)
        gate[world.rank].set()
        if world.rank:  # the main rank may still be writing: what it is doing must not matter
            await_vote(writer)
        record(writer.complete)
        record(writer.start, tmp_path / "train-6", share(world), FACTS)
        record(writer.start, tmp_path / "train-9", share(world), FACTS)
        record(writer.wait)
        record(writer.wait)
        return calls

    ended = ["gather", "barrier"]
    outcome = run_ranks(3, part)  # pieces are exchanged at the first start alone
    assert outcome.values == [[[], [], ["gather"], ["gather"], [], ended, ended, []]] * 3
    assert all(calls == outcome.calls[0] for calls in outcome.calls)


class Panic(BaseException):
    """As Rust's panics come to Python: no Exception."""


FAILURES = [
    (
        OSError(28, "No space left on device"),
        r"No space left on device \(.* free there, it takes .*\)",
    ),
    (ValueError("odd"), r"ValueError\('odd'\)"),
    (Panic("lost"), r"Panic\('lost'\)"),
]


@pytest.mark.parametrize(("error", "reason"), FAILURES, ids=["full", "odd", "panic"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_cannot_write_ends_the_save_on_all(
    rank: int,
    error: BaseException,
    reason: str,
    run_ranks: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(run_ranks, tmp_path / "train-3")
    failing(monkeypatch, rank, error)
    told: list[int] = []

    def part(world: Any) -> list[Any]:
        writer = CheckpointWriter(world, lambda *_: told.append(world.rank))
        writer.start(tmp_path / "train-3", share(world), {"progress": {"step": 9}})
        with pytest.raises(UserError, match=rf"cannot write .*: {reason}"):
            writer.wait()
        writer.wait()  # and that was that
        return world.calls

    assert run_ranks(3, part).values == [[("gather",), ("gather",)]] * 3
    assert SavedCheckpoint(tmp_path / "train-3").state == FACTS  # the one before is untouched
    assert same(load(tmp_path / "train-3"), tensors())
    assert not list(tmp_path.glob(".*"))
    assert told == []


def test_one_vote_of_failure_ends_the_save_while_others_still_write(
    run_ranks: Any, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, 1, OSError(28, "No space left on device"))

    def part(world: Any) -> list[float]:
        writer = CheckpointWriter(world)
        writer.start(tmp_path / "train-3", share(world), FACTS)
        if world.rank == 1:
            assert await_vote(writer) == [1.0, 1.0]
        found = votes(world, writer)
        threading.Timer(0.05, gate[world.rank].set).start()
        with pytest.raises(UserError, match="No space left on device"):
            complete_if_written(world, writer, found)
        return found

    assert run_ranks(3, part).values == [[1.0, 1.0]] * 3
    assert list(tmp_path.iterdir()) == []


FILES = ["index.json", "state.json", "checksums.json", "node-00000.safetensors", "node-00001.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "missing", "empty"])
def test_damage_has_a_name(name: str, damage: str, run_ranks: Any, tmp_path: Path) -> None:
    path = save(run_ranks, tmp_path / "train-3", ranks_a_node=1) / name
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    with pytest.raises(TrainingError, match=DAMAGED):
        SavedCheckpoint(path.parent)


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_of_any_file_is_found(name: str, run_ranks: Any, tmp_path: Path) -> None:
    path = save(run_ranks, tmp_path / "train-3", ranks_a_node=1) / name
    whole = path.read_bytes()

    @given(st.integers(0, len(whole) - 1), st.integers(0, 7))
    def look(position: int, bit: int) -> None:
        content = bytearray(whole)
        content[position] ^= 1 << bit
        path.write_bytes(content)
        with pytest.raises(TrainingError, match=DAMAGED):
            load(path.parent)

    look()
    path.write_bytes(whole)
    assert same(load(path.parent), tensors())


@pytest.mark.parametrize("world", [1, 2, 3, 5, 7])
def test_the_ranks_check_all_files_between_them(world: int, run_ranks: Any, tmp_path: Path) -> None:
    folder = save(run_ranks, tmp_path / "train-3", 5)
    path = folder / "node-00000.safetensors"
    whole = path.read_bytes()
    for part in SavedCheckpoint(folder).layout.parts:
        content = bytearray(whole)
        content[part.stop - 1] ^= 1
        path.write_bytes(content)
        saved, noticed = SavedCheckpoint(folder), []
        for rank in range(world):
            try:
                saved.verify_checksums(rank, world)
            except TrainingError:
                noticed.append(rank)
        assert len(noticed) == 1


Borders = st.tuples(st.integers(0, 99), st.integers(0, 99))


def assert_same_part(saved: SavedCheckpoint, wanted: Tensor, name: str, borders: tuple[int, int]) -> None:
    flat = wanted.reshape(-1)
    start, stop = sorted(b % (len(flat) + 1) for b in borders)
    assert same({name: saved.read_slice(name, start, stop)}, {name: flat[start:stop]})


def test_pieces_cut_and_dealt_anyhow_are_one_tensor_again(run_ranks: Any, tmp_path: Path) -> None:
    """As each strategy deals them: no rank holds what `shared` would give it, and one may hold nothing."""
    flat = torch.arange(60.0)
    entries = {"weight/a": portable_state.tensor_entry(flat.view(5, 12))}

    @settings(max_examples=30)
    @given(st.sets(st.integers(1, 59), max_size=6), st.permutations(range(7)), Borders)
    def look(cuts: set[int], dealt: list[int], borders: tuple[int, int]) -> None:
        starts = [0, *sorted(cuts)]
        pieces = [
            TensorPiece("weight/a", a, flat[a:b]) for a, b in zip(starts, [*starts[1:], 60], strict=True)
        ]

        def part(world: Any) -> None:
            mine = [p for p, place in zip(pieces, dealt, strict=False) if place % 3 == world.rank]
            save_checkpoint(tmp_path / "train-3", PortableState(entries, mine), FACTS, world)

        run_ranks(3, part)
        assert same(load(tmp_path / "train-3"), {"weight/a": flat.view(5, 12)})
        assert_same_part(SavedCheckpoint(tmp_path / "train-3"), flat, "weight/a", borders)

    look()


@pytest.mark.parametrize("pieces", [[], [(0, 4)], [(5, 10)], [(0, 4), (5, 10)], [(0, 6), (5, 10)]])
def test_a_tensor_with_a_gap_or_an_overlap_is_not_saved_and_is_damage(
    pieces: list[tuple[int, int]], run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = torch.arange(10.0)
    state = PortableState(
        {"weight/a": portable_state.tensor_entry(flat)},
        [TensorPiece("weight/a", a, flat[a:b]) for a, b in pieces],
    )
    with pytest.raises(ValueError, match="parts of weight/a are missing"):
        run_ranks(1, lambda world: save_checkpoint(tmp_path / "train-3", state, FACTS, world))
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(writer, "read_contents", lambda _: None)
        patch.setattr(Layout, "check", lambda _: None)
        run_ranks(1, lambda world: save_checkpoint(tmp_path / "train-3", state, FACTS, world))
    with pytest.raises(TrainingError, match=DAMAGED + "parts of weight/a are missing"):
        SavedCheckpoint(tmp_path / "train-3")


def test_ranks_may_list_their_tensors_in_any_order(run_ranks: Any, tmp_path: Path) -> None:
    def part(world: Any) -> None:
        state = share(world)
        turned = list(state.entries.items())[world.rank :] + list(state.entries.items())[: world.rank]
        save_checkpoint(tmp_path / "train-3", PortableState(dict(turned), state.pieces), FACTS, world)

    run_ranks(3, part)
    assert same(load(tmp_path / "train-3"), tensors())


def test_ranks_that_save_other_tensors_are_refused(run_ranks: Any, tmp_path: Path) -> None:
    def part(world: Any) -> None:
        state = share(world)
        more = {"moment/extra": portable_state.tensor_entry(torch.empty(0))} if world.rank else {}
        save_checkpoint(
            tmp_path / "train-3", PortableState({**state.entries, **more}, state.pieces), FACTS, world
        )

    with pytest.raises(ValueError, match="the ranks do not save the same tensors"):
        run_ranks(2, part)
    assert not list(tmp_path.iterdir())


def test_a_file_that_lost_bytes_while_it_was_written_replaces_nothing(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(writer: CheckpointWriter, folder: Path, *rest: Any) -> None:
        WRITE(writer, folder, *rest)
        file = temporary_of(folder) / "node-00000.safetensors"
        os.truncate(file, file.stat().st_size - 1)

    save(run_ranks, tmp_path / "train-3", 1)
    monkeypatch.setattr(CheckpointWriter, "_write", cut_short)
    with pytest.raises(TrainingError, match=r"is damaged: node-00000\.safetensors is not what was written"):
        save(run_ranks, tmp_path / "train-3", 1, {"progress": {"step": 4}})
    assert SavedCheckpoint(tmp_path / "train-3").state == FACTS


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "index.json").write_text("{}")


def listed(folder: Path) -> list[str]:
    return [p.name for p in checkpoint.list_checkpoints(folder, ["warm-up", "train"])]


def test_checkpoints_are_listed_in_the_order_they_were_made(tmp_path: Path) -> None:
    make(
        tmp_path, "train-10", "train-9", "warm-up-100", "train-x", "other-5", ".train-11.tmp", ".train-8.old"
    )
    (tmp_path / "train-12").mkdir()  # no index: not one of ours
    (tmp_path / "notes.txt").write_text("")
    assert listed(tmp_path) == ["warm-up-100", "train-9", "train-10"]
    assert listed(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("keep", "spare", "left"),
    [
        (1, set(), ["train-10"]),
        (2, set(), ["train-9", "train-10"]),
        (1, {"warm-up-100"}, ["warm-up-100", "train-10"]),
        (9, set(), ["warm-up-100", "train-8", "train-9", "train-10"]),
    ],
)
def test_pruning_keeps_the_newest_and_the_spared(
    keep: int, spare: set[str], left: list[str], tmp_path: Path
) -> None:
    make(tmp_path, "train-10", "train-9", "train-8", "warm-up-100")
    make(tmp_path, ".train-8.old")  # a delete that was cut short
    checkpoint.delete_old(tmp_path, ["warm-up", "train"], keep, spare)
    assert listed(tmp_path) == left
    assert json.loads((tmp_path / "train-10" / "index.json").read_text()) == {}


def test_a_half_written_checkpoint_is_no_checkpoint(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_ranks, tmp_path / "train-3")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(writer, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save(run_ranks, tmp_path / "train-6", 1)
    assert (tmp_path / ".train-6.tmp").is_dir()
    assert listed(tmp_path) == ["train-3"]
    save(run_ranks, tmp_path / "train-6")  # and it is in nobody's way
    assert listed(tmp_path) == ["train-3", "train-6"]
    assert same(load(tmp_path / "train-6"), tensors())


def test_what_a_larger_world_left_half_written_is_not_read(run_ranks: Any, tmp_path: Path) -> None:
    save(run_ranks, tmp_path / "train-3", 5).rename(tmp_path / ".train-3.tmp")
    assert same(load(save(run_ranks, tmp_path / "train-3", 2, {"progress": {"step": 4}})), tensors())
    assert steps(tmp_path / "train-3") == 4


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    mine = [".train-3.tmp", ".warm-up-12.old"]
    others = [".ssh", ".config", ".train-3", ".tmp", ".cache-dir.tmp"]
    for name in (*mine, *others):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / ".train-4.tmp").symlink_to(tmp_path / ".ssh")
    checkpoint.remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, ".train-4.tmp"])
    assert (tmp_path / ".ssh" / "inside").is_dir()
