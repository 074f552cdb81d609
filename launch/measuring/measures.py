"""The measures that training guides name, as changes of a plan or a recipe that can be tried here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core.flags import spelling, value_text

if TYPE_CHECKING:
    from isobatch.launch.measuring.trial import Variant


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
    def fields(self) -> set[str]:
        """What it sets."""
        return {*self.plan, *self.recipe}

    def __or__(self, other: Setting) -> Setting:
        """Both together."""
        return Setting("together", {**self.plan, **other.plan}, {**self.recipe, **other.recipe})


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
    yield Setting("activation checkpointing", {"activation_checkpointing": not plan.activation_checkpointing})
    for optimizer in sorted({"adamw", "adamw8bit"} - {recipe.optimizer}):
        yield Setting("optimizer", recipe={"optimizer": optimizer})
    if recipe.options.get("monitor") == "full":
        yield from (Setting("monitoring interval", recipe={"monitor": how}) for how in ("fast", "off"))
    modes = ["off"] if plan.compile != "off" else ["on", "reduce-overhead"] if gpu else ["on"]
    yield from (Setting("compile", {"compile": mode}) for mode in modes)
