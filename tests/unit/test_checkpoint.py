"""Portable checkpoints: every element once, whole or absent, and damage has a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from engine import checkpoint
from engine.errors import TrainingError, UserError
from engine.optim import make_optimizer
from engine.recipe import Recipe

SIZES = st.dictionaries(st.text("abc/.", min_size=1, max_size=6), st.integers(0, 97), min_size=1, max_size=8)
STATE = {"progress": {"phase": "train", "step": 3}}


@given(SIZES, st.integers(1, 5))
def test_slices_hold_every_element_once_and_are_even(sizes: dict[str, int], world: int) -> None:
    found = checkpoint.slices(sizes, world)
    for name, size in sizes.items():
        covered = [i for s in found if s.name == name for i in range(s.start, s.stop)]
        assert covered == list(range(size))
    shares = [sum(s.stop - s.start for s in found if s.rank == rank) for rank in range(world)]
    assert max(shares) - min(shares) <= 1


def test_slices_by_hand() -> None:
    # 7 + 4 = 11 elements on 3 ranks: borders at 0, 3, 7, 11.
    found = [(s.name, s.rank, s.start, s.stop) for s in checkpoint.slices({"a": 7, "b": 4}, 3)]
    assert found == [("a", 0, 0, 3), ("a", 1, 3, 7), ("b", 2, 0, 4)]


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


def save(together: Any, folder: Path, size: int = 2, state: dict[str, Any] | None = None) -> Path:
    together(size, lambda world: checkpoint.save(folder, tensors(), state or STATE, world))
    return folder


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[n], t) and found[n].dtype == t.dtype and found[n].shape == t.shape
        for n, t in wanted.items()
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_what_any_world_saved_is_loaded(size: int, together: Any, tmp_path: Path) -> None:
    folder = save(together, tmp_path / "it's 日本" / "train-3", size)
    found, state = checkpoint.load(folder)
    assert same(found, tensors())
    assert state == STATE
    assert not list(folder.parent.glob(".*"))  # nothing half-written is left


def test_every_rank_of_a_save_issues_the_same_collectives(together: Any, tmp_path: Path) -> None:
    outcome = together(3, lambda world: checkpoint.save(tmp_path / "train-3", tensors(), STATE, world))
    assert outcome.calls == [[("barrier",), ("gather",), ("barrier",)]] * 3


def test_saving_again_replaces_the_whole_folder(together: Any, tmp_path: Path) -> None:
    save(together, tmp_path / "train-3", 5)
    folder = save(together, tmp_path / "train-3", 1, {"progress": {"step": 4}})
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert checkpoint.load(folder)[1] == {"progress": {"step": 4}}


def test_a_rank_that_cannot_write_ends_the_save_on_all(
    together: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(together, tmp_path / "train-3")
    write = checkpoint._write_share

    def full(folder: Path, tensors: Any, share: Any, rank: int) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")
        write(folder, tensors, share, rank)

    monkeypatch.setattr(checkpoint, "_write_share", full)
    ended = []

    def part(world: Any) -> None:
        with pytest.raises(
            UserError, match=r"cannot write .*: No space left on device; choose another place"
        ):
            checkpoint.save(tmp_path / "train-3", tensors(), {"progress": {"step": 9}}, world)
        ended.append(world.rank)

    together(3, part)
    assert sorted(ended) == [0, 1, 2]
    assert checkpoint.load(tmp_path / "train-3")[1] == STATE  # the one before is untouched


FILES = ["index.json", "state.json", "checksums.json", "rank-00000.json", "rank-00001.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "empty"])
def test_damage_has_a_name(name: str, damage: str, together: Any, tmp_path: Path) -> None:
    path = save(together, tmp_path / "train-3") / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        place = next(i for i, b in enumerate(content) if i >= len(content) // 2 and chr(b).isalnum())
        content[place] ^= 1
        path.write_bytes({"flipped": content, "cut": content[:-1][: place - 1], "empty": b""}[damage])
    with pytest.raises(TrainingError, match=r"checkpoint .*train-3 is damaged: "):
        checkpoint.load(path.parent)


@pytest.mark.parametrize("position", range(0, 400, 7))
def test_any_flipped_byte_of_the_weights_is_found(position: int, together: Any, tmp_path: Path) -> None:
    path = save(together, tmp_path / "train-3", 1) / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(TrainingError, match="is not what was written"):
        checkpoint.load(path.parent)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    net[0].bias.requires_grad = False
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    for number in range(first, first + steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_training_goes_on_as_if_nothing_had_happened(kind: Any, together: Any, tmp_path: Path) -> None:
    recipe = Recipe(task="t", optimizer=kind, lr=0.01)
    net = network()
    optimizer = make_optimizer(net, recipe, "cpu")
    train(net, optimizer, 0, 3)
    together(3, lambda w: checkpoint.save(tmp_path / "train-3", checkpoint.take(net, optimizer), STATE, w))
    train(net, optimizer, 3, 3)

    other = network(seed=1)  # frozen weights come from their source, everything else from the checkpoint
    other[0].bias.data.copy_(net[0].bias)
    resumed = make_optimizer(other, recipe, "cpu")
    checkpoint.put(checkpoint.load(tmp_path / "train-3")[0], other, resumed)
    train(other, resumed, 3, 3)
    assert same(dict(other.state_dict()), dict(net.state_dict()))


def test_a_checkpoint_holds_what_training_changes() -> None:
    net = network()
    optimizer = make_optimizer(net, Recipe(task="t"), "cpu")
    train(net, optimizer, 0, 1)
    found = checkpoint.take(net, optimizer)
    trained = ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    moments = [f"moment/{kind}/{name}" for name in trained for kind in ("step", "exp_avg", "exp_avg_sq")]
    assert set(found) == {f"weight/{name}" for name in trained + buffers} | set(moments)  # no frozen 0.bias


def test_another_models_names_are_refused() -> None:
    net = network()
    state = checkpoint.take(net, torch.optim.SGD(net.parameters()))
    del state["weight/2.bias"]
    state["weight/3.bias"] = torch.zeros(2)
    with pytest.raises(TrainingError, match=r"not this model's: 2.bias, 3.bias \(2 names\)"):
        checkpoint.put(state, net, None)


def test_another_models_shapes_are_refused_before_anything_is_changed() -> None:
    net = network()
    before = {n: p.clone() for n, p in net.state_dict().items()}
    state = {name: t + 1 for name, t in checkpoint.take(net, torch.optim.SGD(net.parameters())).items()}
    state["weight/2.bias"] = torch.zeros(1)  # would be broadcast
    with pytest.raises(TrainingError, match=r"2.bias has shape \(1,\), and this model's \(2,\)"):
        checkpoint.put(state, net, None)
    assert same(dict(net.state_dict()), before)


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "index.json").write_text("{}")


def listed(folder: Path) -> list[str]:
    return [p.name for p in checkpoint.listed(folder, ["warm-up", "train"])]


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
    checkpoint.prune(tmp_path, ["warm-up", "train"], keep, spare)
    assert listed(tmp_path) == left
    assert json.loads((tmp_path / "train-10" / "index.json").read_text()) == {}


def test_a_half_written_checkpoint_is_no_checkpoint(
    together: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(together, tmp_path / "train-3")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_seal", killed)
        with pytest.raises(KeyboardInterrupt):
            together(1, lambda w: checkpoint.save(tmp_path / "train-6", tensors(), STATE, w))
    assert (tmp_path / ".train-6.tmp").is_dir()
    assert listed(tmp_path) == ["train-3"]
    save(together, tmp_path / "train-6")  # and it is in nobody's way
    assert listed(tmp_path) == ["train-3", "train-6"]
