"""Trials: the steps of a variant, in rounds that alternate with those of the base; the median ratio counts.

    with TrialSession(setup.base, world) as base:
        base.warm_up()
        found = compare(base, setup.variant({"prefetch": 8}), end=now() + 10)

A round loads its data anew, so that nothing is fetched ahead of it while another trial runs.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from isobatch.core.measures import now
from isobatch.engine.runs.classify_errors import classify
from isobatch.engine.training.session import Session
from isobatch.models.attention_functions import register_again, registered_attention

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from isobatch.core.plan import Precision
    from isobatch.engine.distributed.communicator import Communicator
    from isobatch.engine.loading.loader import LoadedStep
    from isobatch.engine.training.session import ActivePhase
    from isobatch.launch.measuring.measures import Unit
    from isobatch.launch.measuring.setup import Variant

WARM_STEPS = 2
ROUND_SECONDS = 0.4
"""A round has as many steps as fit into this."""
LEAST_STEPS, MOST_STEPS = 4, 50
"""Loader processes bring their batches together: a single step would show none or all of a wait."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
LEAST_GAIN = 0.03
"""What is less than this faster counts as the same."""
NO_TIME = "no time was left to measure it"


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
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)
        for name in ("session", "active"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def warm_up(self) -> None:
        """First steps: buffers are made, graphs compiled."""
        began = now()
        for loaded in self.batches(WARM_STEPS):
            self.active.step(loaded)
        self.synchronize()
        self.warm_seconds = now() - began

    def round(self, steps: int, unit: Unit = "samples") -> float:
        """So many steps: seconds for a sample, or for a token without padding.

        The first steps do not count: the loader begins, and its processes bring a batch each.
        """
        began, done, fill = 0.0, 0, 1 + self.variant.plan.workers
        for number, loaded in enumerate(self.batches(fill + steps), start=1):
            self.active.step(loaded)
            if number > fill:
                done += len(loaded.work.samples) if unit == "samples" else loaded.work.tokens
            if number == fill:
                self.synchronize()
                began = now()
        self.synchronize()
        return (now() - began) / max(1, done)

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

    def steps_per_round(self) -> int:
        """As many steps as fit into ROUND_SECONDS by the warm steps; the same on every rank."""
        fitting = int(ROUND_SECONDS * WARM_STEPS / self.warm_seconds)
        return int(self.world.broadcast_object(min(MOST_STEPS, max(LEAST_STEPS, fitting))))

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


@dataclass(slots=True)
class PairedRounds:
    """A variant beside the base: `ratios` above 1 are faster."""

    ratios: list[float] = field(default_factory=list)
    """Of each round: time of the base over that of the variant, for a sample (or a token)."""
    warm_seconds: float = 0.0
    """Of the variant's first steps, with its compilation."""
    problem: str = ""
    """Why there is no figure."""

    @property
    def ratio(self) -> float:
        """The median over the rounds; 0 without any."""
        return median(self.ratios) if self.ratios else 0.0

    @property
    def spread(self) -> float:
        """Median distance of a round's ratio from the median, as a share of it."""
        return median(abs(r - self.ratio) for r in self.ratios) / self.ratio if self.ratios else 0.0

    def beats(self, noise: PairedRounds) -> bool:
        """Whether it is faster, beyond the noise of its rounds, and of the base beside itself."""
        if self.problem or len(self.ratios) < LEAST_ROUNDS:
            return False
        return self.ratio > 1 + max(LEAST_GAIN, 2 * self.spread, abs(noise.ratio - 1) + noise.spread)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        if self.problem:
            return {"problem": self.problem}
        rounds = {"ratio": self.ratio, "spread": self.spread, "rounds": len(self.ratios)}
        return {**rounds, "warm_seconds": self.warm_seconds}


def compare(
    base: TrialSession, variant: Variant, end: float, unit: Unit = "samples", limit: float = math.inf
) -> PairedRounds:
    """Rounds of the base, which is open and warm, and of a variant, until about `end` (as of `now`).

    At least LEAST_ROUNDS, but none begins that would end after `limit`. What goes wrong with the variant is
    told and not raised: others are measured after it.
    """
    found = PairedRounds()
    try:
        with TrialSession(variant, base.world) as trial:
            trial.warm_up()
            found.warm_seconds = trial.warm_seconds
            alternate(base, trial, found, unit, end, limit)
    except Exception as error:
        known = classify(error)
        text = str(known if known is not None else error).strip() or type(error).__name__
        found.problem = text.splitlines()[0][:200]
    if not found.ratios and not found.problem:
        found.problem = NO_TIME
    return found


def alternate(
    base: TrialSession, trial: TrialSession, found: PairedRounds, unit: Unit, end: float, limit: float
) -> None:
    """Add rounds of both to `found`, in turn, which of them is first too."""
    steps, length = base.steps_per_round(), 0.0
    while True:
        began, rounds = now(), len(found.ratios)
        goes_on = rounds < MOST_ROUNDS and began + length <= (end if rounds >= LEAST_ROUNDS else limit)
        if not base.world.broadcast_object(goes_on):  # every rank takes as many as rank 0's clock allows
            return
        order = (base, trial) if rounds % 2 == 0 else (trial, base)
        costs = {one: one.round(steps, unit) for one in order}
        found.ratios.append(costs[base] / costs[trial])
        length = now() - began
