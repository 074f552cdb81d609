"""What a variant is worth beside a base: rounds of both in turn, and the median of their ratios."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from isobatch.core.measures import now
from isobatch.engine.distributed.communicator import rank_and_world_size
from isobatch.engine.runs.classify_errors import classify
from isobatch.launch.measuring.trial import WARM_STEPS, Round, TrialSession, Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUND_SECONDS = 0.4
"""A round has as many steps as fit into this."""
LEAST_STEPS, MOST_STEPS = 4, 50
"""Loader processes bring their batches together: a single step would show none or all of a wait."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
Unit = Literal["samples", "tokens"]


@dataclass(slots=True)
class PairedRounds:
    """A variant beside the base: `ratios` above 1 are faster."""

    ratios: list[float] = field(default_factory=list)
    """Of each round: time of the base over that of the variant, for a sample (or a token)."""
    base: list[Round] = field(default_factory=list)
    variant: list[Round] = field(default_factory=list)
    warm_seconds: float = 0.0
    """Of the variant's first steps, with its compilation."""
    peak: int = 0
    """Most bytes of tensors at once in a step of the variant, beyond those between steps; 0 if not asked."""
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

    @property
    def helps(self) -> bool:
        """Whether it is faster, beyond the noise of the rounds."""
        return (
            not self.problem
            and len(self.ratios) >= LEAST_ROUNDS
            and self.ratio > 1 + max(LEAST_GAIN, 2 * self.spread)
        )

    def beats(self, noise: PairedRounds) -> bool:
        """Whether it is faster, and by more than the base beside itself seemed to be."""
        return self.helps and self.ratio > 1 + abs(noise.ratio - 1) + noise.spread

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        if self.problem:
            return {"problem": self.problem}
        return {
            "ratio": self.ratio,
            "spread": self.spread,
            "helps": self.helps,
            "rounds": len(self.ratios),
            "base_step_seconds": median(r.step_seconds for r in self.base),
            "step_seconds": median(r.step_seconds for r in self.variant),
            "warm_seconds": self.warm_seconds,
            "peak": self.peak,
        }


LEAST_GAIN = 0.03
"""What is less than this faster counts as the same."""


def compare(
    base: TrialSession,
    variant: Variant,
    end: float,
    unit: Unit = "samples",
    limit: float = math.inf,
    memory: bool = False,
) -> PairedRounds:
    """Rounds of the base, which is open and warm, and of a variant, until about `end` (as of `now`).

    At least LEAST_ROUNDS, but nothing goes on after `limit`. What goes wrong with the variant is told and not
    raised: others are measured after it. `memory`: take the peak of a step, too.
    """
    found = PairedRounds()
    try:
        with _ends_at(limit), TrialSession(variant, base.world) as trial:
            trial.warm_up()
            found.warm_seconds = trial.warm_seconds

            def enough(next_end: float) -> bool:
                rounds = len(found.ratios)
                return rounds >= MOST_ROUNDS or next_end > (end if rounds >= LEAST_ROUNDS else limit)

            _alternate(base, trial, found, unit, enough)
            if memory and found.ratios:
                found.peak = trial.peak_of_step()
    except _TimeIsOverError:
        pass
    except Exception as error:
        found.problem = explain(error)
    if not found.ratios and not found.problem:
        found.problem = "no time was left to measure it"
    return found


class _TimeIsOverError(BaseException):
    """The time of a comparison is over; no library may catch it as an error of its own."""


@contextlib.contextmanager
def _ends_at(limit: float) -> Iterator[None]:
    """Inside, _TimeIsOverError is raised at `limit`: a compilation cannot be asked to stop.

    Only in the main thread of a process that trains alone: others would wait for it.
    """
    alone = rank_and_world_size(os.environ)[1] == 1
    if limit == math.inf or not alone or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _TimeIsOverError

    before = signal.signal(signal.SIGALRM, stop)
    # Once more each second: Python drops what is raised within a finalizer or a callback of the collector.
    signal.setitimer(signal.ITIMER_REAL, max(1e-3, limit - now()), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _alternate(
    base: TrialSession, trial: TrialSession, found: PairedRounds, unit: Unit, enough: Callable[[float], bool]
) -> None:
    steps, length = steps_per_round(base), 0.0
    # Every rank takes as many rounds as rank 0's clock allows.
    while not trial.world.broadcast_object(enough(now() + length)):
        began = now()
        order = (base, trial) if len(found.ratios) % 2 == 0 else (trial, base)
        rounds = {one: one.round(steps) for one in order}
        found.base.append(rounds[base])
        found.variant.append(rounds[trial])
        found.ratios.append(_cost(rounds[base], unit) / _cost(rounds[trial], unit))
        length = now() - began


def _cost(some: Round, unit: Unit) -> float:
    return some.seconds / max(1, some.samples if unit == "samples" else some.tokens)


def steps_per_round(base: TrialSession) -> int:
    """As many steps as fit into ROUND_SECONDS by the base's warm steps; the same on every rank."""
    step = base.warm_seconds / WARM_STEPS
    most = min(MOST_STEPS, base.active.schedule.steps - base.fill_steps)
    steps = max(1, min(most, max(LEAST_STEPS, int(ROUND_SECONDS / step))))
    return int(base.world.broadcast_object(steps))


def explain(error: Exception) -> str:
    """A problem in one line."""
    known = classify(error)
    text = str(known if known is not None else error).strip() or type(error).__name__
    return text.splitlines()[0][:200]
