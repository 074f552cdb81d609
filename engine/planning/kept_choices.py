"""Options of the plan that `tune` measured to be faster, kept for this machine and recipe in the cache."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.flags import flags_of
from isobatch.core.package import cache_folder
from isobatch.core.plan import PlanOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from isobatch.core.plan import Plan
    from isobatch.core.recipe import Recipe
    from isobatch.engine.machine.hardware import Hardware

FOLDER = "tuned"
MARK = "measured here by `tune`"
"""Stands in the reason of every kept choice."""


def kept_file(recipe: Recipe, hardware: Hardware) -> Path:
    """Where the choices of a recipe on a machine are. Another torch is another machine."""
    machine = f"{hardware.describe()} {hardware.cpus} {importlib.metadata.version('torch')}"
    key = hashlib.sha256(machine.encode()).hexdigest()[:12]
    return cache_folder() / FOLDER / f"{key}-{recipe.hash()}.json"


def keep(
    recipe: Recipe, hardware: Hardware, processes: int, options: Mapping[str, Any], why: Mapping[str, str]
) -> Path:
    """Keep options of the plan, each with what was measured, in place of those kept before; the file."""
    file = kept_file(recipe, hardware)
    with atomic_files.explain_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        found = {"options": dict(options), "why": dict(why), "processes": processes}
        atomic_files.write_json(file, {"machine": hardware.describe(), **found})
    return file


def with_kept(recipe: Recipe, hardware: Hardware, asked: PlanOptions, world: int | None) -> PlanOptions:
    """The options with what was kept where the user left the choice, on this machine and as many processes.

    A file that cannot be read, or that names what this version does not know, counts as none.
    """
    file = kept_file(recipe, hardware)
    if hardware.source != "detected" or not file.is_file():
        return asked
    flags = flags_of(PlanOptions, "plan")
    try:
        found = atomic_files.read_json(file)
        free = {
            name: value
            for name, value in found["options"].items()
            if name in flags and getattr(asked, name) == flags[name].default
        }
        same_world = {found["processes"]} >= {n for n in (asked.processes, world) if n}
        if not free or not same_world:
            return asked
        why = {name: str(found["why"][name]) for name in free}
        return dataclasses.replace(asked, **free, measured_options={**asked.measured_options, **why})
    except (UserError, KeyError, TypeError, AttributeError, ValueError):
        return asked


def plan_with_kept(
    recipe: Recipe,
    hardware: Hardware,
    asked: PlanOptions,
    world: int | None,
    make: Callable[[PlanOptions], Plan],
) -> Plan:
    """The plan with the kept options; without them where they and the user's flags exclude each other."""
    kept = with_kept(recipe, hardware, asked, world)
    if kept is asked:
        return make(asked)
    try:
        return make(kept)
    except UserError:
        return make(asked)


def measured_lines(plan: Plan) -> list[str]:
    """A line for each choice of a plan that `tune` has measured."""
    return [
        f"{name.replace('_', ' ')} {getattr(plan, name)}: {reason}"
        for name, reason in plan.reasons.items()
        if MARK in reason
    ]
