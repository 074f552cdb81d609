"""What a recipe takes on a machine: whether it fits, how long the whole run takes, and what it costs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.plan import REHEARSED_STEPS, Plan
from isobatch.engine.loading.data_rate import DataRate
from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.planning.alternatives import seconds_of_waiting
from isobatch.engine.planning.calibration import gpu_constants
from isobatch.engine.planning.choices import compile_seconds
from isobatch.engine.planning.cost_model import steps_per_epoch
from isobatch.engine.planning.parallel_layout import length_flag
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.launch.planning.targets import Target, price_per_hour
from isobatch.models.base import ModelSize

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe
    from isobatch.engine.machine.hardware import Hardware
    from isobatch.models.base import Task

SHORTEST = 16
"""Tokens below which nobody would cut a sample to make it fit."""
START_SECONDS, CHILDREN_SECONDS = 5.5, 6.0
"""To import the libraries and build a small model; what a launcher of processes adds (measured)."""
LOAD_BANDWIDTH = 1e8
"""Bytes/s of weights that are opened, checked and copied (measured: 0.1 to 0.5 GB on a CPU)."""
FIRST_STEP = 0.6
"""What the first step takes longer, in steps: it allocates and reads for the first time (measured)."""
ROUNDED_EVALUATIONS = 3
"""Evaluations at the end of a run that rounds: the model, its rounded form and the written file."""
EXPORT_SECONDS = 1.5
"""To write final/ and its sample, apart from its bytes (measured)."""
DISK_BANDWIDTH = 5e8
"""Bytes/s of a checkpoint or an export (uncalibrated)."""
FORWARD_SHARE = 1 / 3
"""Of a step's arithmetic: an evaluation has no backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTime:
    """How long a run takes."""

    steps: int
    """Optimizer steps of all phases."""
    parts: dict[str, float]
    """Seconds of its start, compile, train, read (what training waits for its samples), evaluate, save (what
    its end waits for the last checkpoint; the others are written meanwhile) and export."""

    @property
    def total(self) -> float:
        """Seconds from the command to the end."""
        return sum(self.parts.values())


def run_time(
    plan: Plan,
    recipe: Recipe,
    facts: Facts,
    task: Task,
    size: ModelSize,
    hardware: Hardware,
    rate: DataRate | None = None,
) -> RunTime:
    """Predicted seconds of a run by its plan. `rate`: how fast samples are read, if that was measured."""
    step = plan.predicted_step_seconds
    schedules = phase_schedules(recipe, task.phases(), steps_per_epoch(recipe, facts))
    steps = sum(schedule.steps for schedule in schedules)
    # Where a phase rounds, its first steps are computed twice before.
    first = FIRST_STEP + (2 * REHEARSED_STEPS if size.rounds else 0)
    start = START_SECONDS + (CHILDREN_SECONDS if plan.processes > 1 else 0.0)
    constants = gpu_constants(hardware.gpu.card if hardware.gpus else None)
    lengths = {math.ceil(n / plan.pad_multiple) for n in facts.lengths}
    # The evaluation at a phase's end belongs to the run's end.
    often = sum((s.steps - 1) // max(1, s.eval_every) for s in schedules)
    valid = math.ceil(facts.samples.get("valid", 0) * recipe.eval_fraction)
    held_out = sum(facts.samples.get(split, 0) for split in HELD_OUT_SPLITS)
    evaluated = often * valid + (ROUNDED_EVALUATIONS if size.rounds else 1) * held_out
    parts = {
        "start": start + size.weight_bytes / LOAD_BANDWIDTH + first * step,
        "compile": compile_seconds(size, constants, lengths) if plan.compile != "off" else 0.0,
        "train": steps * step,
        "read": 0.0 if rate is None else steps * seconds_of_waiting(plan, recipe, facts, rate),
        "evaluate": evaluated * (FORWARD_SHARE * step / recipe.batch_size),
        "save": (size.weight_bytes + 8.0 * size.trainable) / DISK_BANDWIDTH,
        "export": EXPORT_SECONDS + size.weight_bytes / DISK_BANDWIDTH,
    }
    return RunTime(steps=steps, parts=parts)


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
    def seconds(self) -> float | None:
        """Of the whole run, from the command to its end."""
        return self.time.total if self.time else None

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
        plan, time = self.plan, self.time
        return {
            "name": self.target.name,
            "machine": self.target.hardware.describe(),
            "recipe": self.target.recipe.hash(),
            "global_batch": self.target.recipe.batch_size,
            "fits": self.fits,
            "why_not": self.why_not,
            "devices": self.target.hardware.devices,
            "devices_used": plan and plan.processes,
            "steps": time and time.steps,
            "step_seconds": plan and plan.predicted_step_seconds,
            "run_seconds": self.seconds,
            "run_seconds_by_part": time and {name: round(part, 3) for name, part in time.parts.items()},
            "peak_memory_bytes": plan and plan.predicted_peak_memory_bytes,
            "memory_bytes": self.memory,
            "price_per_hour": self.price,
            "cost": self.cost,
            "meets_deadline": None if deadline is None else self.meets(deadline),
            "calibrated": plan and plan.calibrated,
            "strategy": plan and plan.strategy,
        }


def estimate(target: Target, prices: Mapping[str, float], model_size: ModelSize | None = None) -> Estimate:
    """The estimate of a target; what keeps it from fitting stands in `why_not`."""
    price = price_per_hour(target.hardware, prices)
    task = target.task
    try:
        model_size = model_size or task.model_size(target.facts)
        plan = target.plan(model_size)
    except UserError as error:
        return Estimate(target=target, model_size=model_size, why_not=str(error), price=price)
    rate = target.data_rate()
    time = run_time(plan, target.recipe, target.facts, task, model_size, target.hardware, rate)
    return Estimate(target=target, model_size=model_size, plan=plan, time=time, rate=rate, price=price)


def with_what_would_fit(found: Estimate) -> str:
    """The error of an estimate that does not fit, with the flags under which it would."""
    smaller = what_would_fit(found.target)
    return found.why_not + (f"; it fits with {' or '.join(smaller)}" if smaller else "")


def what_would_fit(target: Target) -> list[str]:
    """Flags under which a recipe that does not fit on the target would; each is another recipe."""
    return [flags for flags, other in _smaller(target) if _fits(other)]


def _fits(target: Target) -> bool:
    try:
        target.plan()
    except UserError:
        return False
    return True


def _smaller(target: Target) -> Iterator[tuple[str, Target]]:
    """Recipes that need less memory: (flags, target); of sample lengths only the longest that fits."""
    recipe, facts, rows = target.recipe, target.facts, target.workload.task.rows_per_sample

    def changed(**values: Any) -> Target:
        return dataclasses.replace(target, recipe=dataclasses.replace(recipe, **values))

    for flags, values in target.task.memory_saving_flags().items():
        yield flags, changed(options={**recipe.options, **values})
    if recipe.optimizer == "adamw":
        for name in (name for name, traits in OPTIMIZERS.items() if traits.remark):
            yield f"--optimizer {name}", changed(optimizer=name)
    length = facts.longest // rows // 2
    while length >= SHORTEST:
        short = dataclasses.replace(facts, lengths=tuple(min(length * rows, n) for n in facts.lengths))
        cut = dataclasses.replace(changed(max_length=length), facts=short)
        if _fits(cut):
            yield f"{length_flag(facts)} {length}", cut
            return
        length //= 2
