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
from isobatch.launch.measuring.measures import MEASURES, Setting, Unit
from isobatch.launch.measuring.setup import Setup, measure_in_world, read_setup
from isobatch.launch.measuring.trial import NO_TIME, PairedRounds, TrialSession, compare

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from isobatch.engine.distributed.communicator import Communicator

FOLDER, FILE = "tuned", "tune.json"
RESERVED_SECONDS = 2.0
"""For the end of the process."""


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
    memory: float | None = None
    """The peak that the plan predicts, over that of the recipe as it is."""
    invariance: str = ""
    """Where it is weaker than that of the recipe as it is."""

    @property
    def flags(self) -> str:
        return " ".join(setting.flags for setting in self.settings)

    @property
    def learns_the_same(self) -> bool:
        """Whether it is of the plan alone, and as exact."""
        return not self.invariance and not any(setting.recipe for setting in self.settings)


def tune(words: Sequence[str]) -> int:
    """Usage: tune --task TASK [--minutes 5] [--json] [flags]

    Tries batch, micro-batch, precision, compile, loading, packing and so on, each beside the recipe as it is,
    in rounds that alternate, then what helps together. Writes tune.json to OUT/tuned/.
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
    helping: dict[str, Candidate] = {}
    with TrialSession(setup.base, world) as base:
        base.warm_up()
        noise = compare(base, setup.base, _share(limit, len(settings) + 2), limit=limit)
        for left, (one, setting) in zip(range(len(settings), 0, -1), settings, strict=True):
            tried = _try(setup, base, (setting,), _share(limit, left + 1), limit, one.unit)
            changes = "recipe" if setting.recipe else "plan"
            row = {"measure": one.name, "flags": setting.flags, "quoted": one.quoted, "changes": changes}
            rows.append(row | _figures(tried) | {"per": one.unit.removesuffix("s")})
            best = helping.get(one.name)
            if tried.rounds.beats(noise) and (best is None or tried.rounds.ratio > best.rounds.ratio):
                helping[one.name] = tried
        fastest = sorted(helping.values(), key=lambda tried: -tried.rounds.ratio)
        same = compatible(tried for tried in fastest if tried.learns_the_same)
        keep = same[0] if same else None
        if keep and len(same) > 1:
            together = _try(setup, base, tuple(t.settings[0] for t in same), limit, limit)
            keep = together if together.rounds.ratio > keep.rounds.ratio else keep
        phase = base.active.schedule.name
    found = {
        "task": setup.recipe.task,
        "recipe_hash": setup.recipe.hash(),
        "phase": phase,
        "machine": setup.hardware.describe(),
        "noise": noise.to_dict(),
        "rows": rows,
        "keep": keep and {"flags": keep.flags, **_figures(keep)},
        "other": [tried.flags for tried in compatible(fastest) if not tried.learns_the_same],
        "minutes": options.minutes,
        "seconds": _seconds_since_start(),
    }
    if world.is_main:
        with atomic_files.explain_write_errors(setup.folder(FOLDER)):
            setup.folder(FOLDER).mkdir(parents=True, exist_ok=True)
            atomic_files.write_json(setup.folder(FOLDER) / FILE, found)
    return found


def _seconds_since_start() -> float:
    """Since the command began, imports included."""
    return time.time() - float(os.environ.get("ISOBATCH_STARTED", time.time()))


def _share(limit: float, shares: int) -> float:
    """The moment at which one of so many shares of the time that is left is over."""
    return now() + max(0.0, limit - now()) / shares


def _try(
    setup: Setup,
    base: TrialSession,
    settings: tuple[Setting, ...],
    end: float,
    limit: float,
    unit: Unit = "samples",
) -> Candidate:
    """The settings together, beside the base, where it is not too late to start."""
    if now() >= limit:
        return Candidate(settings, PairedRounds(problem=NO_TIME))
    plan = {name: value for setting in settings for name, value in setting.plan.items()}
    recipe = {name: value for setting in settings for name, value in setting.recipe.items()}
    try:
        variant = setup.variant(plan, recipe)
    except UserError as error:
        return Candidate(settings, PairedRounds(problem=str(error)))
    if base.world.is_main:
        print(printable(f"trying {' '.join(s.flags for s in settings)}"), file=sys.stderr)
    rounds = compare(base, variant, end, unit, limit)
    memory = variant.plan.predicted_peak_memory_bytes / max(1, setup.plan.predicted_peak_memory_bytes)
    return Candidate(settings, rounds, memory, setup.weaker(variant))


def _figures(tried: Candidate) -> dict[str, Any]:
    return {**tried.rounds.to_dict(), "memory": tried.memory, "invariance": tried.invariance}


def compatible(tried: Iterable[Candidate]) -> list[Candidate]:
    """Those that set no field which an earlier one sets, too."""
    found: list[Candidate] = []
    fields: set[str] = set()
    for one in tried:
        own = {name for setting in one.settings for name in (*setting.plan, *setting.recipe)}
        if not own & fields:
            found, fields = [*found, one], fields | own
    return found


def table_lines(found: dict[str, Any]) -> list[str]:
    """The findings for a person."""
    noise, keep = found["noise"], found["keep"]
    lines = [
        f"{found['task']}, phase {found['phase']}, on {found['machine']}: {found['seconds'] / 60:.1f} of"
        f" {found['minutes']:g} minutes",
        f"the recipe against itself: {noise.get('ratio', 0):.2f} +-{noise.get('spread', 0):.0%}",
        "",
        f"  {'measure':<26}{'tried':<34}{'quoted':>10}{'here':>7}{'+-':>6}{'memory':>8}  {'changes':<8}",
        *map(_line, found["rows"]),
        "",
        "(here: times as fast with the flags, a sample or a token; memory: the plan's peak with them)",
        f"type: {keep['flags']} ({keep['ratio']:.2f} times as fast, the same recipe)"
        if keep
        else "keep the plan as it is: no choice of it is faster beyond the noise",
    ]
    if found["other"]:
        lines.append(f"faster, but another recipe or other rounding: {', '.join(found['other'])}")
    return lines


def _line(row: dict[str, Any]) -> str:
    quoted = "{:.2f}-{:.2f}".format(*row["quoted"]) if row["quoted"] else ""
    start = f"  {row['measure']:<26}{row['flags']:<34}{quoted:>10}"
    if "problem" in row:
        return f"{start}  {row['problem']}"
    spread = f"{row['spread']:.0%}" if row["rounds"] > 1 else "?"
    remark = f"rounds differently ({row['invariance']})" if row["invariance"] else ""
    return (
        f"{start}{row['ratio']:>7.2f}{spread:>6}{row['memory']:>8.0%}  {row['changes']:<8} {remark}".rstrip()
    )
