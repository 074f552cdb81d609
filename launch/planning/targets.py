"""The flags of `plan`, and what they name: a recipe with its data, on a machine."""

from __future__ import annotations

import re
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
from isobatch.engine.machine.ceilings import ceilings_of
from isobatch.engine.machine.detect import detect
from isobatch.engine.machine.gpu_table import named_model
from isobatch.engine.machine.hardware import Hardware, parse_hardware
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import Workload
from isobatch.launch.local.run_setup import TrustOptions, print_unless_quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from isobatch.core.plan import Plan
    from isobatch.launch.local.arguments import Request
    from isobatch.models.base import ModelSize, Task

HERE = "here"
"""The name of the machine that this command runs on."""
PRICE = r"(\d+(?:\.\d+)?)(?:/h)?"
PRICES = "a price is for an hour of one GPU (of the machine, where it has none); idle ones are paid too"
"""What a price means, as users read it beside a cost."""


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
    """What an hour of one GPU costs, as in 2.10/h; of several cards: h100=2.10,t4=0.35."""
    deadline: str | None = None
    """Within which time the run should end, as in 6h, 90m or 1d12h."""
    json: bool = False
    """One JSON object on standard output."""

    def seconds(self) -> float | None:
        """Seconds of --deadline. Raises UserError."""
        try:
            return None if self.deadline is None else parse_duration(self.deadline)
        except ValueError as error:
            raise UserError(f"--deadline {self.deadline}: {error}") from None


def parse_machine(name: str, flag: str) -> Hardware:
    """The machine of a name as in --hardware, or `here`. Raises UserError, which begins with `flag`."""
    if name.strip().lower() == HERE:
        return detect()
    try:
        return parse_hardware(name)
    except UserError as error:
        raise UserError(str(error).replace("--hardware", flag, 1)) from None


def parse_prices(text: str | None) -> dict[str, float]:
    """--price as card -> price of an hour of one GPU; "" is any card. Raises UserError."""
    found = {}
    for part in text.split(",") if text else ():
        name, _, price = part.rpartition("=")
        card = named_model(name.strip()) if name else ""
        match = re.fullmatch(PRICE, price.strip().lower())
        if card is None or match is None or float(match[1]) <= 0:
            raise UserError(
                f"--price {text}: is no price of a GPU's hour such as 2.10/h, or of cards: h100=2.10,t4=0.35"
            )
        found[card] = float(match[1])
    return found


def price_per_hour(machine: Hardware, prices: Mapping[str, float]) -> float | None:
    """The price of all of a machine for an hour; None where its card has none."""
    card = machine.gpu.card if machine.gpus else None
    each = prices.get(card or "", prices.get(""))
    return each and each * machine.devices


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
        rates = ceilings_of(self.hardware, cache_folder())
        return make_plan(self.recipe, self.facts, size, self.hardware, self.asked, measured=rates)

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
