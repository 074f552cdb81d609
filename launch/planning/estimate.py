"""What a recipe takes on a machine: whether it fits, the hours of the whole run, and its cost."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.package import cache_folder
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.loading.data_rate import DataRate, measure_data_rate
from isobatch.engine.machine.hardware import Hardware
from isobatch.engine.machine.history import machine_record
from isobatch.engine.planning.explanations import length_flag
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import Workload
from isobatch.launch.planning.run_time import RunTime, most_energy, run_time
from isobatch.models.base import ModelSize

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.launch.planning.prices import Prices
    from isobatch.models.base import Task

SHORTEST = 16
"""Tokens below which nobody would cut a sample to make it fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A recipe with its data's facts, for one machine."""

    name: str
    """The machine, or the mode: what tells it from those beside it."""
    workload: Workload
    recipe: Recipe
    facts: Facts
    hardware: Hardware
    asked: PlanOptions

    @property
    def task(self) -> Task:
        """The task object of the recipe."""
        return self.workload.make(self.recipe)[0]

    def plan(self, model_size: ModelSize | None = None) -> Plan:
        """The plan. Raises UserError where none fits."""
        size = model_size or self.task.model_size(self.facts)
        record = machine_record(self.hardware, cache_folder())
        return make_plan(self.recipe, self.facts, size, self.hardware, self.asked, measured=record)

    def data_rate(self) -> DataRate | None:
        """How fast samples are read here: a measurement of 0.1 s. None for a machine that is elsewhere."""
        if self.hardware.source != "detected" or not self.facts.folder:
            return None
        data = self.workload.make(self.recipe)[1]
        return measure_data_rate(data.open(Path(self.facts.folder), "train"), self.recipe.batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The prediction for a target; all but the name, the machine and `why_not` are None where none fits."""

    target: Target
    model_size: ModelSize | None = None
    plan: Plan | None = None
    why_not: str = ""
    time: RunTime | None = None
    rate: DataRate | None = None
    """How fast samples are read; None where the data or the machine is not here."""
    price: float | None = None
    """Of the machine for an hour; None where it is not known."""

    @property
    def steps(self) -> int | None:
        """Optimizer steps of all phases."""
        return self.time.steps if self.time else None

    @property
    def seconds(self) -> float | None:
        """Of the whole run, from the command to its end."""
        return self.time.total if self.time else None

    @property
    def energy(self) -> float | None:
        """kWh of the GPUs at their power limit, an upper bound; None where none is known."""
        if self.plan is None or self.seconds is None:
            return None
        return most_energy(self.seconds, self.plan, self.target.hardware)

    @property
    def fits(self) -> bool:
        return self.plan is not None

    @property
    def memory(self) -> int:
        """Bytes of the device that a process trains on."""
        hardware = self.target.hardware
        on_gpu = hardware.gpus and (self.plan is None or self.plan.device != "cpu")
        return hardware.gpu.memory_bytes if on_gpu else hardware.ram_bytes

    @property
    def cost(self) -> float | None:
        """Price of the whole run."""
        return None if self.price is None or self.seconds is None else self.price * self.seconds / 3600

    def meets(self, deadline: float | None) -> bool:
        """Whether the run ends within `deadline` seconds, or at all where there is no deadline."""
        return self.seconds is not None and (deadline is None or self.seconds <= deadline)

    def to_dict(self, deadline: float | None) -> dict[str, Any]:
        """The row of the JSON answer."""
        plan = self.plan
        return {
            "name": self.target.name,
            "machine": self.target.hardware.describe(),
            "recipe": self.target.recipe.hash(),
            "global_batch": self.target.recipe.batch_size,
            "fits": self.fits,
            "why_not": self.why_not,
            "devices": self.target.hardware.devices,
            "devices_used": plan and plan.processes,
            "steps": self.steps,
            "step_seconds": plan and plan.predicted_step_seconds,
            "run_seconds": self.seconds,
            "run_seconds_by_part": self.time and self.time.to_dict(),
            "most_energy_kwh": self.energy,
            "peak_memory_bytes": plan and plan.predicted_peak_memory_bytes,
            "memory_bytes": self.memory,
            "price_per_hour": self.price,
            "cost": self.cost,
            "meets_deadline": None if deadline is None else self.meets(deadline),
            "calibrated": plan and plan.calibrated,
            "strategy": plan and plan.strategy,
        }


def estimate(target: Target, prices: Prices | None, model_size: ModelSize | None = None) -> Estimate:
    """The estimate of a target; what keeps it from fitting stands in `why_not`."""
    price = prices.per_hour(target.hardware) if prices else None
    task = target.task
    try:
        model_size = model_size or task.model_size(target.facts)
        plan = target.plan(model_size)
    except UserError as error:
        return Estimate(target=target, model_size=model_size, why_not=str(error), price=price)
    rate = target.data_rate()
    return Estimate(
        target=target,
        model_size=model_size,
        plan=plan,
        time=run_time(plan, target.recipe, target.facts, task, model_size, target.hardware, rate),
        rate=rate,
        price=price,
    )


def what_would_fit(target: Target) -> list[str]:
    """Flags under which a recipe that does not fit on the target would; each is another recipe."""
    return [flags for flags, other in _smaller(target) if _fits(other)]


def with_what_would_fit(found: Estimate) -> str:
    """The error of an estimate that does not fit, with the flags under which it would."""
    smaller = what_would_fit(found.target)
    return found.why_not + (f"; it fits with {' or '.join(smaller)}" if smaller else "")


def _fits(target: Target) -> bool:
    try:
        target.plan()
    except UserError:
        return False
    return True


def _smaller(target: Target) -> Iterator[tuple[str, Target]]:
    """Recipes that need less memory: (flags, target); of sample lengths only the longest that fits."""
    recipe = target.recipe
    for flags, values in target.task.memory_saving_flags().items():
        other = dataclasses.replace(recipe, options={**recipe.options, **values})
        yield flags, dataclasses.replace(target, recipe=other)
    if recipe.optimizer == "adamw":
        for name in (name for name, traits in OPTIMIZERS.items() if traits.remark):
            yield (
                f"--optimizer {name}",
                dataclasses.replace(target, recipe=dataclasses.replace(recipe, optimizer=name)),
            )
    length = target.facts.longest // target.workload.task.rows_per_sample // 2
    while length >= SHORTEST and not _fits(cut := _with_length(target, length)):
        length //= 2
    if length >= SHORTEST:
        yield f"{length_flag(target.facts)} {length}", cut


def _with_length(target: Target, length: int) -> Target:
    """The target with rows of at most `length` tokens."""
    of_sample = length * target.workload.task.rows_per_sample
    lengths = tuple(min(of_sample, found) for found in target.facts.lengths)
    return dataclasses.replace(
        target,
        recipe=dataclasses.replace(target.recipe, max_length=length),
        facts=dataclasses.replace(target.facts, lengths=lengths),
    )
