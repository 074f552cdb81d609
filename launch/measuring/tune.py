"""`tune`: what each measure that training guides name is worth here, measured in bounded time.

A measure is a change of the plan or of the recipe that can be tried on this machine (`settings`).
"""

from __future__ import annotations

import functools
import math
import operator
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from isobatch.core.errors import first_line
from isobatch.core.flags import spelling, value_text
from isobatch.core.measures import now
from isobatch.core.number_ranges import AboveZero
from isobatch.core.plan import INVARIANCES
from isobatch.core.terminal import print_lines
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.runs.classify_errors import classify
from isobatch.launch.local.options import AnswerOptions
from isobatch.launch.measuring.trial import TrialSession, Variant, answer_in_world, trial

RESERVED_SECONDS = 2.0
"""For the end of the process."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
LEAST_GAIN = 0.03
"""What is less than this faster counts as the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneOptions(AnswerOptions):
    """Flags of `tune` beside the recipe's, the plan's and the run's."""

    minutes: AboveZero = 5.0
    """How long it may take in all; a model that is being compiled then is waited for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to take a measure."""

    measure: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Options of the plan -> values."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the recipe, or of the task's options -> values."""

    @property
    def flags(self) -> str:
        """As typed."""
        typed = {spelling(name): value for name, value in {**self.recipe, **self.plan}.items()}
        return " ".join(f"no {n}" if v is None else f"{n} {value_text(v)}" for n, v in typed.items())

    @property
    def unit(self) -> Literal["samples", "tokens"]:
        """What it makes faster: a sample or, where a change draws other samples, a token."""
        return "tokens" if "group_by_length" in self.recipe else "samples"

    @property
    def taken(self) -> set[str]:
        """Its measure and what it sets, of which another may change nothing beside it."""
        return {self.measure, *self.plan, *self.recipe}

    def __or__(self, other: Setting) -> Setting:
        """Both together."""
        return Setting("together", {**self.plan, **other.plan}, {**self.recipe, **other.recipe})


@dataclass(slots=True)
class PairedRounds:
    """A setting beside the recipe as it is: of each round, how many times as fast it was."""

    setting: Setting
    ratios: list[float] = field(default_factory=list)
    """Of each round: time of the base over that of the variant, for a sample (or a token)."""
    problem: str = ""
    """Why there is no figure."""
    memory: float | None = None
    """The peak that the plan predicts, over that of the recipe as it is."""
    invariance: str = ""
    """Where it is weaker than that of the recipe as it is."""

    @property
    def ratio(self) -> float:
        """The median over the rounds; 0 without any."""
        return median(self.ratios) if self.ratios else 0.0

    @property
    def spread(self) -> float:
        """Median distance of a round's ratio from the median, as a share of it."""
        return median(abs(r - self.ratio) for r in self.ratios) / self.ratio if self.ratios else 0.0

    @property
    def learns_the_same(self) -> bool:
        """Whether it is of the plan alone, and as exact."""
        return not self.invariance and not self.setting.recipe

    def beats(self, noise: PairedRounds) -> bool:
        """Whether it is faster, beyond the noise of its rounds, and of the base beside itself."""
        if self.problem or len(self.ratios) < LEAST_ROUNDS:
            return False
        return self.ratio > 1 + max(LEAST_GAIN, 2 * self.spread, abs(noise.ratio - 1) + noise.spread)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        rounds = {"ratio": self.ratio, "spread": self.spread, "rounds": len(self.ratios)}
        return {
            "measure": self.setting.measure,
            "flags": self.setting.flags,
            "changes": "recipe" if self.setting.recipe else "plan",
            "per": self.setting.unit.removesuffix("s"),
            **({"problem": self.problem} if self.problem else rounds),
            "memory": self.memory,
            "invariance": self.invariance,
        }


def settings(base: Variant) -> Iterator[Setting]:
    """Every way to take a measure here, or to do without it where the plan has it; the slow ones last."""
    recipe, facts, asked = base.target.recipe, base.target.facts, base.target.asked
    plan, size, hardware = base.plan, base.size, base.target.hardware
    batch, most, gpu = recipe.batch_size, facts.samples["train"], plan.device == "cuda"
    share = math.ceil(batch / plan.processes)
    # About how many samples a micro-batch has on one process.
    usual = min(share, plan.micro_batch_samples, plan.micro_batch_tokens // max(1.0, facts.mean_length))
    now, lengths_vary = max(1, int(usual)), facts.longest > min(facts.lengths)

    yield from (Setting("batch", recipe={"batch_size": n}) for n in (2 * batch, 4 * batch) if n <= most)
    if 2 * batch <= most:  # in micro-batches of the same size: half as many updates
        yield Setting("accumulation", {"micro_batch": now}, {"batch_size": 2 * batch})
    sizes = {min(share, 2 * now), max(1, now // 2)} - {now}
    if plan.micro_batch_tokens < share * facts.longest:  # the budget in tokens may cut it
        sizes.add(share)
    others = [None] if asked.micro_batch else sorted(sizes, reverse=True)
    yield from (Setting("micro-batch", {"micro_batch": one}) for one in others)
    # Processes that wait for a slow storage need no core of their own.
    cores = max(1, hardware.cpus // plan.processes)
    for workers in sorted({min(4, cores), min(8, 2 * cores)} - {plan.workers}):
        yield Setting("loading", {"workers": workers})
    yield Setting("loading", {"prefetch": 8})
    if gpu:
        yield Setting("pinned memory", {"pin_memory": not plan.pin_memory})
    if plan.precision != "fp32":
        yield Setting("mixed precision", {"precision": "fp32"})
    elif gpu or hardware.cpu_bf16:
        fp16 = gpu and not hardware.gpu.native_bf16
        yield Setting("mixed precision", {"precision": "fp16" if fp16 else "bf16"})
    if (half := min(recipe.max_length, facts.longest) // 2) >= 8:
        yield Setting("length limit", recipe={"max_length": half})
    if recipe.group_by_length or lengths_vary:
        yield Setting("length grouping", recipe={"group_by_length": not recipe.group_by_length})
    if plan.pack or (size.packs and lengths_vary):
        yield Setting("packing", {"pack": not plan.pack})
    if size.heads > 1:
        yield Setting("attention kernel", {"attention": "sdpa" if plan.attention == "eager" else "eager"})
    for how in sorted({"on", "selective", "off"} - {plan.activation_checkpointing}):
        yield Setting("activation checkpointing", {"activation_checkpointing": how})
    for optimizer in sorted({"adamw", "adamw8bit"} - {recipe.optimizer}):
        yield Setting("optimizer", recipe={"optimizer": optimizer})
    if recipe.options.get("monitor") == "full":
        yield from (Setting("monitoring interval", recipe={"monitor": how}) for how in ("fast", "off"))
    modes = ["off"] if plan.compile != "off" else ["on", "max-autotune", "reduce-overhead"] if gpu else ["on"]
    yield from (Setting("compile", {"compile": mode}) for mode in modes)


def tune(words: Sequence[str]) -> int:
    """Usage: tune --task TASK [--minutes 5] [--json] [flags]

    Tries batch, micro-batch, precision, compile, loading, packing and so on, each beside the recipe as it is,
    in rounds that alternate, then what helps together. Writes tune.json to OUT/tuned/.
    """
    return answer_in_world(words, "tune", "tuned", TuneOptions, measure)


def measure(base: Variant, world: Communicator, options: TuneOptions, _: Path) -> dict[str, Any]:
    """The table of measures, in every process of the world. JSON."""
    limit = now() + 60 * options.minutes - _seconds_since_start() - RESERVED_SECONDS
    wanted = list(settings(base))
    with trial(base, world) as session:
        noise = try_setting(session, Setting("the recipe itself"), len(wanted) + 2, limit)
        shares = range(len(wanted) + 1, 1, -1)
        tried = [try_setting(session, one, n, limit) for one, n in zip(wanted, shares, strict=True)]
        fastest = sorted((one for one in tried if one.beats(noise)), key=lambda one: -one.ratio)
        same = compatible(one for one in fastest if one.learns_the_same)
        if len(same) > 1:
            all_of_them = functools.reduce(operator.or_, (one.setting for one in same))
            same.append(try_setting(session, all_of_them, 1, limit))
        keep = max(same, key=lambda one: one.ratio, default=None)
        phase = session.state.schedule.name
    return {
        "task": base.target.recipe.task,
        "recipe_hash": base.target.recipe.hash(),
        "phase": phase,
        "machine": base.target.hardware.describe(),
        "noise": noise.to_dict(),
        "rows": [one.to_dict() for one in tried],
        "keep": keep and keep.to_dict(),
        "other": [one.setting.flags for one in compatible(fastest) if not one.learns_the_same],
        "minutes": options.minutes,
        "seconds": _seconds_since_start(),
    }


def _seconds_since_start() -> float:
    """Since the command began, imports included."""
    return time.time() - float(os.environ.get("ISOBATCH_STARTED", time.time()))


def try_setting(session: TrialSession, setting: Setting, shares: int, limit: float) -> PairedRounds:
    """Rounds of the base, which is open as `session`, and of the base with a setting.

    They take about one of so many shares of the time until `limit` (as of `now`), at least LEAST_ROUNDS; none
    begins that would end after the limit. What goes wrong is told and not raised: others are tried after it.
    """
    found, began = PairedRounds(setting), now()
    try:
        if session.world.broadcast_object(began >= limit):
            raise TimeoutError("no time was left to measure it")
        variant = session.variant.changed(setting.plan, setting.recipe)
        before, after = session.variant.plan, variant.plan
        found.memory = after.predicted_peak_memory_bytes / max(1, before.predicted_peak_memory_bytes)
        if INVARIANCES.index(after.invariance) > INVARIANCES.index(before.invariance):
            found.invariance = after.invariance
        if session.world.is_main and setting.flags:
            print_lines(f"trying {setting.flags}")
        with trial(variant, session.world) as other:
            alternate(session, other, found, began + (limit - began) / shares, limit)
        if not found.ratios:
            raise TimeoutError("no time was left to measure it")
    except Exception as error:
        found.problem = first_line(classify(error) or error)[:200]
    return found


def alternate(base: TrialSession, other: TrialSession, found: PairedRounds, end: float, limit: float) -> None:
    """Add rounds of both to `found`, in turn, which of them is first too, until about `end`."""
    steps, length = base.steps_per_round, 0.0
    while True:
        began, rounds = now(), len(found.ratios)
        goes_on = rounds < MOST_ROUNDS and began + length <= (end if rounds >= LEAST_ROUNDS else limit)
        if not base.world.broadcast_object(goes_on):  # every rank takes as many as rank 0's clock allows
            return
        order = (base, other) if rounds % 2 == 0 else (other, base)
        costs = {one: one.round(steps).seconds_for(found.setting.unit) for one in order}
        found.ratios.append(costs[base] / costs[other])
        length = now() - began


def compatible(tried: Iterable[PairedRounds]) -> list[PairedRounds]:
    """Those of other measures, and other fields, than all that come before them."""
    found: list[PairedRounds] = []
    for one in tried:
        if not any(one.setting.taken & other.setting.taken for other in found):
            found.append(one)
    return found
