"""The verdict of the posterior monitor: from the figures of its reports to a state and a sentence."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from isobatch.models.sequence_vae.posterior import ACTIVE

if TYPE_CHECKING:
    from collections.abc import Sequence

State = Literal["starting", "healthy", "collapsing", "collapsed"]
STATES: tuple[State, ...] = ("starting", "healthy", "collapsing", "collapsed")
COLLAPSED_KL = 0.1
"""Nats per sample below which a posterior without active units has collapsed, and another is collapsing."""
RECOVERED_KL = 0.2
"""Nats per sample above which a posterior that was collapsing is healthy again."""
FALLING_REPORTS, FALL = 3, 0.98
"""A KL falls where each of so many reports in a row has less than this share of the one before."""
FORECAST_REPORTS = 10
"""A KL that falls is collapsing where, at this rate, it is below COLLAPSED_KL within so many reports."""
IDLE_KL, IDLE_SHARE = 1.0, 0.25
"""A KL above so many nats of which less than this share is mutual information is paid for little."""
NAMED_DIMENSIONS = 8
"""Dimensions that a sentence lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One report: means over the window; nats per sample unless said otherwise."""

    step: int
    """Optimizer steps taken."""
    full: bool
    """Whether the window is full, or the phase ends."""
    kl_per_dimension: list[float]
    variance: list[float]
    """Of the posterior mean over the data, per dimension."""
    reconstruction: float
    """-log p(x|z)."""
    mutual_information: float
    ceiling: float
    """Log of the number of samples in the window: the largest mutual information it can show."""
    shuffle_gap: float | None = None
    """How much worse the decoder predicts with another sample's latent vector; None before it is known."""
    points: list[list[float]] | None = None
    """A projection of posterior means to two dimensions."""

    @property
    def kl(self) -> float:
        return sum(self.kl_per_dimension)

    @property
    def active(self) -> list[int]:
        """Numbers of the active dimensions."""
        return [number for number, value in enumerate(self.variance) if value > ACTIVE]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What a verdict needs of earlier reports."""

    state: State = "starting"
    since: int = 0
    """Step of the report in which the state began; for collapsing, in which the KL began to fall."""
    kl: float = 0.0
    """Of the report before."""
    falling: int = 0
    """Reports in a row in which the KL fell."""
    falling_since: int = 0
    last_active: tuple[int, ...] = field(default=())
    """Dimension -> step of the last report in which it was active; 0 for never."""

    @classmethod
    def size(cls, latent: int) -> int:
        """Numbers in `pack`."""
        return 5 + latent

    def pack(self) -> np.ndarray:
        """As numbers, for a buffer."""
        scalars = [STATES.index(self.state), self.since, self.kl, self.falling, self.falling_since]
        return np.array([*scalars, *self.last_active])

    @classmethod
    def unpack(cls, values: Sequence[float]) -> History:
        state, since, kl, falling, falling_since = values[:5]
        return cls(
            state=STATES[int(state)],
            since=int(since),
            kl=float(kl),
            falling=int(falling),
            falling_since=int(falling_since),
            last_active=tuple(int(v) for v in values[5:]),
        )


def has_collapsed(active: int, kl: float, mutual_information: float) -> bool:
    """No unit is active, and either the KL or what it says of the input is nothing."""
    return active == 0 and min(kl, mutual_information) < COLLAPSED_KL


def judge(figures: Figures, before: History) -> History:
    """The history with this report: its state is the verdict."""
    falls = figures.full and before.kl > 0 and figures.kl < FALL * before.kl
    falling = before.falling + 1 if falls else 0
    falling_since = (before.falling_since or figures.step) if falls else 0
    active = set(figures.active)
    now = dataclasses.replace(
        before,
        kl=figures.kl,
        falling=falling,
        falling_since=falling_since,
        last_active=tuple(
            figures.step if number in active else last for number, last in enumerate(before.last_active)
        ),
    )
    state = _state(figures, before, falling)
    if state == before.state:
        return now
    return dataclasses.replace(
        now, state=state, since=(falling_since or figures.step) if state == "collapsing" else figures.step
    )


def _state(figures: Figures, before: History, falling: int) -> State:
    if not figures.full:
        return "starting"
    if has_collapsed(len(figures.active), figures.kl, figures.mutual_information):
        return "collapsed"
    least = COLLAPSED_KL if before.state in ("starting", "healthy") else RECOVERED_KL
    if min(figures.kl, figures.mutual_information) < least:
        rises = before.state == "starting" and figures.kl > before.kl
        return "starting" if rises else "collapsing"
    if falling >= FALLING_REPORTS:
        forecast = figures.kl * (figures.kl / before.kl) ** FORECAST_REPORTS
        return "collapsing" if forecast < COLLAPSED_KL else "healthy"
    return "healthy"


def sentence(figures: Figures, now: History, advice: str) -> str:
    """The verdict in plain words; `advice`: what to try where it is bad, empty for nothing."""
    kl, total = f"KL {figures.kl:.2f} nats", len(figures.variance)
    units = f"{len(figures.active) or 'none'} of {total} units active"
    carried = f"mutual information {figures.mutual_information:.2f} of at most {figures.ceiling:.2f} nats"
    if now.state == "starting":
        return f"no verdict on the posterior yet: {kl}, {units}"
    if now.state == "healthy":
        said = f"the posterior is healthy: {kl}, {units}, {carried}"
        if figures.kl < IDLE_KL or figures.mutual_information > IDLE_SHARE * figures.kl:
            return said
        return _with_advice(f"{said}; most of this KL says nothing of the input", advice)
    if now.state == "collapsing":
        silent = [n for n, last in enumerate(now.last_active) if last and n not in figures.active]
        falls = " and falling" if now.falling else ""
        gone = f"; no longer active: dimensions {_listed(silent)}" if silent else ""
        return _with_advice(
            f"the posterior is collapsing since step {now.since}: {kl}{falls}, {units}{gone}", advice
        )
    said = f"the posterior has collapsed (step {now.since}): {kl}, {units}, {carried}"
    return _with_advice(f"{said}: the decoder ignores the latent vector", advice)


def _with_advice(said: str, advice: str) -> str:
    return f"{said}; {advice}" if advice else said


def _listed(numbers: list[int]) -> str:
    named = ", ".join(map(str, numbers[:NAMED_DIMENSIONS]))
    more = len(numbers) - NAMED_DIMENSIONS
    return named + (f" and {more} more" if more > 0 else "")
