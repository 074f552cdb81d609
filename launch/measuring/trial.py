"""A trial: the steps of a recipe under a plan, in rounds that alternate with those of other trials.

    with TrialSession(variant, world) as trial:
        trial.warm_up()
        seconds = trial.round(4)

A round loads its data anew, so that nothing is fetched ahead of it while another trial runs.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from isobatch.core.facts import Facts
from isobatch.core.plan import Plan
from isobatch.core.recipe import Recipe
from isobatch.engine.profiling.memory import peak_of_tensors
from isobatch.engine.training.session import Session
from isobatch.models.attention_functions import register_again, registered_attention

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from isobatch.core.plan import Precision
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.loading.loader import LoadedStep
    from isobatch.engine.training.active_phase import ActivePhase

WARM_STEPS = 2


@dataclass(frozen=True, slots=True)
class Variant:
    """What a trial runs."""

    recipe: Recipe
    plan: Plan
    facts: Facts
    fused: bool = True
    """Whether the optimizer may use its fused kernel."""


@dataclass(frozen=True, slots=True)
class Round:
    """Consecutive steps of a trial."""

    seconds: float
    steps: int
    samples: int
    tokens: int
    """Without padding."""

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps


class TrialSession:
    """A session of a variant that stands in its last phase and runs steps when asked."""

    def __init__(self, variant: Variant, world: Communicator) -> None:
        self.variant = variant
        self.world = copy.copy(world)
        self.world.plan = variant.plan
        self.world.accelerator = _OwnPrecision(world.accelerator, variant.plan.precision)
        self.session: Session
        self.active: ActivePhase
        self.warm_seconds = 0.0
        """Of the first steps, with what is compiled in them."""
        self._step = 0
        self._open = contextlib.ExitStack()

    def __enter__(self) -> TrialSession:
        plan = self.variant.plan
        self.session = Session(self.variant.recipe, self.variant.facts, plan, self.world)
        self._open.callback(self.session.__exit__)
        for schedule in self.session.schedules[:-1]:
            self.session.prepare_phase(schedule)
        self.active = self._open.enter_context(self.session.phase(self.session.schedules[-1]))
        self._attention = registered_attention()
        if not self.variant.fused:
            forbid_fused(getattr(self.active.strategy, "optimizer", None))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)
        for name in ("session", "active"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def phase(self) -> str:
        """The phase whose steps are measured: the last."""
        return self.active.schedule.name

    @property
    def fill_steps(self) -> int:
        """First steps of a round that do not count: the loader begins, its processes bring a batch each."""
        return 1 + self.variant.plan.workers

    def warm_up(self) -> None:
        """First steps: buffers are made, graphs compiled."""
        began = time.perf_counter()
        for loaded in self.batches(WARM_STEPS):
            self.active.step(loaded)
        self.synchronize()
        self.warm_seconds = time.perf_counter() - began

    def round(self, steps: int) -> Round:
        """So many steps, timed."""
        began, samples, tokens, fill = 0.0, 0, 0, self.fill_steps
        for number, loaded in enumerate(self.batches(fill + steps)):
            self.active.step(loaded)
            if number >= fill:
                samples, tokens = samples + len(loaded.work.samples), tokens + loaded.work.tokens
            if number == fill - 1:
                self.synchronize()
                began = time.perf_counter()
        self.synchronize()
        return Round(time.perf_counter() - began, steps, samples, tokens)

    def batches(self, count: int) -> Iterator[LoadedStep]:
        """The next `count` steps; from the phase's first again where it has no more. No more is fetched."""
        plan, whole = self.variant.plan, self.active.schedule.steps
        torch.set_num_threads(plan.threads or torch.get_num_threads())
        register_again(self._attention)
        if self._step + count > whole:
            self._step = 0
        while count:
            taken = min(count, whole - self._step)
            stream: Any = self.active.batches(self._step, whole)
            for _ in range(taken):
                yield next(stream)
            stream.close()
            self._step, count = (self._step + taken) % whole, count - taken

    def peak_of_step(self) -> int:
        """Most bytes of tensors at once in the phase's first step, beyond those between steps."""
        self._step = 0

        def step() -> None:
            for loaded in self.batches(1):
                self.active.step(loaded)

        return peak_of_tensors(step, self.world.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


class _OwnPrecision:
    """An accelerator with a precision of its own: accelerate has one for the whole process."""

    def __init__(self, accelerator: Any, precision: Precision) -> None:
        self._accelerator, self._precision = accelerator, precision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def autocast(self) -> AbstractContextManager[Any]:
        if self._precision == "fp32":
            return contextlib.nullcontext()
        kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[self._precision]
        return torch.autocast(self._accelerator.device.type, kind)


def forbid_fused(optimizer: Any) -> None:
    """Let torch's optimizer step parameter by parameter, as without its fused kernel."""
    for group in getattr(optimizer, "param_groups", ()):
        group.update({name: False for name in ("fused", "foreach") if name in group})
