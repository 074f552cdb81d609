"""What a task can do beside its contract: it has the method, and the engine asks for the protocol.

Each is asked by `isinstance(task, X)`, which looks at names alone: signatures are written here. From Python
3.12 on isinstance looks past `__getattr__`: a task that wraps another passes its methods on by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from isobatch.models import protocols
from isobatch.models.model_card import ModelDescription

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from isobatch.core.facts import Facts
    from isobatch.models.base import Batch, Change, StepContext, Task, Teacher


@runtime_checkable
class ChecksPlan(Protocol):
    """Another `check` where only the size is wanted: what only training reads may be missing."""

    def check_for_plan(self) -> None:
        """Raise UserError with one line if the recipe cannot be had."""


@runtime_checkable
class LeavesUnread(Protocol):
    """Common recipe fields that mean nothing to the task."""

    def unread(self) -> Mapping[str, str]:
        """Common recipe fields that change nothing here, and why: they are refused, and in no new recipe."""


@runtime_checkable
class MonitorsByData(Protocol):
    """The metric that early stopping follows depends on what the data holds."""

    def monitor_of(self, facts: Facts) -> tuple[str, str]:
        """As `Task.monitor`."""


@runtime_checkable
class HasTeacher(Protocol):
    """It learns from another model's answers."""

    def teacher(self) -> Teacher | None:
        """A frozen model to learn from beside the data."""


@runtime_checkable
class BuildsOnDevice(Protocol):
    """Its model has parts that cannot be moved after they are loaded, such as 4-bit weights."""

    def build_model_on(self, facts: Facts, device: torch.device) -> nn.Module:
        """As `build_model`; what can be moved may be on the CPU."""


@runtime_checkable
class MakesOptimizer(Protocol):
    """Its optimizer is its own, in place of --optimizer's."""

    def make_optimizer(
        self, named: Mapping[str, nn.Parameter], lr: float, device: str
    ) -> Optimizer | Sequence[Optimizer]:
        """The optimizer of the parameters that train, all of them, by name; or several, each of some of them.

        `lr`: the recipe's peak rate; in each step a group gets the schedule's, in proportion to the `lr` that
        it was made with. `device`: cpu, cuda or mps. What it keeps in `state`, tensors and numbers by
        parameter, is saved, and comes back on resume.
        """


@runtime_checkable
class TakesTurns(Protocol):
    """Each step trains a part of its parameters: a generator and a critic by turns. Single process or DDP."""

    def turn_of(self, number: int) -> str | tuple[str, ...]:
        """What the names of those parameters begin with that step `number` of a phase, from 0, trains.

        All others stay as they are, momentum and weight decay too: in this step they get no gradient.
        """


@runtime_checkable
class ScalesRates(Protocol):
    """Some of its parameters learn faster than the others."""

    def rate_share(self, name: str) -> float:
        """The learning rate of the parameter of this name, over the recipe's."""


@runtime_checkable
class BeginsPhase(Protocol):
    """It sets up the model for a phase."""

    def begin_phase(self, model: nn.Module, phase: str, first: Callable[[int], Iterable[Batch]]) -> None:
        """Before a phase: change what trains, or the model itself. `first(n)` gives training samples.

        They are the same on every machine and process, so what is measured on them may decide.
        """


@runtime_checkable
class SparseTables(Protocol):
    """Tables of which a step reads few rows."""

    def sparse_parameters(self, model: nn.Module) -> Iterable[nn.Parameter]:
        """Embedding tables that move by the rows a step reads: another optimizer, so the recipe's choice.

        Work and communication then grow with the batch and not with the table. Single process or DDP only.
        """


@runtime_checkable
class SeesGradients(Protocol):
    """It measures gradients."""

    def observe(self, model: nn.Module, step: StepContext) -> Mapping[str, float]:
        """See the whole reduced gradients before the optimizer does; figures for the step's log."""


@runtime_checkable
class MeasuresBatch(Protocol):
    """Its loss needs a figure of the whole global batch, which no micro-batch knows."""

    def measure(self, model: nn.Module, batch: Batch, step: StepContext) -> torch.Tensor:
        """0-d: a SUM over the samples of a micro-batch, computed without gradients before the losses.

        It costs a forward pass of what it reads, and a reduction of one number. `loss` finds the mean over
        the samples of the global batch as `step.measured`: neither cut nor processes can change it.
        """


@runtime_checkable
class ChangesModel(Protocol):
    """It changes its model between steps; none of its steps can be left out."""

    def after_step(self, model: nn.Module, step: StepContext) -> Change | None:
        """After the optimizer: schedules, and changes of the model, even of its shape."""


@runtime_checkable
class MatchesShapes(Protocol):
    """Its model's shape changes in training."""

    def match_shapes(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Bring a model as built to the shapes that were saved, by name; whether anything changed."""


@runtime_checkable
class KeepsRows(Protocol):
    """Its tables have a row for each of something that the data names, and data may name others later."""

    def kept_rows(self, run: Path, facts: Facts) -> tuple[Mapping[str, np.ndarray], str]:
        """(parameter -> for each of its rows the row of it in an earlier run with which it begins, a line on
        how many there are). Raises UserError where there are none.

        -1: the mean of all that are not zero; -2: zeros.
        """

    def trained_before(self, run: Path, facts: Facts) -> str:
        """A line on held-out samples that the earlier run was trained on; "" where there are none."""


@runtime_checkable
class RecordsFigures(Protocol):
    """Figures of its own in each row of the log."""

    def step_figures(self, recorded: Mapping[str, Any]) -> Mapping[str, float]:
        """Figures for the step's row of metrics.jsonl from what `loss` recorded.

        `recorded`: name -> numpy array, summed over the global batch. Called one step later, on the host:
        nothing waits for the device.
        """


@runtime_checkable
class MeasuresExport(Protocol):
    """Metrics of the finished model that no evaluation gives."""

    def final_metrics(
        self, model: nn.Module, final: Path, facts: Facts, batches: Callable[..., Iterable[Batch]]
    ) -> Mapping[str, Any]:
        """Metrics of the exported model that need more than one pass over the held-out samples.

        `batches()` gives them, test's or else valid's; `batches("valid")` those of another split.
        """


@runtime_checkable
class Answers(Protocol):
    """It writes answers to held-out prompts, for figures of each evaluation."""

    answers: int
    """How many prompts; 0 for none."""

    def prompts(self, rows: Iterable[Batch], facts: Facts) -> Sequence[Any]:
        """At most so many prompts of held-out samples; `rows` are read until there are enough."""

    def answer(self, model: nn.Module, prompt: Any, facts: Facts) -> Mapping[str, Any]:
        """What the model writes, as a row of answers.jsonl. On one process alone: without collectives."""

    def answer_figures(self, rows: Iterable[Mapping[str, Any]]) -> Mapping[str, float]:
        """Metrics of all answers."""


@runtime_checkable
class FinishesUnmeasured(Protocol):
    """Something to complete in `final` where nothing is held out."""

    def finish_unmeasured(self, model: nn.Module, final: Path) -> str:
        """In place of `final_metrics` and `final_remark` where nothing is held out: complete `final`; a line
        for the user.
        """


@runtime_checkable
class FinalRemark(Protocol):
    """A word on the finished run."""

    def final_remark(self, metrics: Mapping[str, Any]) -> str:
        """A line for the user on the metrics of the finished run, if they say that something is wrong."""


@runtime_checkable
class Samples(Protocol):
    """It can show what was learnt."""

    def sample(self, model: nn.Module, facts: Facts, folder: Path) -> str | None:
        """A line or two that shows a person what the model learnt."""


@runtime_checkable
class Describes(Protocol):
    """A model card of its own."""

    def describe_model(self, final: Path, facts: Facts) -> ModelDescription:
        """What the README.md of `final`, the exported model's folder, says of it, and how to use it."""


def all_protocols() -> Mapping[type, tuple[str, ...]]:
    """What a task can have beside its contract, here and in protocols.py -> the names of each."""
    known = [one for module in (globals(), vars(protocols)) for one in module.values()]
    asked = [one for one in known if isinstance(one, type) and getattr(one, "_is_runtime_protocol", False)]
    own = {one: {**vars(one), **vars(one).get("__annotations__", {})} for one in asked}
    return {one: tuple(n for n in names if not n.startswith("_")) for one, names in own.items()}


def monitor_of(task: Task, facts: Facts) -> tuple[str, str]:
    """The metric that early stopping and the best checkpoint follow; its good direction, min or max."""
    return task.monitor_of(facts) if isinstance(task, MonitorsByData) else task.monitor


def build_model(task: Task, facts: Facts, device: torch.device) -> nn.Module:
    """The task's model, for training on a device."""
    return task.build_model_on(facts, device) if isinstance(task, BuildsOnDevice) else task.build_model(facts)


def description_of(task: Task, final: Path, facts: Facts) -> ModelDescription:
    """What the model card says of the model: as the task does, or how its weights are opened."""
    if isinstance(task, Describes):
        return task.describe_model(final, facts)
    return ModelDescription(title=f"Model of {type(task).__name__}")
