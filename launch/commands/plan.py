"""`plan` and `prepare`: show the plan, and prepare the data. Neither trains."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isobatch.core.errors import DONE, NotHereError, UserError, explain_errors
from isobatch.core.measures import parse_duration, printable
from isobatch.core.number_ranges import Count
from isobatch.core.terminal import fitted, print_answer, print_lines
from isobatch.engine.machine.detect import detect
from isobatch.engine.machine.hardware import known_machines, parse_hardware
from isobatch.engine.planning import comparison
from isobatch.engine.planning.choices import fixed_loader_settings, remarks_on_plan
from isobatch.engine.planning.estimate import Target, estimate, parse_prices
from isobatch.launch.local.arguments import Request, check_request, parse_request, split_words
from isobatch.launch.local.options import AnswerOptions, PlannedOptions
from isobatch.launch.local.run_setup import planned_facts, prepared_facts

ASSUMED_LENGTH = 512
"""Tokens of a sample, for plans where the data is not at hand."""
HERE = "here"
"""The name of the machine that this command runs on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCommandOptions(PlannedOptions):
    """Flags of `plan` beside the recipe's and the plan's."""

    hardware: str | None = None
    """Plan for this machine, not the one here: rtx4080-laptop, 8xh100, 4x8xa100-80gb (nodes x GPUs x card),
    cpu:2x24gb (cores x RAM), mps:16gb. rtx3080:12gb says a card's memory, rtx3080:12gb:64gb the RAM too,
    4x8xh100@100gbit the network between nodes. `--hardware list` names the cards with their memory."""
    compare: str | None = None
    """Machines side by side, as in rtx4080-laptop,8xa100-80gb,4x8xh100 (here: this one)."""
    price: str | None = None
    """What an hour of one GPU costs, as in 2.10/h; of several cards: h100=2.10,t4=0.35."""
    why: bool = False
    """Every field of the plan with its reason, too."""
    deadline: str | None = None
    """Within which time the run should end, as in 6h, 90m or 1d12h."""

    def seconds(self) -> float | None:
        """Seconds of --deadline. Raises UserError."""
        with explain_errors(f"--deadline {self.deadline}", ValueError):
            return None if self.deadline is None else parse_duration(self.deadline)


def plan(words: Sequence[str]) -> int:
    """Usage: plan --task TASK [--hardware 8xh100 | --compare A,B] [--price P] [--deadline 6h]
    [--why] [--json]
    """
    if split_words(words)[1].get("hardware", "").lower() == "list":
        print(fitted("\n".join(known_machines())))
        return DONE
    request = parse_request(words, "plan", PlanCommandOptions)
    return show_plan(request, PlanCommandOptions(**request.extra))


def show_plan(request: Request, options: PlanCommandOptions) -> int:
    """Print the plan of a request, or what --compare sets side by side."""
    result, text = (compare_machines if options.compare else plan_of)(request, options)
    return print_answer(result, text, options.json)


def plan_of(request: Request, options: PlanCommandOptions) -> tuple[dict[str, Any], str]:
    """The plan of a request, as JSON and as text. Raises UserError where there is none."""
    prices, deadline = parse_prices(options.price), options.seconds()
    (target,) = _targets(request, [options.hardware or HERE], "--hardware")
    recipe, facts = target.recipe, target.facts
    print_lines(*facts.notes, quiet=request.run.quiet)
    found = estimate(target, prices)
    if found.plan is None:
        raise UserError(found.why_not)
    print_lines(*remarks_on_plan(request.plan, found.plan, target.hardware), quiet=request.run.quiet)
    loader = fixed_loader_settings(found.plan)
    answer = {
        "recipe": {**recipe.to_dict(), "hash": recipe.hash()},
        "global_batch": recipe.batch_size,
        "plan": found.plan.to_dict(),
        "reasons": found.plan.reasons,
        "invariance": found.plan.invariance,
        "run": found.to_dict(deadline),
        "loader": {name: {"value": value, "reason": reason} for name, (value, reason) in loader.items()},
    }
    text = comparison.six_lines(found, deadline)
    return answer, f"{text}\n\n{comparison.reasons(found)}" if options.why else text


def comments_on(request: Request, machine: str, lines: Sequence[str], claim: str = "") -> str:
    """Lines, and the plan for a machine whose data is not here, as comments of YAML.

    `machine`: as --hardware takes it. `claim`: the folder in which pods see theirs. Raises UserError for what
    `plan` would refuse.
    """
    length = min(ASSUMED_LENGTH, request.recipe.max_length)
    asked = dataclasses.replace(request, notes=[], extra={"assume_length": length})
    try:
        check_request(asked)
        said = plan_of(asked, PlanCommandOptions(hardware=machine))[1]
    except NotHereError as error:
        flag = str(error).partition(": ")[0]
        said = f"no plan: {f'{flag} lies in the claim' if claim and f' {claim}/' in flag else error}"
    head = f"The plan of {machine} (--hardware names the card), for samples of {length} tokens:"
    text = printable("\n".join([*lines, head, said]))
    return "".join(f"{f'# {line}'.rstrip()}\n" for line in text.splitlines())


def compare_machines(request: Request, options: PlanCommandOptions) -> tuple[dict[str, Any], str]:
    """The machines of --compare, as JSON and as text. Raises UserError where the recipe fits none of them."""
    flag, prices, deadline = f"--compare {options.compare}", parse_prices(options.price), options.seconds()
    names = [name.strip() for name in str(options.compare).split(",")]
    if "" in names or len(set(names)) < len(names):
        raise UserError(f"{flag}: give names of machines, each once, as in rtx4080-laptop,8xh100,here")
    if options.hardware:
        raise UserError(f"--hardware {options.hardware}: --compare names the machines; leave one of them out")
    found = comparison.compare(flag, _targets(request, names, "--compare"), prices, deadline)
    return {"machines": found.to_dict()}, comparison.format_comparison(found)


def _targets(request: Request, names: Sequence[str], flag: str) -> list[Target]:
    """The request's recipe and data on machines. Raises UserError, which begins with `flag`."""
    try:
        machines = {name: detect() if name.lower() == HERE else parse_hardware(name) for name in names}
    except UserError as error:
        raise UserError(str(error).replace("--hardware", flag, 1)) from None
    print_lines(*request.notes, quiet=request.run.quiet)
    task, data = request.workload.make(request.recipe)
    facts = planned_facts(request, task, data)
    asked = request.workload, request.recipe, facts
    return [Target(name, *asked, machine, request.plan) for name, machine in machines.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions(AnswerOptions):
    """The flags of `prepare`."""

    show: Count = 0
    """So many training samples as text, with what is learnt set apart, or behind their labels."""


def prepare(words: Sequence[str]) -> int:
    """Usage: prepare --task TASK [--data PATH] [--show 3] [flags]

    Run it where the internet is; runs then need none.
    """
    request = parse_request(words, "prepare", PrepareOptions)
    print_lines(*request.notes, quiet=request.run.quiet)
    task, data = request.workload.make(request.recipe)
    facts = prepared_facts(request, task, data)
    task.fetch()
    counts = ", ".join(f"{n:,} {split}" for split, n in facts.samples.items())
    lengths = f"up to {facts.longest} tokens (mean {facts.mean_length:.0f})"
    lines = [f"{counts} samples of {lengths}, {facts.fingerprint}", *facts.extra.get("notes", [])]
    shown: list[str] = []
    if count := request.extra.get("show", 0):
        from isobatch.launch.local.shown_samples import shown_samples

        if not (shown := shown_samples(data, facts, count, sys.stdout.isatty())):
            raise UserError("--show: is for conversations, pairs of answers, labelled texts: leave it out")
    text = "\n".join([*lines, f"in {facts.folder}", *shown])
    return print_answer(facts.to_dict(), text, bool(request.extra.get("json")))
