"""Tests of engine/train/first_step.py: the first step checks what loss() returns and changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isobatch.core.errors import TrainingError
from isobatch.core.recipe import Recipe
from isobatch.data.base import ArraySource
from isobatch.engine.loading.device_copies import HostCopy
from isobatch.engine.loading.loader import LoadedStep, StepWork
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.model_setup.layer_blocks import checkpoint_activations
from isobatch.engine.noise.keyed_attention import key_dropout
from isobatch.engine.noise.keyed_noise import KeyedNoise
from isobatch.engine.optimization.schedule import PhaseSchedule
from isobatch.engine.runs.summary import Progress
from isobatch.engine.strategies.replicated import ReplicatedStrategy
from isobatch.engine.train import first_step, loop
from isobatch.engine.train.figures import StepOutput
from isobatch.engine.train.hooks import Hooks, Seen
from isobatch.engine.train.loop import run_phase
from isobatch.engine.train.state import StepLayout
from isobatch.models.base import Batch, Loss, Phase, StepContext, Task
from isobatch.tests.unit.helpers import optimizer_of, plan, training

COUNT, WIDTH = 24, 5
RECIPE = Recipe(task="tiny", batch_size=12, lr=0.1, optimizer="sgd")


class Net(nn.Module):
    """Dropout twice in one forward, and a buffer that every forward in training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.3))])
        self.out = nn.Linear(8, 1)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return self.out(self.layers[0](x))


class Grown(Net):
    """Noise that nobody can key."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 1, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.gru(x)[0])


class Sums(Task):
    """A squared error over the columns, with noise of its own."""

    def build_model(self, facts: Any) -> nn.Module:
        return Net()

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        return {"loss": Loss(self.errors(model, batch, step).sum(), "sample")}

    def errors(self, model: nn.Module, batch: Batch, step: StepContext) -> Tensor:
        shake = step.noise.normal("shake", (WIDTH, 1)) if self.recipe.noise == "keyed" else 0.0
        return (model(batch["x"][..., None] + shake)[..., 0] - 3).square().mean(1)


class Means(Sums):
    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        errors = self.errors(model, batch, step)
        return {"fine": Loss(errors.sum(), "sample"), "odd": Loss(errors.mean(), "sample")}


class Contrast(Sums):
    """Every sample against the others of its group of four, or of its whole micro-batch."""

    cohort = 4

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        scores = self.errors(model, batch, step)
        groups = scores.view(-1, self.group) if self.group else scores[None]
        return {"loss": Loss((groups.logsumexp(1, keepdim=True) - groups).sum(), "cohort")}

    group = 4


class Loose(Contrast):
    group = 0


class Nothing(Sums):
    """Parts that come to nothing, or whose samples cancel."""

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        errors = self.errors(model, batch, step)
        sign = 1.0 - 2.0 * (batch["index"] % 2)
        return {
            "zero": Loss(0 * errors.mean(), "sample"),
            "signed": Loss((sign * errors.detach()).sum(), "sample"),
            "sum": Loss(errors.sum(), "sample"),
        }


class Rounds(Sums):
    """A few samples' loss moves by 3 % with what is computed beside them."""

    def phases(self) -> list[Phase]:
        return [Phase(rounds=True)]

    def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> dict[str, Loss]:
        errors = self.errors(model, batch, step)
        return {"sum": Loss(errors.sum() * (1 + 0.03 * (len(errors) % 2)), "sample")}


class Equal(ReplicatedStrategy):
    """As ZeRO 3, whose ranks must compute as often as each other."""

    equal_counts = True


def source() -> ArraySource:
    values = np.random.default_rng(0).normal(size=(COUNT, WIDTH)).astype(np.float32)
    return ArraySource({"x": values})


def trained(
    world: Any,
    task: type[Task] = Sums,
    net: type[nn.Module] = Net,
    strategy: type[ReplicatedStrategy] = ReplicatedStrategy,
    half: bool = False,
    noise: str = "keyed",
    micro: int = 5,
    checkpointed: bool = False,
) -> dict[str, Any]:
    """Three steps: all that could differ where something was left behind."""
    recipe = dataclasses.replace(RECIPE, noise=noise)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model, keyed = net(), KeyedNoise(0) if noise == "keyed" else None
    if keyed is not None:
        key_dropout(model, keyed)
    if checkpointed:
        checkpoint_activations(model, "on", keyed=keyed is not None)
    chosen = plan(processes=world.size, micro_batch_samples=micro)
    made = strategy(model.train(), lambda model: optimizer_of(model, recipe), chosen, world, recipe.clip)
    if half:
        world.plan.precision = "bf16"
    order = Sampler(COUNT, recipe.batch_size, 0, cohort=task.cohort)
    seen = Seen()
    run_phase(training(task(recipe, None), made, source(), order, keyed), Hooks([seen]))
    sums = [figures.output.sums.read() for figures in seen.figures]
    calls = [site.calls for site in keyed.sites.values()] if keyed else []
    state = {name: t.tolist() for name, t in model.state_dict().items()}
    return {"sums": sums, "calls": calls, "state": state, "generator": torch.get_rng_state().tolist()}


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was held against each other: empty where nothing was."""
    found: list[Any] = []
    really = first_step.refuse_means

    def looking(*words: Any) -> None:
        found.append(words)
        really(*words)

    monkeypatch.setattr(first_step, "refuse_means", looking)
    return found


@pytest.mark.parametrize(
    ("settings", "looks"),
    [
        ({}, 1),
        ({"checkpointed": True}, 1),
        ({"half": True}, 1),
        ({"noise": "native"}, 0),  # its dropout differs by itself
        ({"net": Grown}, 0),
        ({"task": Rounds}, 0),
        ({"task": Contrast, "micro": 8}, 1),
        ({"task": Nothing}, 1),
        ({"strategy": Equal}, 0),
        ({"micro": 1}, 0),
        ({"task": Contrast, "micro": 4}, 0),
    ],
)
def test_looking_changes_nothing_that_is_learnt(
    settings: dict[str, Any], looks: int, run_ranks: Any, looked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = run_ranks(1, partial(trained, **settings)).values
    assert len(looked) == looks
    monkeypatch.setattr(loop, "check_sums", lambda *_: None)
    assert run_ranks(1, partial(trained, **settings)).values == [found]


@pytest.mark.parametrize("settings", [{}, {"half": True}, {"micro": 2}])
def test_a_mean_is_refused(settings: dict[str, Any], run_ranks: Any) -> None:
    with pytest.raises(
        TrainingError, match=r"part odd is not a sum over samples: .* return the sum"
    ) as error:
        run_ranks(1, partial(trained, task=Means, **settings))
    words = str(error.value).split()
    one, two = float(words[words.index("gives") + 1].strip(",")), float(words[words.index("together;") - 1])
    assert two / one == pytest.approx(2, rel=0.5)
    assert "\n" not in str(error.value)


def test_samples_that_need_each_other_need_a_cohort(run_ranks: Any) -> None:
    with pytest.raises(TrainingError, match=r"part loss is not a sum .* declare cohort if samples need each"):
        run_ranks(1, partial(trained, task=Loose, micro=8))


def returns(losses: Any) -> type[Sums]:
    """A task whose loss() is this of the batch's squared errors."""

    class Returning(Sums):
        def loss(self, model: nn.Module, batch: Batch, step: StepContext) -> Any:
            return losses(self.errors(model, batch, step))

    return Returning


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["loss", "kl"], "a part called loss, the name of the sum of all parts"),
        (["kl", "lr"], "a part called lr, the name of another field of metrics.jsonl"),
        (["final"], "a part called final, the name of another field of metrics.jsonl"),
    ],
)
def test_a_part_has_a_name_of_its_own(names: list[str], problem: str, run_ranks: Any) -> None:
    task = returns(lambda errors: {name: Loss(errors.sum(), "sample") for name in names})
    with pytest.raises(TrainingError, match=problem):
        run_ranks(1, partial(trained, task=task))


def test_every_field_of_a_row_is_reserved() -> None:
    loaded, one = LoadedStep(StepWork(0, np.arange(3), {}, 3, [], 0.0)), HostCopy(torch.ones(1))
    schedule = PhaseSchedule("train", 3, 3, 0.1, 1)
    world = SimpleNamespace(waiting_for=lambda _: contextlib.nullcontext())
    layout, progress = StepLayout(["loss"]), Progress("train")
    state: Any = SimpleNamespace(progress=progress, schedule=schedule, world=world, layout=layout)
    figures = StepOutput(loaded, 0.1, one, one, ["loss"]).read(state)
    assert figures is not None
    assert figures.row.keys() - {"loss"} <= first_step.RESERVED
    first_step.refuse_names(["loss"])  # the only part may be called what it is
