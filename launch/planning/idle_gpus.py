"""GPUs that stay idle at a recipe's global batch, and what they would bring at a larger one."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError
from isobatch.launch.planning.comparison import short_duration
from isobatch.launch.planning.run_time import run_time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isobatch.core.plan import Plan
    from isobatch.launch.planning.estimate import Target
    from isobatch.models.base import ModelSize

LARGEST_SCALE = 1024
LEAST_GAIN = 1.1
"""How many times faster a scaled run must be to be worth a word."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleGpus:
    """A scale of the global batch at which more GPUs would work; 1 where none would make the run faster."""

    devices: int
    used: int
    scale: int
    seconds: float
    """Of the whole run as planned."""
    scaled_seconds: float
    """Of the whole run at `scale`: as many epochs, fewer steps."""
    scaled_used: int
    steps: tuple[int, ...] | None = None
    """The length at `scale` of a recipe whose length is in steps: those of as many samples."""

    @property
    def flags(self) -> str:
        """What to add to the command line; empty at scale 1."""
        if self.scale == 1:
            return ""
        steps = f" --steps {','.join(map(str, self.steps))}" if self.steps else ""
        return f"--scale-batch {self.scale} --lr-rule sqrt{steps}"

    def sentence(self) -> str:
        """What a plan says first."""
        idle = self.devices - self.used
        if self.scale == 1:
            time = short_duration(self.seconds)
            return f"{idle} of {self.devices} GPUs idle: no larger batch makes this run of {time} faster"
        rest = self.devices - self.scaled_used
        some = f" on {self.scaled_used} GPUs" if rest else ""
        return (
            f"{idle} of {self.devices} GPUs idle: {self.flags} takes"
            f" {short_duration(self.scaled_seconds)} in place of {short_duration(self.seconds)}{some};"
            " another recipe"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "devices": self.devices,
            "used": self.used,
            "scale": self.scale,
            "run_seconds": self.seconds,
            "scaled_run_seconds": self.scaled_seconds,
            "scaled_used": self.scaled_used,
            "flags": self.flags,
            "sentence": self.sentence(),
        }


def find_idle_gpus(target: Target, plan: Plan, model_size: ModelSize) -> IdleGpus | None:
    """The smallest scale that uses the most GPUs; None where none idles.

    An epoch keeps at least one whole batch.
    """
    devices = target.hardware.devices
    if plan.device != "cuda" or plan.processes >= devices:
        return None
    now = _seconds(target, plan, model_size)
    best: IdleGpus | None = None
    for scaled, scale in _scaled_targets(target):
        try:
            found = scaled.plan(model_size)
        except UserError:
            break
        if found.processes > (best.scaled_used if best else plan.processes):
            best = IdleGpus(
                devices=devices,
                used=plan.processes,
                scale=scale,
                seconds=now,
                scaled_seconds=_seconds(scaled, found, model_size),
                scaled_used=found.processes,
                steps=scaled.recipe.steps,
            )
        if found.processes == devices:
            break
    if best and best.scaled_seconds * LEAST_GAIN <= now:
        return best
    return IdleGpus(
        devices=devices, used=plan.processes, scale=1, seconds=now, scaled_seconds=now,
        scaled_used=plan.processes,
    )  # fmt: skip


def _seconds(target: Target, plan: Plan, size: ModelSize) -> float:
    return run_time(plan, target.recipe, target.facts, target.task, size, target.hardware).total


def _scaled_targets(target: Target) -> Iterator[tuple[Target, int]]:
    """The target at growing global batches, over the same number of samples."""
    scale = 2
    while scale <= LARGEST_SCALE and scale * target.recipe.batch_size <= target.facts.samples["train"]:
        scaled = target.scaled(scale)
        if (steps := target.recipe.steps) is not None:
            fewer = tuple(math.ceil(s / scale) for s in steps)
            scaled = dataclasses.replace(scaled, recipe=dataclasses.replace(scaled.recipe, steps=fewer))
        yield scaled, scale
        scale *= 2
