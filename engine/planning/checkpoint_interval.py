"""How often to save where machines fail: the interval between checkpoints that loses the least time."""

from __future__ import annotations

import math


def best_interval(save: float, between_failures: float) -> float:
    """Seconds between checkpoints that lose least (Young 1974, with Daly's term of 2006); all in seconds."""
    return max(save, math.sqrt(2 * save * between_failures) - save)


def expected_goodput(interval: float, save: float, restart: float, between_failures: float) -> float:
    """Share of the time that a run computes steps which are not lost; all arguments in seconds.

    Complete model of Daly 2006 (Future Generation Computer Systems 22), equation 20, for failures by chance.
    `restart`: from a failure to the next step.
    """
    segments = math.expm1(min(700.0, (interval + save) / between_failures))
    return interval / (between_failures * math.exp(min(700.0, restart / between_failures)) * segments)
