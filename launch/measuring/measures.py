"""The measures that training guides name, as changes of a plan or a recipe that can be tried here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from isobatch.launch.measuring.setup import Setup

Unit = Literal["samples", "tokens"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to take a measure."""

    flags: str
    """As typed."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Options of the plan -> values."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the recipe, or of the task's options -> values."""


@dataclass(frozen=True, slots=True)
class Measure:
    """A speed-up that is commonly named."""

    name: str
    changes: Callable[[Setup], list[Setting]]
    """Ways to take it in this setup, or to do without it where the plan has it; none where none applies."""
    quoted: tuple[float, float] | None = None
    """Least and largest factor that is commonly quoted; None where none is."""
    unit: Unit = "samples"
    """What it makes faster: a sample or, where a change draws other samples, a token."""
    slow: bool = False
    """Whether its first steps take minutes."""


def _flag(name: str, value: Any) -> str:
    return f"--{name.replace('_', '-')} {value}"


def _plan(option: str, *values: Any) -> list[Setting]:
    """An option of the plan, by each of these values."""
    return [Setting(_flag(option, value), plan={option: value}) for value in values]


def _switch(option: str, is_on: bool) -> list[Setting]:
    """An option of the plan that is on or off, the other way."""
    return _plan(option, "off" if is_on else "on")


def _recipe(name: str, *values: Any) -> list[Setting]:
    """A field of the recipe, by each of these values."""
    return [Setting(_flag(name, value), recipe={name: value}) for value in values]


def _lengths_vary(setup: Setup) -> bool:
    return setup.facts.longest > min(setup.facts.lengths)


def _batch(setup: Setup) -> list[Setting]:
    batch, most = setup.recipe.batch_size, setup.facts.samples["train"]
    return _recipe("batch_size", *(n for n in (2 * batch, 4 * batch) if n <= most))


def _accumulation(setup: Setup) -> list[Setting]:
    """Twice the batch in micro-batches of the same size: half as many updates."""
    batch, samples = 2 * setup.recipe.batch_size, setup.usual_samples()
    flags = f"{_flag('batch_size', batch)} {_flag('micro_batch', samples)}"
    fits = batch <= setup.facts.samples["train"]
    return [Setting(flags, {"micro_batch": samples}, {"batch_size": batch})] if fits else []


def _micro_batch(setup: Setup) -> list[Setting]:
    now, most = setup.usual_samples(), math.ceil(setup.recipe.batch_size / setup.plan.processes)
    if setup.asked.micro_batch:
        return [Setting("no --micro-batch", plan={"micro_batch": None})]
    sizes = {min(most, 2 * now), max(1, now // 2)} - {now}
    if setup.plan.micro_batch_tokens < most * setup.facts.longest:  # the budget in tokens may cut it
        sizes.add(most)
    return _plan("micro_batch", *sorted(sizes, reverse=True))


def _precision(setup: Setup) -> list[Setting]:
    if setup.plan.precision != "fp32":
        return _plan("precision", "fp32")
    if setup.plan.device == "cuda":
        return _plan("precision", "bf16" if setup.hardware.gpu.native_bf16 else "fp16")
    return _plan("precision", "bf16") if setup.hardware.cpu_bf16 else []


def _compile(setup: Setup) -> list[Setting]:
    if setup.plan.compile != "off":
        return _plan("compile", "off")
    return _plan("compile", "on", *(["reduce-overhead"] if setup.plan.device == "cuda" else []))


def _loading(setup: Setup) -> list[Setting]:
    cores = max(1, setup.hardware.cpus // setup.plan.processes)
    # Processes that wait for a slow storage need no core of their own.
    counts = sorted({min(4, cores), min(8, 2 * cores)} - {setup.plan.workers})
    return [*_plan("workers", *counts), *_plan("prefetch", 8)]


def _length_grouping(setup: Setup) -> list[Setting]:
    if not (setup.recipe.group_by_length or _lengths_vary(setup)):
        return []
    wanted = not setup.recipe.group_by_length
    return [Setting(_flag("group_by_length", "on" if wanted else "off"), {}, {"group_by_length": wanted})]


def _packing(setup: Setup) -> list[Setting]:
    applies = setup.plan.pack or (setup.size.packs and _lengths_vary(setup))
    return _switch("pack", setup.plan.pack) if applies else []


def _monitoring(setup: Setup) -> list[Setting]:
    return _recipe("monitor", "fast", "off") if setup.recipe.options.get("monitor") == "full" else []


def _length(setup: Setup) -> list[Setting]:
    half = min(setup.recipe.max_length, setup.facts.longest) // 2
    return _recipe("max_length", half) if half >= 8 else []


def _attention(setup: Setup) -> list[Setting]:
    other = "sdpa" if setup.plan.attention == "eager" else "eager"
    return _plan("attention", other) if setup.size.heads > 1 else []


MEASURES = (
    Measure("batch", _batch, quoted=(1.3, 2.0)),
    Measure("accumulation", _accumulation, quoted=(1.1, 1.5)),
    Measure("micro-batch", _micro_batch),
    Measure("loading", _loading, quoted=(1.2, 1.5)),
    Measure(
        "pinned memory",
        lambda s: _switch("pin_memory", s.plan.pin_memory) if s.plan.device == "cuda" else [],
    ),
    Measure("mixed precision", _precision, quoted=(1.2, 2.0)),
    Measure("length limit", _length, quoted=(1.2, 1.4)),
    Measure("length grouping", _length_grouping, unit="tokens"),
    Measure("packing", _packing),
    Measure("attention kernel", _attention),
    Measure(
        "activation checkpointing",
        lambda s: _switch("activation_checkpointing", s.plan.activation_checkpointing),
    ),
    Measure(
        "optimizer",
        lambda s: _recipe("optimizer", *sorted({"adamw", "adamw8bit"} - {s.recipe.optimizer})),
        quoted=(1.1, 1.3),
    ),
    Measure("monitoring interval", _monitoring, quoted=(1.05, 1.15)),
    Measure("compile", _compile, quoted=(1.1, 2.0), slow=True),
)
"""Quoted factors are those of common guides for one GPU; `tune` puts what it measures beside them."""


def measure_named(name: str) -> Measure:
    """The measure of this name."""
    return next(measure for measure in MEASURES if measure.name == name)
