"""A plan in six lines and its reasons; prices, deadlines, machines side by side."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.measures import parse_duration
from isobatch.core.plan import PlanOptions
from isobatch.engine.machine.hardware import parse_hardware
from isobatch.engine.planning import calibration, estimate
from isobatch.engine.planning.comparison import Comparison, compare, format_comparison, reasons, six_lines
from isobatch.engine.planning.estimate import Target, parse_prices, price_per_hour
from isobatch.engine.registry import workload

CAUSAL_LM = workload("causal-lm")


def target(machine: str, length: int = 128, samples: int = 10_000, **asked: Any) -> Target:
    recipe, _ = CAUSAL_LM.complete({"model": "gpt2-124m", "max_length": length, **asked})
    extra = {"vocabulary": 50257, "assumed": True}
    facts = Facts(fingerprint="", folder="", samples={"train": samples}, lengths=(length,), extra=extra)
    return Target(machine, CAUSAL_LM, recipe, facts, parse_hardware(machine), PlanOptions())


def compared(*machines: str, price: str | None = None, deadline: float | None = None) -> Comparison:
    return compare("--compare", [target(m, batch_size=64) for m in machines], parse_prices(price), deadline)


@pytest.mark.parametrize(
    ("text", "seconds"), [("6h", 21600), ("1d12h", 129600), ("1.5h", 5400), ("6", None), ("30m1h", None)]
)
def test_a_duration_has_units(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ValueError, match="is no time such as 6h"):
            parse_duration(text)
    else:
        assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("machine", "text", "per_hour"),
    [
        ("4x8xh100", "2.10/h", 32 * 2.1),
        ("cpu:2x24gb", "2.1", 2.1),
        ("8xh100", "h100=3, RTX 4090=0.5/h", 24.0),
        ("8x4090", "h100=3, RTX 4090=0.5/h", 4.0),
        ("t4", "h100=3", None),
    ],
)
def test_a_price_is_of_one_gpu_of_any_or_of_some_card(
    machine: str, text: str, per_hour: float | None
) -> None:
    assert price_per_hour(parse_hardware(machine), parse_prices(text)) == pytest.approx(per_hour)


@pytest.mark.parametrize("text", ["cheap", "0/h", "h10=3", "h100=0"])
def test_wrong_prices_are_one_line(text: str) -> None:
    with pytest.raises(UserError, match="--price") as caught:
        parse_prices(text)
    assert "\n" not in str(caught.value)


def test_the_cheapest_in_time_is_named() -> None:
    """The t4 costs least by the hour and by the run, and is too slow for the deadline."""
    prices = "t4=1,h100=1"
    free = compared("t4", "h100", price=prices)
    t4, h100 = free.estimates
    assert t4.seconds
    assert h100.seconds
    assert t4.cost
    assert h100.cost == pytest.approx(h100.seconds / 3600)
    between = (t4.seconds + h100.seconds) / 2
    found = compared("t4", "h100", deadline=between)
    assert found.cheapest is None
    found = compared("t4", "h100", price=prices, deadline=between)
    assert found.cheapest is found.fastest is found.estimates[1]
    assert "cheapest within" in format_comparison(found)
    late = compared("t4", "h100", price=prices, deadline=h100.seconds / 2)
    assert late.cheapest is None
    assert "none ends within" in format_comparison(late)


def test_one_price_for_several_kinds_of_card_names_no_cheapest() -> None:
    found = compared("t4", "8xh100", price="1")
    assert found.cheapest is None
    said = format_comparison(found)
    assert "fastest: 8xh100" in said
    assert "--price h100=" in said
    assert compared("h100", "8xh100", price="1").cheapest is not None


def test_one_that_does_not_fit_says_why_beside_those_that_do() -> None:
    found = compare("--compare", [target("rtx3050-laptop", 8192), target("h100", 8192)], {}, None)
    assert [bool(e.plan) for e in found.estimates] == [False, True]
    assert "rtx3050-laptop: --assume-length: one sample of" in format_comparison(found)
    row = found.to_dict()["rows"][0]
    assert (row["fits"], row["run_seconds"], row["cost"]) == (False, None, None)


def test_what_fits_nowhere_says_why_on_the_largest() -> None:
    long = [target(machine, 200_000) for machine in ("t4", "rtx3050-laptop")]
    why = r"fits none of them; t4: --assume-length: one sample of 200000 .*; lower --assume-length, take"
    with pytest.raises(UserError, match=why):
        compare("--compare t4,rtx3050-laptop", long, {}, None)


MACHINES = (
    "rtx4080-laptop",
    "8xa100-80gb",
    "4x8xh100",
    "72x8xh200",
    "t4",
    "cpu:2x24gb",
    "cpu:256x1024gb",
    "mps",
)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_plan_is_six_lines_of_80_characters_in_one_unit_of_memory(machine: str) -> None:
    """Short runs and runs of years, cheap and dear, in time or not; the reasons keep to a pipe's 100."""
    for steps, price, deadline in itertools.product((2, 500_000), (None, "99.99"), (None, 1.0, 1e7)):
        found = estimate.estimate(target(machine, steps=[steps], batch_size=64), parse_prices(price))
        lines = six_lines(found, deadline).splitlines()
        names = ["memory", "devices", "time", "cost", "batch", "exactness"]
        assert [line.split()[0] for line in lines] == names, lines
        assert max(map(len, lines)) <= 80, lines
        assert ("an hour" if price else "--price") in lines[3]
        table = reasons(found)
        assert max(map(len, table.splitlines())) <= 100
        assert not re.search(r"\d [KM]?B\b", table + lines[0])


def test_the_interval_of_a_measured_processor_is_that_of_the_measured_runs() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "predictions-amd-epyc.json"
    rows = json.loads(file.read_text())["rows"]
    missed = [row["cold measured run"] / row["cold run"] for row in rows if "cold run" in row]
    low, high = calibration.RUN_ERROR
    assert sum(low <= one <= high for one in missed) == 25
    assert len(missed) == 27


def test_a_wide_interval_says_uncalibrated_and_a_busy_machine_how_much_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = estimate.estimate(target("h100"), {})
    low, high = found.interval
    assert (low * 2, high) < (found.seconds, 2 * high)
    assert "uncalibrated" in six_lines(found)
    here = dataclasses.replace(parse_hardware("cpu:2x24gb"), source="detected")
    monkeypatch.setattr(estimate.os, "getloadavg", lambda: (3.0, 0.0, 0.0))
    monkeypatch.setattr(estimate.os, "cpu_count", lambda: 2)
    assert "busy" not in six_lines(estimate.estimate(target("cpu:2x24gb"), {}))
    found = estimate.estimate(dataclasses.replace(target("cpu:2x24gb"), hardware=here), {})
    assert found.is_measured
    assert "busy now: 2.5 times as long" in six_lines(found)
