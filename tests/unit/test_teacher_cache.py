"""Tests of engine/train/teacher_cache.py: a teacher computes each sample once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from isobatch.core.errors import TrainingError
from isobatch.data.base import ArraySource, Ragged
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.optimization.schedule import PhaseSchedule
from isobatch.engine.train.teacher_cache import samples_used, with_teacher_outputs
from isobatch.models.base import Batch, Teacher

if TYPE_CHECKING:
    from pathlib import Path

COUNT = 300


class Counting(nn.Module):
    """Answers with each text's sum, and counts the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, batch: Batch) -> torch.Tensor:
        self.seen += len(batch["index"])
        inside = torch.arange(batch["tokens"].shape[1]) < batch["length"][:, None]
        return (batch["tokens"] * inside).sum(1, keepdim=True).float()


def source() -> ArraySource:
    draw = np.random.default_rng(0)
    rows = [draw.integers(1, 9, n).astype(np.int32) for n in draw.integers(1, 30, COUNT)]
    return ArraySource({"tokens": Ragged.from_rows(rows)})


def sums(data: ArraySource, rows: np.ndarray) -> list[int]:
    return [int(data.fetch(np.array([r]))["tokens"].sum()) for r in rows]


def teacher(model: nn.Module, identity: str = "one") -> Teacher:
    return Teacher(identity, lambda facts: model, lambda m, batch: {"sum": m(batch)})


def facts(folder: Path) -> Any:
    return SimpleNamespace(folder=str(folder / "prepared"), fingerprint="f")


def world() -> Any:
    return SimpleNamespace(
        rank=0, size=1, is_main=True, device=torch.device("cpu"),
        broadcast_object=lambda x: x, barrier=lambda: None, mark_progress=lambda _: None,
    )  # fmt: skip


def ask(model: nn.Module, folder: Path, used: np.ndarray, identity: str = "one") -> Any:
    return with_teacher_outputs(
        source(), teacher(model, identity), facts(folder), used, world(), lambda _: None
    )


def test_answers_come_with_their_samples(tmp_path: Path) -> None:
    found = ask(Counting(), tmp_path, np.arange(COUNT))
    rows = np.array([7, 3, 299])
    batch = found.fetch(rows, 40)
    assert batch["teacher.sum"][:, 0].tolist() == sums(source(), rows)
    assert batch["tokens"].shape == (3, 40)


def test_later_epochs_and_runs_pay_nothing(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    ask(first, tmp_path, np.arange(COUNT))
    ask(second, tmp_path, np.arange(COUNT))
    assert (first.seen - 64, second.seen) == (COUNT, 0)  # one batch more, to see what shape answers have


def test_only_what_is_used_is_asked_and_the_rest_later(tmp_path: Path) -> None:
    first, second = Counting(), Counting()
    ask(first, tmp_path, np.arange(50))
    found = ask(second, tmp_path, np.arange(COUNT))
    assert first.seen == 100
    rows = np.arange(COUNT)
    assert found.fetch(rows)["teacher.sum"][:, 0].tolist() == sums(source(), rows)


def test_a_changed_answer_is_found_and_computed_again(tmp_path: Path) -> None:
    found = ask(Counting(), tmp_path, np.arange(COUNT))
    (folder,) = (file.parent for file in tmp_path.glob("*/sum.npy"))
    np.load(folder / "sum.npy", mmap_mode="r+")[17] += 1
    assert found.fetch(np.array([16, 18]))["teacher.sum"].shape == (2, 1)
    with pytest.raises(TrainingError, match="sample 17: run again"):
        found.fetch(np.array([16, 17]))
    model = Counting()
    again = ask(model, tmp_path, np.arange(COUNT))
    assert 0 < model.seen < COUNT
    assert again.fetch(np.array([17]))["teacher.sum"][:, 0].tolist() == sums(source(), np.array([17]))


def test_the_samples_used_are_those_of_the_steps() -> None:
    sampler = Sampler(100, 8, seed=3)
    short, whole = PhaseSchedule("a", 2, 13, 0.1, 13), PhaseSchedule("b", 40, 13, 0.1, 13)
    wanted = np.unique(np.concatenate([sampler.batch(0), sampler.batch(1)]))
    assert samples_used(sampler, [short]).tolist() == wanted.tolist()
    assert samples_used(sampler, [short, whole]).tolist() == list(range(100))


def test_answers_for_each_token_are_kept_without_padding(tmp_path: Path) -> None:
    data = source()

    def squares(_: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {"square": batch["tokens"].square()[..., None].expand(-1, -1, 2)}

    asked = Teacher("squares", lambda _: nn.Identity(), squares, per_token=True)
    rows = np.array([5, 2, 250, 7])
    taught = with_teacher_outputs(data, asked, facts(tmp_path), np.unique(rows), world(), lambda _: None)
    found = taught.fetch(rows, pad_to=32)
    inside = np.arange(found["tokens"].shape[1]) < found["length"][:, None]
    wanted = np.where(inside, found["tokens"] ** 2, 0)
    assert (found["teacher.square"] == wanted[..., None]).all()
    assert found["teacher.square"].shape == (*found["tokens"].shape, 2)
    (file,) = tmp_path.glob("*/square.npy")
    assert np.load(file, mmap_mode="r").shape == (int(data.lengths(np.arange(COUNT)).sum()), 2)
    np.load(file, mmap_mode="r+")[int(data.lengths(np.arange(250)).sum())] += 1
    changed = with_teacher_outputs(data, asked, facts(tmp_path), np.unique(rows), world(), lambda _: None)
    changed.fetch(rows[:2])
    with pytest.raises(TrainingError, match="were changed, as for sample 250"):
        changed.fetch(rows)
