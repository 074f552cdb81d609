"""Tests of benchmarks/scale/fleet.py: goodput is what theory says, and host work is small."""

from __future__ import annotations

import math

import pytest

from isobatch.benchmarks.scale.fleet import best_interval, measure, simulated_goodput

YEARS = 30 * 365 * 86_400.0


@pytest.mark.parametrize("hours", [3, 12, 100])
def test_goodput_is_that_of_daly(hours: float) -> None:
    """Complete model of Daly 2006 (Future Generation Computer Systems 22), for exponential failures."""
    between, save, restart, interval = 3600.0 * hours, 30.0, 300.0, 900.0
    expected = interval / (between * math.exp(restart / between) * math.expm1((interval + save) / between))
    found = simulated_goodput(interval, save, restart, between, YEARS)
    assert found == pytest.approx(expected, rel=0.01)


def test_no_other_interval_loses_less() -> None:
    save, restart, between = 30.0, 300.0, 6 * 3600.0
    best = best_interval(save, between)
    found = simulated_goodput(best, save, restart, between, YEARS)
    for factor in (0.3, 0.5, 2, 3):
        assert simulated_goodput(factor * best, save, restart, between, YEARS) < found


def test_a_rank_works_little_for_a_batch_of_thousands() -> None:
    *rows, _, largest = measure(quick=True)  # the world of 16,384 is timed by nobody here
    assert [row["world"] for row in rows] == [8, 64, 512]
    assert all(row["padded cut ms"] < 50 for row in rows), "it was 207 ms and more at world 512"
    assert all(row["packed load max/mean"] < 1.03 for row in rows)
    assert largest["first batch, s"] < 10
    assert largest["peak memory, MB"] < 1000
