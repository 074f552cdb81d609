"""The measures that training guides name, as changes of a plan or a recipe that can be tried here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from isobatch.engine.machine.detect import allowed_cpus
from isobatch.launch.measuring.setup import Setup

Unit = Literal["samples", "tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to take a measure."""

    flags: str
    """As typed; what is no flag in words."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Options of the plan -> values; `threads` is a field of it."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the recipe, or of the task's options -> values."""
    fused: bool = True
    """Whether the optimizer may use its fused kernel."""
    takes_away: bool = False
    """The base has the measure, and this is the base without it: the worth is the inverse of the ratio."""

    @property
    def is_of_plan(self) -> bool:
        """Whether options of the plan alone make it, so that it learns the same."""
        return bool(self.plan) and not (self.recipe or self.takes_away or "threads" in self.plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """A speed-up that is commonly named."""

    name: str
    quoted: tuple[float, float] | None = None
    """Least and largest factor that is commonly quoted; None where none is."""
    changes: Callable[[Setup], list[Setting]]
    """Ways to take it in this setup; none where it does not apply."""
    unit: Unit = "samples"
    """What it makes faster: a sample or, where a change draws other samples, a token."""
    slow: bool = False
    """Whether its first steps take minutes."""


def _plan(option: str, value: Any, takes_away: bool = False) -> Setting:
    """The setting of one option of the plan, as its flag."""
    return Setting(flags=f"--{option.replace('_', '-')} {value}", plan={option: value}, takes_away=takes_away)


def _recipe(name: str, value: Any, takes_away: bool = False) -> Setting:
    """The setting of one field of the recipe, as its flag."""
    flags = f"--{name.replace('_', '-')} {value}"
    given = {"on": True, "off": False}.get(value, value)
    return Setting(flags=flags, recipe={name: given}, takes_away=takes_away)


def _lengths_vary(setup: Setup) -> bool:
    return setup.facts.longest > min(setup.facts.lengths)


def _batch(setup: Setup) -> list[Setting]:
    sizes = [setup.recipe.batch_size * factor for factor in (2, 4)]
    return [_recipe("batch_size", n) for n in sizes if n <= setup.facts.samples["train"]]


def _accumulation(setup: Setup) -> list[Setting]:
    """Twice the batch in micro-batches of the same size: half as many updates."""
    batch, samples = 2 * setup.recipe.batch_size, setup.usual_samples()
    if batch > setup.facts.samples["train"]:
        return []
    flags = f"--batch-size {batch} --micro-batch {samples}"
    return [Setting(flags=flags, recipe={"batch_size": batch}, plan={"micro_batch": samples})]


def _micro_batch(setup: Setup) -> list[Setting]:
    now, most = setup.usual_samples(), math.ceil(setup.recipe.batch_size / setup.plan.processes)
    if setup.asked.micro_batch:
        return [Setting(flags="no --micro-batch", plan={"micro_batch": None})]
    sizes = {min(most, 2 * now), max(1, now // 2)} - {now}
    if setup.plan.micro_batch_tokens < most * setup.facts.longest:  # the budget in tokens may cut it
        sizes.add(most)
    return [_plan("micro_batch", n) for n in sorted(sizes, reverse=True)]


def _precision(setup: Setup) -> list[Setting]:
    if setup.plan.precision != "fp32":
        return [_plan("precision", "fp32", takes_away=True)]
    if setup.plan.device == "cuda":
        return [_plan("precision", "bf16" if setup.hardware.gpu.native_bf16 else "fp16")]
    return [_plan("precision", "bf16")] if setup.hardware.cpu_bf16 else []


def _compile(setup: Setup) -> list[Setting]:
    if setup.plan.compile != "off":
        return [_plan("compile", "off", takes_away=True)]
    modes = ["on", *(["reduce-overhead"] if setup.plan.device == "cuda" else [])]
    return [_plan("compile", mode) for mode in modes]


def _loading(setup: Setup) -> list[Setting]:
    cores = max(1, setup.hardware.cpus // setup.plan.processes)
    # Processes that wait for a slow storage need no core of their own.
    counts = sorted({min(4, cores), min(8, 2 * cores)} - {setup.plan.workers})
    return [*(_plan("workers", n) for n in counts), _plan("prefetch", 8)]


def _pinning(setup: Setup) -> list[Setting]:
    pins = setup.plan.pin_memory
    return [_plan("pin_memory", "off" if pins else "on", pins)] if setup.plan.device == "cuda" else []


def _length_grouping(setup: Setup) -> list[Setting]:
    if setup.recipe.group_by_length:
        return [_recipe("group_by_length", "off", takes_away=True)]
    return [_recipe("group_by_length", "on")] if _lengths_vary(setup) else []


def _packing(setup: Setup) -> list[Setting]:
    if setup.plan.pack:
        return [_plan("pack", "off", takes_away=True)]
    return [_plan("pack", "on")] if setup.size.packs and _lengths_vary(setup) else []


def _checkpointing(setup: Setup) -> list[Setting]:
    return [_plan("activation_checkpointing", "off" if setup.plan.activation_checkpointing else "on")]


def _fused(setup: Setup) -> list[Setting]:
    if setup.recipe.optimizer == "adamw":  # made with torch's fused kernel
        return [Setting(flags="its kernel off", fused=False, takes_away=True)]
    return [_recipe("optimizer", "adamw")]


def _eight_bit(setup: Setup) -> list[Setting]:
    has_it = setup.recipe.optimizer == "adamw8bit"
    return [_recipe("optimizer", "adamw" if has_it else "adamw8bit", takes_away=has_it)]


def _monitoring(setup: Setup) -> list[Setting]:
    full = setup.recipe.options.get("monitor") == "full"
    return [Setting(flags=f"--monitor {pace}", recipe={"monitor": pace}) for pace in ("fast", "off") if full]


def _length(setup: Setup) -> list[Setting]:
    half = min(setup.recipe.max_length, setup.facts.longest) // 2
    return [_recipe("max_length", half)] if half >= 8 else []


def _attention(setup: Setup) -> list[Setting]:
    eager = setup.plan.attention == "eager"
    return [_plan("attention", "sdpa" if eager else "eager", not eager)] if setup.size.heads > 1 else []


def _threads(setup: Setup) -> list[Setting]:
    plan, cores = setup.plan, usable_cores()
    if plan.device != "cpu" or plan.processes > 1:
        return []
    if plan.threads < cores:
        return [Setting(flags=f"{cores} threads (SLURM_CPUS_PER_TASK={cores})", plan={"threads": cores})]
    return [Setting(flags="one thread", plan={"threads": 1}, takes_away=True)] if cores > 1 else []


def usable_cores() -> int:
    """Cores that this process may run on, by affinity and quota, whatever a scheduler says it granted."""
    return allowed_cpus(Path("/"), {})


MEASURES = (
    Measure(name="batch", quoted=(1.3, 2.0), changes=_batch),
    Measure(name="accumulation", quoted=(1.1, 1.5), changes=_accumulation),
    Measure(name="micro-batch", changes=_micro_batch),
    Measure(name="loading", quoted=(1.2, 1.5), changes=_loading),
    Measure(name="pinned memory", changes=_pinning),
    Measure(name="mixed precision", quoted=(1.2, 2.0), changes=_precision),
    Measure(name="length limit", quoted=(1.2, 1.4), changes=_length),
    Measure(name="length grouping", changes=_length_grouping, unit="tokens"),
    Measure(name="packing", changes=_packing),
    Measure(name="attention kernel", changes=_attention),
    Measure(name="activation checkpointing", changes=_checkpointing),
    Measure(name="fused optimizer", quoted=(1.1, 1.3), changes=_fused),
    Measure(name="8-bit optimizer", changes=_eight_bit),
    Measure(name="monitoring interval", quoted=(1.05, 1.15), changes=_monitoring),
    Measure(name="threads", changes=_threads),
    Measure(name="compile", quoted=(1.1, 2.0), changes=_compile, slow=True),
)
"""Quoted factors are those of common guides for one GPU; `tune` puts what it measures beside them."""


def measure_named(name: str) -> Measure:
    """The measure of this name."""
    return next(measure for measure in MEASURES if measure.name == name)
