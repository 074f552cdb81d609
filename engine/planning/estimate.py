"""What a recipe takes on a machine: whether it fits, how long the whole run takes, and what it costs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.package import cache_folder
from isobatch.core.plan import REHEARSED_STEPS, Plan, PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.machine.ceilings import ceilings_of
from isobatch.engine.machine.gpu_table import MACHINES, named_model
from isobatch.engine.machine.hardware import Hardware
from isobatch.engine.optimization.schedule import PhaseSchedule, schedules_of
from isobatch.engine.planning import calibration
from isobatch.engine.planning.choices import compile_seconds
from isobatch.engine.planning.cost_model import steps_per_epoch
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import LoadedWorkload
from isobatch.engine.runs.summary import HELD_OUT_SPLITS
from isobatch.models.base import ModelSize, Task

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
RANKED_SECONDS = 1.5e-8
"""Of a core of an AMD EPYC, to rank one score of a held-out sample."""
RANKINGS_TO_TUNE, RANKINGS_OF_KEPT = 20, 7
"""Of a split at the end of a run that ranks: to choose the baselines' settings, and of all that is kept."""
FORWARD_SHARE = 1 / 3
"""Of a step's arithmetic: an evaluation has no backward pass."""
PRICE = r"[$€]?(\d+(?:\.\d+)?)(?:/h)?"


@dataclass(frozen=True, slots=True)
class Target:
    """A recipe with its data's facts, for one machine."""

    name: str
    """The machine, as a user named it."""
    workload: LoadedWorkload
    recipe: Recipe
    facts: Facts
    hardware: Hardware
    asked: PlanOptions
    world: int | None = None
    """The number of processes, where a launcher started them already."""

    @property
    def task(self) -> Task:
        """The task object of the recipe."""
        return self.workload.make(self.recipe)[0]

    def plan(self, size: ModelSize | None = None) -> Plan:
        """The plan. Raises UserError where none fits."""
        size = size or self.task.model_size(self.facts)
        rates, world = ceilings_of(self.hardware, cache_folder()), self.world
        return make_plan(
            self.recipe, self.facts, size, self.hardware, self.asked, world=world, measured=rates
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """The prediction for a target; without a plan where none fits."""

    target: Target
    price: float | None = None
    """Of the machine for an hour; None where it is not known."""
    size: ModelSize | None = None
    plan: Plan | None = None
    why_not: str = ""
    """What keeps it from fitting."""
    steps: int | None = None
    """Optimizer steps of all phases."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Part of the run -> seconds: see `run_time`."""

    @property
    def seconds(self) -> float | None:
        """Of the whole run, from the command to its end."""
        return sum(self.parts.values()) if self.plan else None

    @property
    def is_measured(self) -> bool:
        """Whether the times rest on rates of this device; those of a processor are measured where it is."""
        is_here = self.target.hardware.source == "detected"
        return self.plan is not None and self.plan.calibrated and (is_here or self.plan.device != "cpu")

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds that the whole run may take on an idle machine, by what predictions have missed."""
        seconds = self.seconds or 0.0
        if self.is_measured:
            return calibration.RUN_ERROR[0] * seconds, calibration.RUN_ERROR[1] * seconds
        start = calibration.UNMEASURED_START if self.plan and self.plan.device == "cuda" else 0.0
        return seconds / calibration.UNMEASURED_ERROR, seconds * calibration.UNMEASURED_ERROR + start

    @property
    def used(self) -> tuple[int, int]:
        """(GPUs that compute, GPUs there are), or cores on a processor."""
        hardware, plan = self.target.hardware, self.plan
        assert plan is not None
        if plan.device != "cpu":
            return min(plan.processes, self.target.recipe.batch_size), max(plan.processes, hardware.devices)
        cores = hardware.cpus * hardware.nodes
        return min(cores, plan.processes * plan.threads), cores

    @property
    def stretch(self) -> float:
        """How many times as long the run takes beside what runs on this machine now, at a fair share of its
        cores by the load of the last minute; 1 on others, and where a GPU computes.
        """
        on_cores = self.target.hardware.source == "detected" and self.plan and self.plan.device == "cpu"
        return 1 + os.getloadavg()[0] / (os.cpu_count() or 1) if on_cores else 1.0

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
        plan, target = self.plan, self.target
        return {
            "name": target.name,
            "machine": target.hardware.describe(),
            "recipe": target.recipe.hash(),
            "global_batch": target.recipe.batch_size,
            "fits": plan is not None,
            "why_not": self.why_not,
            "devices": target.hardware.devices,
            "devices_used": plan and plan.processes,
            "steps": self.steps,
            "step_seconds": plan and plan.predicted_step_seconds,
            "run_seconds": self.seconds,
            "run_seconds_interval": plan and self.interval,
            "stretch_by_load": plan and round(self.stretch, 2),
            "run_seconds_by_part": plan and {name: round(part, 3) for name, part in self.parts.items()},
            "peak_memory_bytes": plan and plan.predicted_peak_memory_bytes,
            "memory_bytes": self.memory,
            "price_per_hour": self.price,
            "cost": self.cost,
            "meets_deadline": None if deadline is None else self.meets(deadline),
            "calibrated": plan and plan.calibrated,
            "strategy": plan and plan.strategy,
        }


def estimate(target: Target, prices: Mapping[str, float], size: ModelSize | None = None) -> Estimate:
    """The estimate of a target; what keeps it from fitting stands in `why_not`."""
    price = price_per_hour(target.hardware, prices)
    try:
        size = size or target.task.model_size(target.facts)
        plan = target.plan(size)
    except UserError as error:
        return Estimate(target=target, price=price, size=size, why_not=str(error))
    steps, parts = run_time(target, plan, size)
    return Estimate(target=target, price=price, size=size, plan=plan, steps=steps, parts=parts)


def run_time(target: Target, plan: Plan, size: ModelSize) -> tuple[int, dict[str, float]]:
    """Optimizer steps of all phases, and the predicted seconds of a run's start, compile, train, evaluate,
    save (what its end waits for the last checkpoint; the others are written meanwhile) and export.
    """
    recipe, facts, step = target.recipe, target.facts, plan.predicted_step_seconds
    schedules = schedules_of(target.task, facts, steps_per_epoch(recipe, facts))
    steps = sum(schedule.steps for schedule in schedules)
    # Where a phase rounds, its first steps are computed twice before.
    first = FIRST_STEP + (2 * REHEARSED_STEPS if size.rounds else 0)
    start = START_SECONDS + (CHILDREN_SECONDS if plan.processes > 1 else 0.0)
    machine = target.hardware
    known = calibration.gpu_constants(machine.gpu) if machine.gpus else calibration.PUBLISHED
    lengths = {math.ceil(n / plan.pad_multiple) for n in facts.lengths}
    return steps, {
        "start": start + size.weight_bytes / LOAD_BANDWIDTH + first * step,
        "compile": compile_seconds(known, lengths, plan.compile),
        "train": steps * step,
        "evaluate": evaluation_seconds(recipe, facts, schedules, size, plan),
        "save": (size.weight_bytes + 8.0 * size.trainable) / DISK_BANDWIDTH,
        "export": EXPORT_SECONDS + size.weight_bytes / DISK_BANDWIDTH,
    }


def evaluation_seconds(
    recipe: Recipe, facts: Facts, schedules: Sequence[PhaseSchedule], size: ModelSize, plan: Plan
) -> float:
    """Predicted seconds of all evaluations of a run, those of what its end fits and, on a processor, ranks
    among them.
    """
    # The evaluation at a phase's end belongs to the run's end.
    often = sum((s.steps - 1) // max(1, s.eval_every) for s in schedules)
    valid = math.ceil(facts.samples.get("valid", 0) * recipe.eval_fraction)
    kept, tuned = (facts.samples.get(split, 0) for split in HELD_OUT_SPLITS)
    at_end = ROUNDED_EVALUATIONS if size.rounds else 1
    evaluated, most = often * valid + at_end * (kept + tuned), size.distinct or math.inf
    ranked = size.ranked * (evaluated + RANKINGS_TO_TUNE * tuned * (kept > 0) + RANKINGS_OF_KEPT * kept)
    computed = often * min(valid, most) + at_end * (min(kept, most) + min(tuned, most))
    cores = plan.processes * (plan.threads or 1)
    on_host = size.fit_seconds + (ranked * RANKED_SECONDS / cores if plan.device == "cpu" else 0.0)
    return computed * (FORWARD_SHARE * plan.predicted_step_seconds / recipe.batch_size) + on_host


def parse_prices(text: str | None) -> dict[str, float]:
    """--price as card -> price of an hour of one GPU; "" is any card. Raises UserError."""
    found = {}
    for part in text.split(",") if text else ():
        name, _, price = part.rpartition("=")
        card = named_model(name := name.strip().lower()) if name else ""
        match = re.fullmatch(PRICE, price.strip().lower())
        if card is None or match is None or float(match[1]) <= 0:
            near = " or ".join(row for row in MACHINES if card is None and row.startswith(name))
            forms = f"did you mean {near}?" if near else "give 2.10/h, or of cards: h100=2.10,t4=0.35"
            raise UserError(f"--price {text}: is no price of a GPU's hour: {forms}")
        found[card] = float(match[1])
    return found


def price_per_hour(machine: Hardware, prices: Mapping[str, float]) -> float | None:
    """The price of all of a machine for an hour; None where its card has none."""
    each = prices.get((machine.gpu.card if machine.gpus else "") or "", prices.get(""))
    return each and each * machine.devices
