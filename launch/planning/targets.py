"""The flags of `plan`, and what they name: a recipe with its data, on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.measures import parse_duration
from isobatch.core.number_ranges import Positive
from isobatch.core.package import cache_folder
from isobatch.core.plan import PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.loading.data_rate import DataRate, measure_data_rate
from isobatch.engine.loading.prepare import assumed_facts
from isobatch.engine.loading.prepare import prepare as prepare_data
from isobatch.engine.machine.hardware import Hardware
from isobatch.engine.planning.calibration import machine_record
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import Workload
from isobatch.launch.local.run_setup import TrustOptions, print_unless_quiet
from isobatch.launch.planning.machines import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from isobatch.core.plan import Plan
    from isobatch.launch.local.arguments import Request
    from isobatch.models.base import ModelSize, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCommandOptions(TrustOptions):
    """Flags of `plan` beside the recipe's and the plan's."""

    hardware: str | None = None
    """Plan for this machine, not the one here: rtx4080-laptop, 8xh100, 4x8xa100-80gb, cpu:2x24gb ..."""
    assume_length: Positive | None = None
    """Plan for samples of this many tokens, where the data is not at hand."""
    compare: str | None = None
    """Machines side by side, as in rtx4080-laptop,8xa100-80gb,4x8xh100 (here: this one); or the modes
    full,fast."""
    price: str | None = None
    """What an hour of one GPU costs, as in 2.10/h; or a YAML or JSON file with lines such as 8xh100: 23.92,
    the price of an hour of that machine."""
    deadline: str | None = None
    """Within which time the run should end, as in 6h, 90m or 1d12h."""
    mtbf: str | None = None
    """Mean time between failures of all machines of the run together, as in 12h: the plan says how often to
    save, and what share of the time is kept."""
    json: bool = False
    """One JSON object on standard output."""

    def seconds(self, name: str) -> float | None:
        """Seconds of --deadline or --mtbf. Raises UserError."""
        text = getattr(self, name)
        try:
            return None if text is None else parse_duration(text)
        except ValueError as error:
            raise UserError(f"--{name} {text}: {error}") from None


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


def target_of(request: Request, options: PlanCommandOptions, machine: Hardware, name: str = "") -> Target:
    """The request's recipe and data on a machine."""
    if options.assume_length:
        length = options.assume_length * request.workload.task.rows_per_sample
        facts = assumed_facts(length, request.recipe.tokenizer)
    else:
        facts = prepare_data(request.workload.make(request.recipe)[1], say(request))
    return Target(
        name=name or options.hardware or HERE,
        workload=request.workload,
        recipe=request.recipe,
        facts=facts,
        hardware=machine,
        asked=request.plan,
    )


def print_notes(request: Request, but: Collection[str] = ()) -> None:
    """Print the request's notes, without those in `but`."""
    for note in request.notes:
        if note not in but:
            say(request)(note)


def say(request: Request) -> Callable[[str], None]:
    """A function that prints a line unless --quiet."""
    return partial(print_unless_quiet, quiet=request.run.quiet)
