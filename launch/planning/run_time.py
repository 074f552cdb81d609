"""How long a whole run takes: start, training, evaluations, checkpoints and export; and its energy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core.measures import format_duration
from isobatch.core.plan import REHEARSED_STEPS
from isobatch.engine.optimization.schedule import phase_schedules
from isobatch.engine.planning.calibration import gpu_constants
from isobatch.engine.planning.checkpoint_interval import best_interval, expected_goodput
from isobatch.engine.planning.choices import compile_seconds
from isobatch.engine.planning.cost_model import steps_per_epoch
from isobatch.engine.planning.reading import seconds_of_waiting
from isobatch.engine.runs.summary import HELD_OUT_SPLITS

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.engine.loading.data_rate import DataRate
    from isobatch.engine.machine.hardware import Hardware
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
FORWARD_SHARE = 1 / 3
"""Of a step's arithmetic: an evaluation has no backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTime:
    """Seconds of the parts of a run."""

    steps: int
    start: float
    compile: float
    train: float
    read: float
    """What the training waits for its samples."""
    evaluate: float
    save: float
    """What ends the run waits for the last checkpoint; the others are written beside the training."""
    export: float

    @property
    def total(self) -> float:
        """From the command to the end."""
        return self.start + self.compile + self.train + self.read + self.evaluate + self.save + self.export

    def to_dict(self) -> dict[str, Any]:
        """Seconds by part, for --json."""
        parts = ("start", "compile", "train", "read", "evaluate", "save", "export")
        return {name: round(getattr(self, name), 3) for name in parts}


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
    schedules = phase_schedules(recipe, task.phases(), steps_per_epoch(recipe, facts))
    steps = sum(schedule.steps for schedule in schedules)
    checkpoint = size.weight_bytes + 8.0 * size.trainable
    return RunTime(
        steps=steps,
        start=_start_seconds(plan, size),
        compile=_compile_seconds(plan, facts, size, hardware) if plan.compile != "off" else 0.0,
        train=steps * plan.predicted_step_seconds,
        read=0.0 if rate is None else steps * seconds_of_waiting(plan, recipe, facts, rate),
        evaluate=_evaluated_samples(recipe, facts, task, size.rounds) * _sample_seconds(plan, recipe),
        save=checkpoint / DISK_BANDWIDTH,
        export=EXPORT_SECONDS + size.weight_bytes / DISK_BANDWIDTH,
    )


def _start_seconds(plan: Plan, size: ModelSize) -> float:
    """Until training begins; where a phase rounds, its first steps are computed twice before."""
    processes = CHILDREN_SECONDS if plan.processes > 1 else 0.0
    steps = FIRST_STEP + (2 * REHEARSED_STEPS if size.rounds else 0)
    loading = size.weight_bytes / LOAD_BANDWIDTH
    return START_SECONDS + processes + loading + steps * plan.predicted_step_seconds


def _compile_seconds(plan: Plan, facts: Facts, size: ModelSize, hardware: Hardware) -> float:
    constants = gpu_constants(hardware.gpu.card if hardware.gpus else None)
    return compile_seconds(size, constants, {math.ceil(n / plan.pad_multiple) for n in facts.lengths})


def _sample_seconds(plan: Plan, recipe: Recipe) -> float:
    """Seconds to evaluate a sample, on all processes together."""
    return FORWARD_SHARE * plan.predicted_step_seconds / recipe.batch_size


def _evaluated_samples(recipe: Recipe, facts: Facts, task: Task, rounds: bool) -> float:
    """Samples of all evaluations: of the validation split while training, of all held out at the end."""
    schedules = phase_schedules(recipe, task.phases(), steps_per_epoch(recipe, facts))
    often = sum(_evaluations(s.steps, s.eval_every) for s in schedules)
    valid = math.ceil(facts.samples.get("valid", 0) * recipe.eval_fraction)
    held_out = sum(facts.samples.get(split, 0) for split in HELD_OUT_SPLITS)
    return often * valid + (ROUNDED_EVALUATIONS if rounds else 1) * held_out


def _evaluations(steps: int, every: int) -> int:
    """Evaluations during a phase; the one at its end belongs to the run's end."""
    return (steps - 1) // max(1, every)


LEAST_GOODPUT = 0.01
"""Below it a run is not said to end: the estimate holds for failures that are rare beside a save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What failures take of a run that saves as often as loses least; all in seconds."""

    between: float
    """Mean time between two failures."""
    save: float
    """To write a checkpoint. Training goes on meanwhile: what it waits is less."""
    restart: float
    """From a failure to the next step."""
    run: float
    """Of the whole run without failures."""

    @property
    def interval(self) -> float:
        return best_interval(self.save, self.between)

    @property
    def save_every(self) -> str:
        """The interval as a value of --save-every, in minutes."""
        minutes = self.interval / 60
        return f"{max(0.1, minutes):.1f}m" if minutes < 10 else f"{minutes:.0f}m"

    @property
    def goodput(self) -> float:
        """Share of the time that is kept."""
        return expected_goodput(self.interval, self.save, self.restart, self.between)

    def sentence(self) -> str:
        """What the plan says about them."""
        if self.goodput < LEAST_GOODPUT:
            return (
                f"with a failure every {format_duration(self.between)} the run hardly gets on: a save takes"
                f" {_short(self.save)} s and to start again {_short(self.restart)} s"
            )
        return (
            f"with a failure every {format_duration(self.between)}: --save-every {self.save_every} loses"
            f" least ({_short(self.save)} s a save, {_short(self.restart)} s to start again): at least"
            f" {self.goodput:.1%} of the time is kept, the whole run takes"
            f" {format_duration(self.run / self.goodput)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "mtbf_seconds": self.between,
            "save_seconds": self.save,
            "restart_seconds": self.restart,
            "save_every": self.save_every,
            "goodput": self.goodput,
            "run_seconds": self.run / self.goodput if self.goodput >= LEAST_GOODPUT else None,
        }


def _short(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.2g}"


def failures(time: RunTime, between: float) -> Failures:
    """Of a run with this mean time between failures, in seconds."""
    return Failures(between=between, save=time.save, restart=time.start + time.compile, run=time.total)


def most_energy(seconds: float, plan: Plan, hardware: Hardware) -> float | None:
    """kWh of the GPUs at their power limit, an upper bound; None where no limit is known."""
    watts = hardware.gpu.power_limit_watts if hardware.gpus and plan.device != "cpu" else None
    return None if watts is None else plan.processes * watts * seconds / 3.6e6
