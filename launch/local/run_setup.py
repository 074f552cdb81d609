"""Where a run comes from: found again by its recipe and data, or made new; with a plan for this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.plan import Plan, PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.planning.detect import detect
from isobatch.engine.planning.planner import make_plan
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_folder import RunFolder, free_folder, list_runs, run_name
from isobatch.engine.runs.run_options import RunOptions
from isobatch.engine.task_files import task_file_problem
from isobatch.launch.local.arguments import Request

INVARIANCE_ORDER = ("exact", "precision", "noise")


def prepare_facts(asked: Request) -> Facts:
    """The facts of the data asked for, prepared if need be; the model is fetched too."""
    task, data = asked.workload.make(asked.recipe)
    facts = prepare(data)
    task.fetch()
    if asked.recipe.patience and "valid" not in facts.samples:
        raise UserError(
            f"--patience {asked.recipe.patience}: this data has no valid split to watch (it has"
            f" {', '.join(facts.samples)}): give it one, or leave --patience out"
        )
    return facts


def plan_run(asked: Request, facts: Facts, run: RunFolder | None, world: int | None = None) -> RunFolder:
    """The run's folder with a plan for this machine; a new folder where `run` is None."""
    plan = plan_for_this_machine(asked.recipe, facts, asked.plan, world)
    run = run or create_run(asked, facts)
    store_plan(run, plan)
    return run


def store_plan(run: RunFolder, plan: Plan) -> None:
    """plan.json; what a run was once trained with in another precision is never called exact again."""
    if run.has_plan and any(run.checkpoints.glob("*-*")):
        before = run.plan.invariance
        if INVARIANCE_ORDER.index(before) > INVARIANCE_ORDER.index(plan.invariance):
            reasons = {**plan.reasons, "invariance": f"part of this run was trained as {before}"}
            plan = dataclasses.replace(plan, invariance=before, reasons=reasons)
    run.write_plan(plan)


def find_run(asked: Request, facts: Facts) -> RunFolder | None:
    """The run to go on with: the one named by --resume, else the newest here with this recipe and data."""
    choice, wanted = asked.run.resume, (asked.recipe.hash(), facts.fingerprint)
    if choice not in ("auto", "never"):
        run = RunFolder.open(choice)
        if _identity(run) != wanted:
            raise UserError(
                f"--resume {choice}: that run has another recipe or other data;"
                f" `resume {choice}` goes on with its own"
            )
        return run
    if choice == "never" or asked.run.again:
        return None
    same = [r for r in list_runs(Path(asked.run.out).expanduser()) if _identity(r) == wanted]
    if asked.run.name:
        same = [r for r in same if r.folder.name == asked.run.name]
    return same[-1] if same else None


def _identity(run: RunFolder) -> tuple[str, str]:
    return run.recorded_hash, run.facts.fingerprint


def create_run(asked: Request, facts: Facts) -> RunFolder:
    """A new run folder with recipe and facts, named after the recipe unless the user named it."""
    out = Path(asked.run.out).expanduser()
    name = asked.run.name or run_name(asked.recipe)
    folder = out / name if asked.run.name else free_folder(out, name)
    return RunFolder.create(folder, asked.recipe, facts, asked.run)


def plan_for_this_machine(recipe: Recipe, facts: Facts, asked: PlanOptions, world: int | None = None) -> Plan:
    """The plan for this machine."""
    task, _ = workload(recipe.task).make(recipe)
    return make_plan(recipe, facts, task.model_size(facts), detect(), asked, world=world)


def options_of_run(run: RunFolder, changes: Mapping[str, Any]) -> RunOptions:
    """The run's own options, with what was asked anew."""
    return dataclasses.replace(run.options(), **changes)


def locate_data(run: RunFolder, recipe: Recipe, data: str | None) -> None:
    """Find the prepared data again, from another place if told; code and samples must be the trained ones."""
    if changed := task_file_problem(recipe):
        raise UserError(changed)
    place = dataclasses.replace(recipe, data=data) if data else recipe
    task, source = workload(recipe.task).make(place)
    facts = run.facts
    if not data and Path(facts.folder).is_dir() and (Path(facts.folder) / "facts.json").exists():
        return
    source.check()
    fresh = prepare(source)
    refuse_other_data(run, fresh)
    run.write_facts(fresh)


def refuse_other_data(run: RunFolder, fresh: Facts) -> None:
    if fresh.fingerprint != run.facts.fingerprint:
        raise UserError(
            f"the data is not what {run.folder} was trained on (fingerprint {fresh.fingerprint} against"
            f" {run.facts.fingerprint}): --again starts a new run"
        )
    if odd := run.facts.differing_fields(fresh):
        raise UserError(
            f"{run.folder}/facts.json was changed: {', '.join(odd)} differs from the data's; put it right"
            " or start a new run with --again"
        )
