"""Fixtures of the unit tests: ranks as threads, with their collectives recorded; a fake Slurm."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.engine.distributed.communicator import Communicator
from isobatch.tests.unit.fake_slurm import NO_CLUSTER, Say, Slurm

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn


WAIT_SECONDS = 30.0
"""A rank that waits longer is alone in a collective: with real processes it would hang."""
Call = tuple[Any, ...]


class Exchange:
    """Where the ranks of one world exchange values."""

    def __init__(self, size: int) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=WAIT_SECONDS)

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadWorld(Communicator):
    """A communicator whose ranks are threads; it records every collective."""

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        import torch

        self.rank, self.size, self.exchange = rank, size, exchange
        self.device = torch.device("cpu")
        self.plan: Any = SimpleNamespace(precision="fp32")
        self.calls: list[Call] = []

    def on_nodes_of(self, ranks: int) -> None:
        """Say that nodes hold so many ranks each."""
        self.node, self.nodes = self.rank // ranks, -(-self.size // ranks)

    def _record_and_gather(self, value: Any, *call: Any) -> list[Any]:
        self.calls.append(call)
        with self.waiting_for(call[0]):
            return self.exchange.all_gather(self.rank, value)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        import torch

        parts = self._record_and_gather(values.clone(), "sum", tuple(values.shape), values.dtype)
        return values.copy_(torch.stack(parts).sum(0))

    def all_gather_objects(self, value: Any) -> list[Any]:
        return self._record_and_gather(value, "gather")

    def all_gather(self, values: Tensor) -> Tensor:
        import torch

        return torch.cat(self._record_and_gather(values, "gather tensors", tuple(values.shape), values.dtype))

    def gather_objects(self, value: Any) -> list[Any]:
        parts = self._record_and_gather(value, "gather on rank 0")
        return parts if self.is_main else []

    def broadcast_object(self, value: Any) -> Any:
        return self._record_and_gather(value, "agree")[0]

    def barrier(self) -> None:
        self._record_and_gather(None, "barrier")

    def broadcast_model(self, model: nn.Module) -> None:
        raise NotImplementedError


@dataclass
class Outcome:
    """Per rank: what its function returned, and the collectives that it took part in."""

    values: list[Any] = field(default_factory=list)
    calls: list[list[Call]] = field(default_factory=list)


RunRanks = Callable[[int, Callable[[ThreadWorld], Any]], Outcome]


@pytest.fixture
def run_ranks() -> RunRanks:
    """`run_ranks(3, part)` runs `part(world)` on three ranks at once; an error on one rank ends all."""

    def run(size: int, part: Callable[[ThreadWorld], Any]) -> Outcome:
        exchange = Exchange(size)
        worlds = [ThreadWorld(rank, size, exchange) for rank in range(size)]
        errors: list[BaseException] = []

        def guarded(world: ThreadWorld) -> Any:
            try:
                return part(world)
            except threading.BrokenBarrierError:
                raise
            except BaseException as error:
                errors.append(error)
                exchange.barrier.abort()
                raise

        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(guarded, world) for world in worlds]
        if errors:
            raise errors[0]
        return Outcome([f.result() for f in futures], [w.calls for w in worlds])

    return run


@pytest.fixture
def tiny_facts(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Facts of prepared labelled texts with a tokenizer of a few words."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("prepared")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3}
    Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    return SimpleNamespace(folder=str(folder), extra={"tokenizer": "tokenizer.json", "pad": 0, "unk": 1})


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """`slurm(squeue="echo ...")` makes commands of Slurm that run these lines of bash."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def install(**commands: str) -> None:
        for name, lines in commands.items():
            new = folder / f".{name}"  # one that runs is not written to
            new.write_text(f'#!/bin/bash\necho "{name} $*" >>{folder}/calls\n{lines}\n')
            new.chmod(0o755)
            new.replace(folder / name)

    install(squeue=NO_CLUSTER, sinfo="exit 1", sbatch="exit 1", scancel="exit 1", scontrol="exit 1")
    return install


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Exit code, output and errors of a command."""

    def run(command: Callable[[list[str]], int], *words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = command(list(words))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run
