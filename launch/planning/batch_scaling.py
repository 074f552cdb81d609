"""`--scale-batch auto`: the largest global batch that a measurement allows and the machine can use."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError
from isobatch.engine.loading.prepare import prepare
from isobatch.engine.machine.detect import detect
from isobatch.engine.runs.run_folder import list_runs
from isobatch.launch.planning.critical_batch import OPTION, allowed_scale, measured_noise
from isobatch.launch.planning.estimate import Target, estimate

if TYPE_CHECKING:
    from isobatch.core.facts import Facts
    from isobatch.core.recipe import Recipe
    from isobatch.engine.machine.hardware import Hardware
    from isobatch.engine.optimization.noise_scale import NoiseScale
    from isobatch.launch.local.arguments import Request

SAME = (
    "task",
    "data",
    "model",
    "revision",
    "max_length",
    "train_fraction",
    "dropout",
    "optimizer",
    "options",
)
"""Fields that two recipes must share for the noise scale of one to say something of the other."""
LEAST_GAIN = 1.1
"""How many times faster a step's samples must pass for the machine to count as able to use a scale."""


def with_automatic_scale(request: Request, machine: Hardware | None = None) -> Request:
    """The request with the scale of --scale-batch auto in plain numbers, and a note that says why it is that.

    As it is where --scale-batch is not auto. `machine`: by default this one. Raises UserError.
    """
    if request.automatic_scale is None:
        return request
    facts = prepare(request.workload.make(request.recipe)[1])
    recipe, line = _scaled(request, facts, machine or detect())
    return dataclasses.replace(
        request, recipe=recipe, automatic_scale=None, notes=[*request.notes, f"--scale-batch auto: {line}"]
    )


def _scaled(request: Request, facts: Facts, machine: Hardware) -> tuple[Recipe, str]:
    """The recipe at the largest scale allowed, and why it is that one."""
    recipe = request.recipe
    found = _newest_measurement(request, facts)
    if found is None:
        where = request.run.out
        return recipe, f"1, as no run of it in {where} has measured its noise scale: train one with {OPTION}"
    name, noise = found
    allowed = allowed_scale(noise, recipe.batch_size)
    target = Target(
        name="here",
        workload=request.workload,
        recipe=recipe,
        facts=facts,
        hardware=machine,
        asked=request.plan,
    )
    scale = useful_scale(target, allowed)
    reason = f"{name} measured a noise scale of at least {noise.low:,.0f} samples"
    if scale < allowed:
        reason += f", which allows {allowed}, and this machine would be no faster"
    if scale == 1 or request.automatic_scale is None:
        return recipe, f"1: {reason}"
    scaled = recipe.scaled(scale, request.automatic_scale)
    return scaled, (
        f"{scale}, which is --batch-size {scaled.batch_size} --lr {scaled.lr:.6g}, another recipe: {reason}"
    )


def useful_scale(target: Target, allowed: int) -> int:
    """The smallest scale up to `allowed` beyond which samples pass no faster on the target's machine."""
    scale, now = 1, _seconds_per_sample(target, 1)
    for larger in (2**power for power in range(1, allowed.bit_length())):
        seconds = _seconds_per_sample(target, larger)
        if seconds is None or now is None:
            break
        if seconds * LEAST_GAIN <= now:
            scale, now = larger, seconds
    return scale


def _seconds_per_sample(target: Target, scale: int) -> float | None:
    """None where the scaled recipe does not fit, or an epoch holds no whole batch."""
    recipe = dataclasses.replace(target.recipe, batch_size=target.recipe.batch_size * scale)
    if scale > 1 and recipe.batch_size > target.facts.samples["train"]:
        return None
    found = estimate(dataclasses.replace(target, recipe=recipe), None)
    return found.plan.predicted_step_seconds / recipe.batch_size if found.plan else None


def _newest_measurement(request: Request, facts: Facts) -> tuple[str, NoiseScale] | None:
    """The newest run in --out of the same model and data that measured its noise scale."""
    for run in reversed(list(list_runs(Path(request.run.out).expanduser()))):
        try:
            alike = all(getattr(run.recipe, name) == getattr(request.recipe, name) for name in SAME)
            if alike and run.facts.fingerprint == facts.fingerprint and (noise := measured_noise(run)):
                return run.folder.name, noise
        except UserError:  # a damaged run measures nothing
            continue
    return None
