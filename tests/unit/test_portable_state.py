"""Tests of engine/checkpointing/portable_state.py: every element once, evenly over the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from isobatch.core.errors import TrainingError
from isobatch.core.recipe import Recipe
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.checkpoint import CheckpointTexts, SavedCheckpoint
from isobatch.tests.unit.helpers import InMemoryState, network, optimizer_of, same, train

if TYPE_CHECKING:
    from pathlib import Path

SIZES = st.dictionaries(st.text("abc/.", min_size=1, max_size=6), st.integers(0, 97), min_size=1, max_size=8)


@given(SIZES, st.integers(1, 5))
def test_shares_hold_every_element_once_and_are_even(sizes: dict[str, int], world: int) -> None:
    shares = [list(portable_state.element_ranges(sizes, rank, world)) for rank in range(world)]
    for name, size in sizes.items():
        covered = [i for share in shares for n, start, stop in share if n == name for i in range(start, stop)]
        assert covered == list(range(size))
    counts = [sum(stop - start for _, start, stop in share) for share in shares]
    assert max(counts) - min(counts) <= 1


def test_state_is_what_training_changes() -> None:
    net = network()
    optimizer = optimizer_of(net, Recipe(task="t"))
    train(net, optimizer, 0, 1)
    found = portable_state.collect_state(net, optimizer)
    trained = ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    moments = [f"moment/{kind}/{name}" for name in trained for kind in ("step", "exp_avg", "exp_avg_sq")]
    assert set(found) == {f"weight/{name}" for name in trained + buffers} | set(moments)  # no frozen 0.bias


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adafactor"])
def test_state_put_into_another_model_is_its_state(kind: Any) -> None:
    nets = network(), network(seed=1)
    optimizers = [optimizer_of(net, Recipe(task="t", optimizer=kind)) for net in nets]
    train(nets[0], optimizers[0], 0, 2)
    wanted = portable_state.collect_state(nets[0], optimizers[0])
    portable_state.load_weights(InMemoryState(wanted), nets[1])
    portable_state.load_moments(InMemoryState(wanted), nets[1], optimizers[1])
    assert same(portable_state.collect_state(nets[1], optimizers[1]), wanted)


def on_gpu(**shapes: tuple[int, ...]) -> Any:
    """Parameters on a GPU, within FakeTensorMode."""
    net = nn.Module()
    for name, shape in shapes.items():
        net.register_parameter(name, nn.Parameter(torch.empty(shape, device="cuda")))
    return net


@pytest.mark.parametrize(("fused", "device"), [(True, "cuda"), (False, "cpu")])
def test_step_counts_go_where_the_optimizer_wants_them(fused: bool, device: str) -> None:
    """A fused update on a GPU refuses a count on the host; others want it there."""
    with FakeTensorMode():
        net = on_gpu(weight=(2, 2))
        optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
        moments = {"step": torch.ones(()), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.ones(2, 2)}
        saved = InMemoryState({f"moment/{kind}/weight": value for kind, value in moments.items()})
        portable_state.load_moments(saved, net, optimizer)
        found = {kind: value.device.type for kind, value in optimizer.state[net.weight].items()}
        assert found == {"step": device, "exp_avg": "cuda", "exp_avg_sq": "cuda"}
        net.weight.grad = torch.ones(2, 2, device="cuda") if fused else None  # else it reads the count
        optimizer.step()


def bare(net: nn.Module) -> dict[str, Tensor]:
    return portable_state.collect_state(net, torch.optim.SGD(net.parameters()))


def test_another_models_names_are_refused() -> None:
    net = network()
    state = bare(net)
    del state["weight/2.bias"]
    state["weight/3.bias"] = torch.zeros(2)
    with pytest.raises(TrainingError, match=r"not this model's: 2.bias, 3.bias \(2 names\)"):
        portable_state.load_weights(InMemoryState(state), net)


def test_another_models_shapes_are_refused_before_anything_is_changed() -> None:
    net = network()
    before = {n: p.clone() for n, p in net.state_dict().items()}
    state = {name: t + 1 for name, t in bare(net).items()}
    state["weight/2.bias"] = torch.zeros(1)  # would be broadcast
    with pytest.raises(TrainingError, match=r"2.bias has shape \(1,\), and this model's \(2,\)"):
        portable_state.load_weights(InMemoryState(state), net)
    assert same(dict(net.state_dict()), before)


@pytest.mark.parametrize("weights", [None, "ema", ["../ema"], ["/ema"], [".."], [""], [1]])
def test_a_checkpoint_that_names_a_folder_elsewhere_is_damaged(weights: Any, tmp_path: Path) -> None:
    """A hook's weights are exported to final/NAME, also by who verifies a received run."""
    layout: Any = SimpleNamespace(entries={})
    saved = SavedCheckpoint(tmp_path, CheckpointTexts(layout, {"weights": weights}, []))
    with pytest.raises(TrainingError, match="does not name its hooks"):
        saved.hooks_with_weights()
