"""`tune`: what each measure that training guides name is worth here, measured in bounded time."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.measures import now, printable
from isobatch.core.number_ranges import AboveZero
from isobatch.core.plan import INVARIANCES
from isobatch.engine.runs.run_folder import run_name
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.measuring.compare import LEAST_ROUNDS, PairedRounds, compare
from isobatch.launch.measuring.measures import MEASURES, Measure, Setting
from isobatch.launch.measuring.setup import Setup, measure_in_world, read_setup
from isobatch.launch.measuring.table import table_lines, write_plot
from isobatch.launch.measuring.trial import TrialSession, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isobatch.engine.distributed.communicator import Communicator

FOLDER, FILE, PLOT = "tuned", "tune.json", "tune.png"
RESERVED_SECONDS = 2.0
"""For the plot and the end of the process."""
MOST_OVER_SECONDS = 3.0
"""A measure may take this much more than its share, or twice its share."""
TOGETHER_SHARES = 2
"""Combinations that are tried after the single measures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions(TrustOptions):
    """Flags of `tune` beside the recipe's, the plan's and the run's."""

    minutes: AboveZero = 5.0
    """How long it may take in all."""
    json: bool = False
    """One JSON object on standard output."""


OPTIONS = TuneOptions
"""What a worker of this command reads its words with."""
Tried = tuple[Measure, Setting, Variant | None, PairedRounds]


def tune(words: Sequence[str]) -> int:
    """Usage: tune --task TASK [--minutes 5] [--json] [flags]

    Tries batch, micro-batch, precision, compile, loading, packing and so on, each beside the recipe as it is,
    in rounds that alternate, then what helps together. Writes tune.json and tune.png to OUT/tuned/.
    """
    setup = read_setup(words, "tune", TuneOptions)
    found = measure_in_world(words, "tune", setup, measure)
    if setup.request.extra.get("json"):
        print(atomic_files.json_text(found, ensure_ascii=False))
    else:
        print(printable("\n".join(table_lines(found))))
    return 0


def measure(setup: Setup, world: Communicator) -> dict[str, Any]:
    """The table of measures, in every process of the world. JSON."""
    options = TuneOptions(**setup.request.extra)
    limit = now() + 60 * options.minutes - _seconds_since_start() - RESERVED_SECONDS
    settings = [(m, s) for m in sorted(MEASURES, key=lambda m: m.slow) for s in m.changes(setup)]
    with TrialSession(setup.base, world) as base:
        base.warm_up()
        shares = len(settings) + TOGETHER_SHARES + 1
        noise = compare(base, setup.base, _share(limit, shares), limit=limit)
        peak = base.peak_of_step()
        tried: list[Tried] = []
        for number, (one, setting) in enumerate(settings):
            end = _share(limit, shares - 1 - number)
            tried.append((one, setting, *_try(setup, base, one, setting, end, limit)))
        together = _together(setup, base, [t for t in tried if t[3].beats(noise)], limit)
        phase = base.phase
    found = {
        "task": setup.recipe.task,
        "recipe_hash": setup.recipe.hash(),
        "phase": phase,
        "machine": setup.hardware.describe(),
        "noise": noise.to_dict(),
        "peak": peak,
        "rows": [_row(*one, peak) for one in tried],
        **together,
        "minutes": options.minutes,
        "seconds": _seconds_since_start(),
    }
    if world.is_main:
        _write(setup, found)
    return found


def _seconds_since_start() -> float:
    """Since the command began, imports included."""
    return time.time() - float(os.environ.get("ISOBATCH_STARTED", time.time()))


def _share(limit: float, shares: int) -> float:
    """The moment at which one of so many shares of the time that is left is over."""
    return now() + max(0.0, limit - now()) / max(1, shares)


def _try(
    setup: Setup, base: TrialSession, one: Measure, setting: Setting, end: float, limit: float
) -> tuple[Variant | None, PairedRounds]:
    if now() >= limit:
        return None, PairedRounds(problem="no time was left to measure it")
    try:
        variant = setup.variant(setting.plan, setting.recipe, fused=setting.fused)
    except UserError as error:
        return None, PairedRounds(problem=str(error))
    if base.world.is_main:
        print(printable(f"trying {one.name}: {setting.flags}"), file=sys.stderr)
    # What is over its share ends soon; a compilation may take what is left.
    stop = limit if one.slow else min(limit, end + max(MOST_OVER_SECONDS, end - now()))
    return variant, compare(base, variant, end, one.unit, stop, memory=True)


def _row(
    one: Measure, setting: Setting, variant: Variant | None, rounds: PairedRounds, peak: int
) -> dict[str, Any]:
    """A row of the table; `worth` is the factor of having the measure, whether the base has it or not."""
    row = {
        "measure": one.name,
        "flags": setting.flags,
        "quoted": one.quoted,
        "has_it": setting.takes_away,
        "changes": "recipe" if setting.recipe else "plan" if setting.plan else "nothing",
        "per": one.unit.removesuffix("s"),
        **rounds.to_dict(),
    }
    if rounds.problem or variant is None:
        return row
    worth = 1 / rounds.ratio if setting.takes_away else rounds.ratio
    row |= {"worth": worth, "invariance": variant.plan.invariance}
    row |= {"memory": rounds.peak / peak if peak and rounds.peak else None}
    if one.quoted:
        row["true_here"] = verdict(worth, rounds, one.quoted[0])
    return row


def verdict(worth: float, rounds: PairedRounds, quoted: float) -> str:
    """Whether a measure is worth here what is quoted at least; open where the noise forbids to say."""
    if len(rounds.ratios) < LEAST_ROUNDS or abs(worth / quoted - 1) <= 2 * rounds.spread:
        return "open"
    return "as quoted" if worth > quoted else "not here"


def keeps_class(setup: Setup, variant: Variant) -> bool:
    """Whether a variant's plan is as exact as the base's."""
    found, before = variant.plan.invariance, setup.plan.invariance
    return INVARIANCES.index(found) <= INVARIANCES.index(before)


def best_settings(setup: Setup, tried: list[Tried], recipes: bool) -> list[tuple[Setting, PairedRounds]]:
    """The fastest setting that helps of each measure; `recipes`: those that change the recipe, too.

    Without them only options of the plan that leave its invariance.
    """
    best: dict[str, tuple[Setting, PairedRounds]] = {}
    for one, setting, variant, rounds in tried:
        free = setting.is_of_plan and variant is not None and keeps_class(setup, variant)
        usable = free or (recipes and variant is not None and not setting.takes_away and setting.fused)
        if not (usable and rounds.helps):
            continue
        if one.name not in best or rounds.ratio > best[one.name][1].ratio:
            best[one.name] = setting, rounds
    return sorted(best.values(), key=lambda item: -item[1].ratio)


def _together(setup: Setup, base: TrialSession, tried: list[Tried], limit: float) -> dict[str, Any]:
    """What helps, together: options of the plan alone, and with changes of the recipe."""
    plans, everything = (best_settings(setup, tried, recipes) for recipes in (False, True))
    kept, rounds = _combine(setup, base, plans, _share(limit, TOGETHER_SHARES), limit)
    found: dict[str, Any] = {"keep": [s.flags for s in kept], "keep_rounds": rounds and rounds.to_dict()}
    found["options"] = {name: value for s in kept for name, value in s.plan.items()}
    also = [setting for setting, _ in everything if setting not in kept]
    found["other_recipe"] = [s.flags for s in compatible(also) if s.recipe]
    found["rounds_differently"] = [s.flags for s in also if not s.recipe]
    if len(everything) > 1:
        combined, rounds = _combine(setup, base, everything, limit, limit)
        found["everything"] = {"flags": [s.flags for s in combined], **(rounds.to_dict() if rounds else {})}
    return found


def compatible(settings: list[Setting]) -> list[Setting]:
    """The settings without those that set a field which a faster one sets, too."""
    found: list[Setting] = []
    for setting in settings:
        if not any({*setting.plan, *setting.recipe} & {*other.plan, *other.recipe} for other in found):
            found.append(setting)
    return found


def _combine(
    setup: Setup, base: TrialSession, best: list[tuple[Setting, PairedRounds]], end: float, limit: float
) -> tuple[list[Setting], PairedRounds | None]:
    """All of the settings where they are faster together than the best alone, else that one."""
    if not best:
        return [], None
    alone, rounds = best[0]
    fitting = compatible([setting for setting, _ in best])
    best = [item for item in best if item[0] in fitting]
    # What is compiled in the first steps is compiled again.
    best = [item for item in best if item[1].warm_seconds < max(0.0, end - now()) / 2] or best[:1]
    if len(best) > 1 and now() < limit:
        plan = {name: value for setting, _ in reversed(best) for name, value in setting.plan.items()}
        recipe = {name: value for setting, _ in reversed(best) for name, value in setting.recipe.items()}
        try:
            together = compare(base, setup.variant(plan, recipe), end, limit=limit)
        except UserError:  # they exclude each other
            return [alone], rounds
        if together.ratio > rounds.ratio:
            return [setting for setting, _ in best], together
    return [alone], rounds


def _write(setup: Setup, found: dict[str, Any]) -> None:
    """tune.json and the plot."""
    name = setup.request.run.name or run_name(setup.recipe)
    folder = Path(setup.request.run.out).expanduser() / FOLDER / name
    with atomic_files.explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_plot(found, folder / PLOT)
        found["plot"] = str(folder / PLOT)
        atomic_files.write_json(folder / FILE, found)
