"""The flags of `plan`, and what they name: a recipe with its data, on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.core.measures import parse_duration
from isobatch.core.number_ranges import Positive
from isobatch.engine.loading.prepare import assumed_facts
from isobatch.engine.loading.prepare import prepare as prepare_data
from isobatch.launch.local.run_setup import TrustOptions, print_unless_quiet
from isobatch.launch.planning.estimate import Target
from isobatch.launch.planning.machines import HERE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from isobatch.core.facts import Facts
    from isobatch.engine.machine.hardware import Hardware
    from isobatch.launch.local.arguments import Request


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


def parse_deadline(text: str | None) -> float | None:
    """Seconds of --deadline. Raises UserError."""
    return _seconds(text, "--deadline")


def parse_mtbf(text: str | None) -> float | None:
    """Seconds of --mtbf. Raises UserError."""
    return _seconds(text, "--mtbf")


def _seconds(text: str | None, flag: str) -> float | None:
    try:
        return None if text is None else parse_duration(text)
    except ValueError as error:
        raise UserError(f"{flag} {text}: {error}") from None


def target_of(request: Request, options: PlanCommandOptions, machine: Hardware, name: str = "") -> Target:
    """The request's recipe and data on a machine."""
    return Target(
        name=name or options.hardware or HERE,
        workload=request.workload,
        recipe=request.recipe,
        facts=_facts(request, options),
        hardware=machine,
        asked=request.plan,
    )


def _facts(request: Request, options: PlanCommandOptions) -> Facts:
    if options.assume_length:
        length = options.assume_length * request.workload.task.rows_per_sample
        return assumed_facts(length, request.recipe.tokenizer)
    return prepare_data(request.workload.make(request.recipe)[1], say(request))


def print_notes(request: Request, but: Collection[str] = ()) -> None:
    """Print the request's notes, without those in `but`."""
    for note in request.notes:
        if note not in but:
            print_unless_quiet(note, request.run.quiet)


def say(request: Request) -> Callable[[str], None]:
    """A function that prints a line unless --quiet."""
    return partial(print_unless_quiet, quiet=request.run.quiet)
