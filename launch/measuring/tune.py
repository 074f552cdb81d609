"""`tune`: what each measure that training guides name is worth here, measured in bounded time."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError
from isobatch.core.measures import now, printable
from isobatch.core.number_ranges import AboveZero
from isobatch.launch.local.run_setup import TrustOptions
from isobatch.launch.measuring.measures import MEASURES, Measure, Setting
from isobatch.launch.measuring.setup import Setup, measure_in_world, read_setup
from isobatch.launch.measuring.trial import LEAST_ROUNDS, NO_TIME, PairedRounds, TrialSession, compare
from isobatch.launch.report.figures import draw_figure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from isobatch.engine.distributed.communicator import Communicator

FOLDER, FILE, PLOT = "tuned", "tune.json", "tune.png"
RESERVED_SECONDS = 2.0
"""For the plot and the end of the process."""
SLOW_SECONDS = 30.0
"""Time that must be left for a measure whose first steps take minutes on a large model."""
SLOW_START = 10.0
"""Seconds of the first steps that are worth a word."""
TOGETHER = 2
"""Combinations that are tried after the single measures."""
DOTS_PER_INCH = 110


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions(TrustOptions):
    """Flags of `tune` beside the recipe's, the plan's and the run's."""

    minutes: AboveZero = 5.0
    """How long it may take in all; a model that is being compiled then is waited for."""
    json: bool = False
    """One JSON object on standard output."""


OPTIONS = TuneOptions
"""What a worker of this command reads its words with."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting that was tried, or several together."""

    settings: tuple[Setting, ...]
    rounds: PairedRounds
    invariance: str = ""
    """Where it is weaker than that of the recipe as it is."""


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
    rows: list[dict[str, Any]] = []
    best: dict[str, Candidate] = {}
    with TrialSession(setup.base, world) as base:
        base.warm_up()
        shares = len(settings) + TOGETHER + 1
        noise = compare(base, setup.base, _share(limit, shares), limit=limit)
        peak = base.peak_of_step()
        for number, (one, setting) in enumerate(settings, start=1):
            tried = try_settings(setup, base, [setting], _share(limit, shares - number), limit, one)
            rows.append(_row(one, setting, tried, peak))
            usable = tried.rounds.beats(noise) and not setting.takes_away
            if usable and (one.name not in best or tried.rounds.ratio > best[one.name].rounds.ratio):
                best[one.name] = tried
        fastest = sorted(best.values(), key=lambda tried: -tried.rounds.ratio)
        same = [tried for tried in fastest if tried.settings[0].is_of_plan and not tried.invariance]
        keep = _together(setup, base, same, _share(limit, TOGETHER), limit)
        everything = keep if same == fastest else _together(setup, base, fastest, limit, limit)
        phase = base.active.schedule.name
    found = {
        "task": setup.recipe.task,
        "recipe_hash": setup.recipe.hash(),
        "phase": phase,
        "machine": setup.hardware.describe(),
        "noise": noise.to_dict(),
        "peak": peak,
        "rows": rows,
        "keep": [setting.flags for setting in keep.settings],
        "keep_rounds": keep.rounds.to_dict() if keep.settings else None,
        "everything": {"flags": [s.flags for s in everything.settings], **everything.rounds.to_dict()},
        "minutes": options.minutes,
        "seconds": _seconds_since_start(),
        "plot": str(setup.folder(FOLDER) / PLOT),
    }
    if world.is_main:
        with atomic_files.explain_write_errors(setup.folder(FOLDER)):
            setup.folder(FOLDER).mkdir(parents=True, exist_ok=True)
            write_plot(found, setup.folder(FOLDER) / PLOT)
            atomic_files.write_json(setup.folder(FOLDER) / FILE, found)
    return found


def _seconds_since_start() -> float:
    """Since the command began, imports included."""
    return time.time() - float(os.environ.get("ISOBATCH_STARTED", time.time()))


def _share(limit: float, shares: int) -> float:
    """The moment at which one of so many shares of the time that is left is over."""
    return now() + max(0.0, limit - now()) / max(1, shares)


def try_settings(
    setup: Setup, base: TrialSession, settings: Sequence[Setting], end: float, limit: float, one: Measure
) -> Candidate:
    """The settings together, beside the base; what comes first in the list decides a field of several."""
    if now() >= limit - (SLOW_SECONDS if one.slow else 0.0):
        return Candidate((*settings,), PairedRounds(problem=NO_TIME))
    plan = {name: value for setting in reversed(settings) for name, value in setting.plan.items()}
    recipe = {name: value for setting in reversed(settings) for name, value in setting.recipe.items()}
    try:
        variant = setup.variant(plan, recipe, fused=all(setting.fused for setting in settings))
    except UserError as error:
        return Candidate((*settings,), PairedRounds(problem=str(error)))
    if base.world.is_main:
        print(printable(f"trying {one.name}: {' '.join(s.flags for s in settings)}"), file=sys.stderr)
    rounds = compare(base, variant, end, one.unit, limit)
    return Candidate((*settings,), rounds, setup.weaker(variant))


def _row(one: Measure, setting: Setting, tried: Candidate, peak: int) -> dict[str, Any]:
    """A row of the table; `worth` is the factor of having the measure, whether the base has it or not."""
    rounds = tried.rounds
    row = {
        "measure": one.name,
        "flags": setting.flags,
        "quoted": one.quoted,
        "has_it": setting.takes_away,
        "changes": "recipe" if setting.recipe else "plan" if setting.plan else "-",
        "per": one.unit.removesuffix("s"),
        "invariance": tried.invariance,
        **rounds.to_dict(),
    }
    if not rounds.problem:
        row["worth"] = worth = 1 / rounds.ratio if setting.takes_away else rounds.ratio
        row["memory"] = rounds.peak / peak if peak and rounds.peak else None
        row["true_here"] = verdict(worth, rounds, one.quoted[0]) if one.quoted else ""
    return row


def verdict(worth: float, rounds: PairedRounds, quoted: float) -> str:
    """Whether a measure is worth here what is quoted at least; open where the noise forbids to say."""
    if len(rounds.ratios) < LEAST_ROUNDS or abs(worth / quoted - 1) <= 2 * rounds.spread:
        return "open"
    return "as quoted" if worth > quoted else "not here"


def compatible(tried: Iterable[Candidate]) -> list[Candidate]:
    """The trials without those that set a field which a faster one sets, too."""
    found: list[Candidate] = []
    fields: set[str] = set()
    for one in tried:
        own = {name for setting in one.settings for name in (*setting.plan, *setting.recipe)}
        if not own & fields:
            found, fields = [*found, one], fields | own
    return found


def _together(setup: Setup, base: TrialSession, best: list[Candidate], end: float, limit: float) -> Candidate:
    """All of them where they are faster together than the first, which is the fastest; else that one."""
    if not best:
        return Candidate((), PairedRounds(problem="nothing helps"))
    together = [setting for one in compatible(best) for setting in one.settings]
    if len(together) == 1:
        return best[0]
    every = Measure(name="what helps, together", changes=lambda _: together)
    found = try_settings(setup, base, together, end, limit, every)
    return found if found.rounds.ratio > best[0].rounds.ratio else best[0]


def table_lines(found: dict[str, Any]) -> list[str]:
    """The findings for a person."""
    noise, everything = found["noise"], found["everything"]
    lines = [
        f"{found['task']}, phase {found['phase']}, on {found['machine']}: {found['seconds'] / 60:.1f} of"
        f" {found['minutes']:g} minutes",
        f"the recipe against itself: {noise.get('ratio', 0):.2f} +-{noise.get('spread', 0):.0%}",
        "",
        f"  {'measure':<26}{'tried':<34}{'quoted':>10}{'here':>7}{'+-':>6}{'memory':>8}  {'changes':<8}",
        *map(_line, found["rows"]),
        "",
        "(here: times as fast with the measure, a sample or a token; memory: tensors of a step, more where"
        " micro-batches become larger; open: within the noise)",
    ]
    if found["keep"]:
        factor = found["keep_rounds"]["ratio"]
        lines.append(f"type: {' '.join(found['keep'])} ({factor:.2f} times as fast, the same recipe)")
    else:
        lines.append("keep the plan as it is: no choice of it is faster beyond the noise")
    if everything["flags"] and everything["flags"] != found["keep"]:
        what = "faster still, but another recipe or other rounding"
        lines.append(f"{what}: {' '.join(everything['flags'])} ({everything['ratio']:.2f} times as fast)")
    return [*lines, f"plot: {found['plot']}"]


def _line(row: dict[str, Any]) -> str:
    quoted = "{:.2f}-{:.2f}".format(*row["quoted"]) if row["quoted"] else ""
    start = f"  {row['measure']:<26}{row['flags']:<34}{quoted:>10}"
    if "worth" not in row:
        return f"{start}  {row['problem']}"
    memory = f"{row['memory']:.0%}" if row["memory"] else ""
    remarks = [
        "the plan has it" if row["has_it"] else "",
        f"rounds differently ({row['invariance']})" if row["invariance"] else "",
        row["true_here"],
        f"first steps {row['warm_seconds']:.0f} s" if row["warm_seconds"] > SLOW_START else "",
    ]
    remark = ", ".join(filter(None, remarks))
    spread = f"{row['spread']:.0%}" if row["rounds"] > 1 else "?"
    return f"{start}{row['worth']:>7.2f}{spread:>6}{memory:>8}  {row['changes']:<8} {remark}".rstrip()


def write_plot(found: dict[str, Any], file: Path) -> None:
    """Draw what each measure is worth, with its spread, over the range that is commonly quoted."""
    rows = [row for row in found["rows"] if "worth" in row][::-1]

    def draw(ax: Any) -> None:
        for place, row in enumerate(rows):
            if row["quoted"]:
                low, high = row["quoted"]
                ax.barh(place, high - low, left=low, height=0.7, color="#dddddd")
        worth = [row["worth"] for row in rows]
        error = [row["worth"] * row["spread"] for row in rows]
        ax.errorbar(worth, range(len(rows)), xerr=error, fmt="o", ms=4, color="#1f5fa8", capsize=2)
        ax.axvline(1.0, color="black", lw=0.8)
        ax.set_yticks(range(len(rows)), [f"{row['measure']} ({row['flags']})" for row in rows], fontsize=7)
        ax.set(xlabel="times as fast here; grey: commonly quoted")
        ax.set_title(f"{found['task']} on {found['machine']}", loc="left", fontsize=9)

    figure = draw_figure(draw, 7.5, 1.2 + 0.28 * len(rows))
    figure.savefig(file, dpi=DOTS_PER_INCH)
