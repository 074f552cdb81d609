"""What `profile` and `tune` measure: a request, its plan here, and variants of both."""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.facts import Facts
from isobatch.core.flags import flags_of
from isobatch.core.package import ROOT, cache_folder
from isobatch.core.plan import INVARIANCES, Plan
from isobatch.core.recipe import Recipe
from isobatch.engine.distributed.communicator import Communicator, rank_and_world_size
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.machine.ceilings import ceilings_of
from isobatch.engine.machine.detect import detect
from isobatch.engine.machine.hardware import Hardware
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.runs.run_folder import run_name
from isobatch.launch.local.accelerate_launcher import launch_workers
from isobatch.launch.local.arguments import Request, parse_request
from isobatch.launch.local.run_setup import print_unless_quiet
from isobatch.models.base import ModelSize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from isobatch.core.plan import PlanOptions

NO_VALUES: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Variant:
    """What a trial runs."""

    recipe: Recipe
    plan: Plan
    facts: Facts


@dataclass(frozen=True, slots=True)
class Setup:
    """A request on this machine, and what variants of it are made from."""

    request: Request
    facts: Facts
    size: ModelSize
    hardware: Hardware
    base: Variant
    world: int | None

    @property
    def plan(self) -> Plan:
        return self.base.plan

    @property
    def recipe(self) -> Recipe:
        return self.base.recipe

    @property
    def asked(self) -> PlanOptions:
        """What the plan of the base was asked for."""
        return self.request.plan

    def variant(self, plan: Mapping[str, Any] = NO_VALUES, recipe: Mapping[str, Any] = NO_VALUES) -> Variant:
        """The base with these options of the plan and fields of the recipe.

        Raises UserError where the planner refuses it.
        """
        asked = dataclasses.replace(self.asked, **plan)
        changed, facts, size = self.recipe, self.facts, self.size
        if recipe:
            common = {k: v for k, v in recipe.items() if k in flags_of(type(changed), "recipe")}
            own = {k: v for k, v in recipe.items() if k not in common}
            changed = dataclasses.replace(changed, **common, options={**changed.options, **own})
            task, data = self.request.workload.make(changed)
            task.check()
            facts = prepare(data)
            size = task.model_size(facts)
        return Variant(changed, _plan(changed, facts, size, self.hardware, asked, self.world), facts)

    def weaker(self, variant: Variant) -> str:
        """The invariance of a variant's plan where it is weaker than the base's; else empty."""
        found, before = variant.plan.invariance, self.plan.invariance
        return "" if INVARIANCES.index(found) <= INVARIANCES.index(before) else found

    def usual_samples(self) -> int:
        """About how many samples a micro-batch has on one process."""
        share = math.ceil(self.recipe.batch_size / self.plan.processes)
        mean = max(1.0, self.facts.mean_length)
        return int(max(1, min(share, self.plan.micro_batch_samples, self.plan.micro_batch_tokens // mean)))

    def folder(self, kind: str) -> Path:
        """Where the answer is written: OUT/KIND/NAME."""
        run = self.request.run
        return Path(run.out).expanduser() / kind / (run.name or run_name(self.recipe))


def _plan(
    recipe: Recipe, facts: Facts, size: ModelSize, hardware: Hardware, asked: PlanOptions, world: int | None
) -> Plan:
    rates = ceilings_of(hardware, cache_folder())
    return make_plan(recipe, facts, size, hardware, asked, world=world, measured=rates)


def read_setup(words: Sequence[str], command: str, options: type) -> Setup:
    """The setup of a command's words, in whatever world this process is in. Raises UserError."""
    request = parse_request(words, command, options)
    rank, size = rank_and_world_size(os.environ)
    for note in request.notes if rank == 0 else ():
        print_unless_quiet(note, request.run.quiet)
    task, data = request.workload.make(request.recipe)
    facts = prepare(data, lambda text: print_unless_quiet(text, request.run.quiet))
    task.fetch()
    model_size, hardware = task.model_size(facts), detect()
    world = size if size > 1 else None
    plan = _plan(request.recipe, facts, model_size, hardware, request.plan, world)
    return Setup(request, facts, model_size, hardware, Variant(request.recipe, plan, facts), world)


def measure_in_world(
    words: Sequence[str],
    command: str,
    setup: Setup,
    measure: Callable[[Setup, Communicator], dict[str, Any]],
) -> dict[str, Any]:
    """What `measure(setup, world)` finds, in this process or in those of the plan. JSON."""
    # More loader processes than cores are tried on purpose: they may wait for a slow storage.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if setup.plan.processes == 1:
        return measure(setup, Communicator(setup.plan))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        atomic_files.write_json(folder / "task.json", {"command": command, "words": list(words)})
        script = ROOT / "launch" / "__main__.py"
        code = launch_workers(setup.plan, script, ["measure", str(folder)], folder).code
        if code != DONE or not (folder / "report.json").exists():
            sys.stderr.write((folder / "launcher.log").read_text(errors="replace")[-4000:])
            raise UserError(f"{command}: its {setup.plan.processes} processes ended with {code}")
        return atomic_files.read_json(folder / "report.json")


def measure_as_worker(words: Sequence[str]) -> int:
    """Usage: measure FOLDER, in a process that `profile` or `tune` started; writes report.json there."""
    folder = Path(words[0])
    task = atomic_files.read_json(folder / "task.json")
    module: Any = importlib.import_module(f"isobatch.launch.measuring.{task['command']}")
    setup = read_setup(task["words"], task["command"], module.OPTIONS)
    world = Communicator(setup.plan)
    found = module.measure(setup, world)
    if world.is_main:
        atomic_files.write_json(folder / "report.json", found)
    world.close()
    world.exit_process(DONE)
    return DONE
