"""`plan` and `prepare`: show the plan, and prepare the data. Neither trains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import build_options, flags_of
from isobatch.engine.loading.prepare import prepare as prepare_data
from isobatch.engine.planning.alternatives import memory_alternatives
from isobatch.engine.planning.choices import fixed_loader_settings
from isobatch.engine.registry import CHAINS
from isobatch.launch.local.arguments import Request, parse_request, task_name
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.planning.comparison import compare_targets, short_duration
from isobatch.launch.planning.estimate import estimate, with_what_would_fit
from isobatch.launch.planning.plan_text import format_plan
from isobatch.launch.planning.targets import (
    HERE,
    PlanCommandOptions,
    parse_machine,
    parse_prices,
    print_notes,
    say,
    target_of,
)
from isobatch.launch.sweeps.chain import parse_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.launch.sweeps.chain import Chain


TRAINING = "train"
"""The first phase of a stage that is given no trained model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions(TrustOptions):
    """Flags of `prepare` beside the recipe's."""

    json: bool = False
    """One JSON object on standard output."""


def plan(words: Sequence[str]) -> int:
    """Usage: plan --task TASK [--hardware 8xh100 | --compare A,B] [--price P] [--deadline 6h] [--json]"""
    if (chain := task_name(words)) in CHAINS:
        found = parse_chain(chain, words, flags_of(PlanCommandOptions, "plan").keys() - {"compare"})
        return plan_stages(found, build_options(PlanCommandOptions, found.own, "plan"))
    request = parse_request(words, "plan", PlanCommandOptions)
    return show_plan(request, PlanCommandOptions(**request.extra), words)


def show_plan(request: Request, options: PlanCommandOptions, words: Sequence[str] = ()) -> int:
    """Print the plan of a request. `words`: those typed, from which --compare makes its variants."""
    if options.compare:
        return compare_targets(words, request, options)
    result, text = plan_of(request, options)
    print(atomic_files.json_text(result, ensure_ascii=False) if options.json else text)
    return 0


def plan_stages(chain: Chain, options: PlanCommandOptions) -> int:
    """Print the plan of every stage, each with the first stage's model: none has trained yet."""
    found = {}
    for number, stage in enumerate(chain.stages, start=1):
        request = parse_request(chain.words(stage, chain.start), "plan", PlanCommandOptions)
        found[stage], text = plan_of(request if number == 1 else _without_training(request), options)
        found[stage]["recipe"] = {**request.recipe.to_dict(), "hash": request.recipe.hash()}
        if not options.json:
            between = "\n" if number > 1 else ""
            print(f"{between}stage {number} of {len(chain.stages)}, {stage}:\n\n{text}")
    seconds = sum(plan["run"]["run_seconds"] or 0.0 for plan in found.values())
    if options.json:
        print(atomic_files.json_text({"stages": found, "run_seconds": seconds}, ensure_ascii=False))
    else:
        whole = f"all {len(found)} stages: {short_duration(seconds)}"
        print(f"\n{whole}, without what is exported and measured between them")
    return 0


def _without_training(request: Request) -> Request:
    """Without the phase that trains the model where there is none: the stage before has trained it."""
    phases = request.workload.make(request.recipe)[0].phases()
    if phases[0].name != TRAINING or len(phases) == 1:
        return request
    recipe, shares = request.recipe, [phase.share for phase in phases[1:]]
    given: tuple[float, ...] = recipe.steps or recipe.epochs or (1.0,)
    if len(given) > 1:
        return request
    own = [given[0] * share / sum(shares) for share in shares]
    if recipe.steps is None:  # a phase has at least a step
        recipe = dataclasses.replace(recipe, epochs=(1e-9, *own))
    else:
        recipe = dataclasses.replace(recipe, steps=(1, *(max(1, round(steps)) for steps in own)))
    return dataclasses.replace(request, recipe=recipe)


def plan_of(request: Request, options: PlanCommandOptions) -> tuple[dict[str, Any], str]:
    """The plan of a request, as JSON and as text. Raises UserError where there is none."""
    prices, deadline = parse_prices(options.price), options.seconds()
    machine = parse_machine(options.hardware or HERE, "--hardware")
    print_notes(request)
    target = target_of(request, options, machine)
    recipe, facts = target.recipe, target.facts
    for note in target.task.notes(facts):
        say(request)(note)
    found = estimate(target, prices)
    plan, size = found.plan, found.model_size
    if plan is None or size is None:
        raise UserError(with_what_would_fit(found))
    loader = fixed_loader_settings(plan)
    answer = {
        "recipe": {**recipe.to_dict(), "hash": recipe.hash()},
        "global_batch": recipe.batch_size,
        "plan": plan.to_dict(),
        "reasons": plan.reasons,
        "invariance": plan.invariance,
        "run": found.to_dict(deadline),
        "savings": memory_alternatives(lambda r: request.workload.make(r)[0], recipe, facts, size, plan),
        "loader": {name: {"value": value, "reason": reason} for name, (value, reason) in loader.items()},
    }
    return answer, format_plan(found, deadline, answer)


def prepare(words: Sequence[str]) -> int:
    """Usage: prepare --task TASK [--data PATH] [flags]

    Run it where the internet is; runs then need none.
    """
    request = parse_request(words, "prepare", PrepareOptions)
    print_notes(request)
    task, data = request.workload.make(request.recipe)
    facts = prepare_data(data, say(request))
    task.fetch()
    if request.extra.get("json"):
        print(atomic_files.json_text(facts.to_dict(), ensure_ascii=False))
        return 0
    counts = ", ".join(f"{n:,} {split}" for split, n in facts.samples.items())
    print(
        f"{counts} samples of up to {facts.longest} tokens (mean {facts.mean_length:.0f}),"
        f" {facts.fingerprint}"
    )
    for line in (*facts.extra.get("notes", []), f"in {facts.folder}"):
        print(line)
    return 0
