"""Helpers of several unit tests: a plan, state in memory, a small network."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.plan import Plan
from isobatch.data import corpora
from isobatch.data.labelled import rows
from isobatch.data.text import demo_stories
from isobatch.engine.checkpointing import portable_state
from isobatch.engine.checkpointing.writer import CheckpointWriter
from isobatch.engine.optimization.parameter_groups import make_optimizer
from isobatch.tests.paths import new_cache
from isobatch.tests.tasks.failing import Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn  # noqa: TC004  heavy, and no class here has flags
    from torch.optim import Optimizer

    from isobatch.core.recipe import Recipe
    from isobatch.data.base import Source
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.loading.sampler import Sampler
    from isobatch.engine.noise.keyed_noise import KeyedNoise
    from isobatch.engine.strategies.base import Strategy
    from isobatch.engine.train.state import Training
    from isobatch.models.base import Task

_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "processes": 1,
    "nodes": 1,
    "strategy": "single",
    "precision": "fp32",
    "micro_batch_samples": 4,
    "micro_batch_tokens": 60,
    "pad_multiple": 1,
    "micro_batch_cost": 4.0,
    "workers": 0,
    "prefetch": 2,
    "pin_memory": False,
    "compile": "off",
    "activation_checkpointing": "off",
    "attention": "sdpa",
    "pack": False,
    "reduction": "explicit",
    "threads": 1,
    "invariance": "exact",
    "predicted_peak_memory_bytes": 0,
    "predicted_step_seconds": 1.0,
    "calibrated": False,
}


def plan(**changes: Any) -> Plan:
    """One process of a CPU, but for these fields."""
    return Plan(**{**_DEFAULTS, **changes})


@contextlib.contextmanager
def small_demos(cache: Path) -> Iterator[None]:
    """The demos hold a part of their texts, in a cache of their own: where nobody asks what is learnt."""
    files, packages = corpora.demo_files()[::4], {k: v[:4] for k, v in rows.demo_files().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ISOBATCH_CACHE", new_cache(cache))
        patch.setattr(demo_stories, "STORIES", {"train": 300, "valid": 100})
        patch.setattr(corpora, "demo_files", lambda: files)
        patch.setattr(rows, "demo_files", lambda: packages)
        yield


def optimizer_of(model: nn.Module, recipe: Recipe, sparse: Sequence[nn.Parameter] = ()) -> Optimizer:
    """The recipe's, on a CPU."""
    return make_optimizer(Line(recipe, None), model, "cpu", sparse)


def training(
    task: Task,
    strategy: Strategy,
    source: Source,
    sampler: Sampler,
    noise: KeyedNoise | None = None,
    steps: int = 3,
) -> Training:
    """A phase of a task in which a strategy holds the model already."""
    from isobatch.engine.optimization.schedule import PhaseSchedule
    from isobatch.engine.runs.summary import Progress
    from isobatch.engine.train.state import Binding, StepLayout, Training
    from isobatch.models.base import CachedWeightTransform

    layout = StepLayout(
        transforms=[m for m in strategy.unwrapped.modules() if isinstance(m, CachedWeightTransform)]
    )
    facts: Any = None
    schedule = PhaseSchedule("train", steps, sampler.steps_per_epoch, task.recipe.lr, eval_every=100)
    return Training(
        task, facts, strategy.plan, strategy.world, {"train": source}, sampler, Progress("train"),
        strategy.unwrapped, Binding(noise), schedule, strategy, layout,
    )  # fmt: skip


@dataclass(frozen=True)
class InMemoryState:
    """Portable state by name, with the interface of a checkpoint on disk."""

    tensors: dict[str, Tensor]

    @property
    def entries(self) -> Mapping[str, portable_state.TensorEntry]:
        return {name: portable_state.tensor_entry(t) for name, t in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name].clone()


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    import torch

    return found.keys() == wanted.keys() and all(
        torch.equal(found[n], t) and found[n].dtype == t.dtype and found[n].shape == t.shape
        for n, t in wanted.items()
    )


def network(seed: int = 0) -> nn.Module:
    """One with buffers and a frozen weight."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    net[0].bias.requires_grad = False
    return net


def train(net: nn.Module, optimizer: Optimizer, first: int, steps: int) -> None:
    """Steps on data of their number."""
    import torch

    for number in range(first, first + steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_checkpoint(
    folder: Path, state: portable_state.PortableState, facts: Mapping[str, Any], world: Communicator
) -> None:
    """Write a checkpoint and wait for it. All ranks call this."""
    writer = CheckpointWriter(world)
    writer.start(folder, state, facts)
    writer.wait()
