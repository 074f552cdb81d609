"""A plan in six lines and its reasons; prices, deadlines, machines side by side."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from isobatch.core import hub_cache
from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.measures import parse_duration
from isobatch.core.plan import PlanOptions
from isobatch.engine.machine.gpu_table import MACHINES as TABLE
from isobatch.engine.machine.hardware import parse_hardware
from isobatch.engine.planning import calibration, estimate
from isobatch.engine.planning.comparison import Comparison, compare, format_comparison, reasons, six_lines
from isobatch.engine.planning.estimate import Target, parse_prices, price_per_hour
from isobatch.engine.registry import workload
from isobatch.launch.commands.plan import PlanCommandOptions
from isobatch.launch.local.arguments import parse_request
from isobatch.launch.local.run_setup import planned_facts
from isobatch.models.causal_lm.known_models import KNOWN_MODELS
from isobatch.models.causal_lm.model_sizes import size_from_config

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
        ("cpu:2x24gb", "$2.1", 2.1),
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


def test_a_card_that_is_several_is_asked_about() -> None:
    with pytest.raises(UserError, match="is no price of a GPU's hour: did you mean a100-40gb or a100-80gb"):
        parse_prices("rtx3060=0.05,a100=1.60")


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
    found = compare("--compare", [target("rtx3050-laptop", 32_768), target("h100", 32_768)], {}, None)
    assert [bool(e.plan) for e in found.estimates] == [False, True]
    assert "rtx3050-laptop: one sample of" in format_comparison(found)
    row = found.to_dict()["rows"][0]
    assert (row["fits"], row["run_seconds"], row["cost"]) == (False, None, None)


def test_what_fits_nowhere_says_why_on_the_largest() -> None:
    long = [target(machine, 200_000) for machine in ("t4", "rtx3050-laptop")]
    why = r"fits none of them; t4: one sample of 200000 .*: --assume-length 50000, or memory of"
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
    for steps, price in itertools.product((2, 500_000), (None, "99.99")):
        found = estimate.estimate(target(machine, steps=[steps], batch_size=64), parse_prices(price))
        table = reasons(found)
        assert max(map(len, table.splitlines())) <= 100
        for deadline in (None, 1.0, 1e7):
            lines = six_lines(found, deadline).splitlines()
            names = ["memory", "devices", "time", "cost", "batch", "exactness"]
            assert [line.split()[0] for line in lines] == names, lines
            assert max(map(len, lines)) <= 80, lines
            assert ("an hour" if price else "--price") in lines[3]
            assert not re.search(r"\d [KM]?B\b", table + lines[0])


def test_a_plan_says_how_much_of_the_ram_it_takes_where_that_is_much() -> None:
    """Weights of 16 bits are built there before they are on the GPU, and what is offloaded stays."""

    def asked(model: str, machine: str, *flags: str) -> estimate.Estimate:
        return estimate.estimate(asked_for(f"Qwen/Qwen2.5-{model}", machine, *flags), {})

    lora = asked("7B", "rtx4090:24gb:32gb", "--adapter", "lora")  # 2 bytes of 7.6e9, and the adapter
    assert "host RAM   15.24 of 34.36 GB for the weights" in six_lines(lora)
    offloaded = asked("0.5B", "rtx3060:12gb:16gb", "--strategy", "zero3-offload")  # 20 bytes of 0.494e9
    assert "host RAM   9.88 of 17.18 GB for what is offloaded" in six_lines(offloaded)
    assert "host RAM" not in six_lines(asked("7B", "rtx4090:24gb:16gb", "--adapter", "qlora"))
    refused = asked("7B", "rtx4090:24gb:16gb", "--adapter", "lora").why_not
    assert refused.startswith(
        "a node's RAM has to hold 15.24 GB, and 80% of 17.18 GB may be used: --adapter q"
    )


def asked_for(model: str, machine: str, *more: str) -> Target:
    words = ["--task", "causal-lm", "--model", model, "--assume-length", "512", "--hardware", machine, *more]
    asked = parse_request(words, "plan", PlanCommandOptions)
    task, data = asked.workload.make(asked.recipe)
    facts = planned_facts(asked, task, data)
    return Target(machine, asked.workload, asked.recipe, facts, parse_hardware(machine), asked.plan)


FORMULA = [name for name, config in KNOWN_MODELS.items() if size_from_config(config)]
"""Models whose shape needs no torch."""


@pytest.mark.parametrize("card", TABLE)
def test_every_known_model_on_every_card_has_a_plan_or_flags_that_make_one(card: str) -> None:
    """Whatever a refusal names first can be typed, and then there is a plan."""
    for model in FORMULA[[*TABLE].index(card) % 8 :: 8]:  # another eighth of the models on each card
        first = asked_for(model, card)
        found = estimate.estimate(first, {})
        if found.plan:
            assert max(map(len, six_lines(found).splitlines())) <= 80
            assert found.plan.least_memory_bytes <= found.plan.usable_memory_bytes
            continue
        ways = re.split(", or ", found.why_not.removesuffix(" would do").rpartition("be used: ")[2])
        assert re.fullmatch(r"memory of \d+ GB", ways[-1]), found.why_not
        for way in ways[:-1]:
            count = re.fullmatch(r"(\d+) such GPUs", way)
            machine = f"{max(1, int(count[1]) // 8)}x{min(8, int(count[1]))}x{card}" if count else card
            length = way.split()[1] if way.startswith("--assume-length") else "512"
            flags = [] if count or way.startswith("--assume-length") else way.split()
            again = asked_for(model, machine, *flags)
            facts = dataclasses.replace(again.facts, lengths=(int(length),))
            assert estimate.estimate(dataclasses.replace(again, facts=facts), {}).plan, (model, way)


def test_rows_of_files_that_are_here_are_counted(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 77)
    (tmp_path / "text.txt").write_text("a word \n" * 1024)
    counts = [("rows.jsonl", (), 77), ("text.txt", (), 4), ("no", (), 10_000)]
    counts += [("text.txt", ("--assume-samples", "5"), 5)]
    for name, more, count in counts:
        found = asked_for("gpt2", "t4", "--data", str(tmp_path / name), *more)
        assert found.facts.samples == {"train": count}
    with pytest.raises(UserError, match="--assume-length"):
        parse_request(["--task", "causal-lm", "--assume-samples", "5"], "plan", PlanCommandOptions)


def test_a_model_that_is_not_here_is_answered_with_the_flag_that_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_cache, "is_reachable", lambda: False)
    for model in ("someone/unheard-of", "llama-3.1-8b"):
        with pytest.raises(UserError, match=rf"--model {model}: add --assume-length 512 .*; else: .*"):
            parse_request(["--task", "causal-lm", "--model", model], "plan", PlanCommandOptions)


@pytest.mark.parametrize(
    ("machine", "said"), [("2x8xh100", "1600 Gb/s assumed"), ("2x8xh100@100", "100 Gb/s")]
)
def test_the_network_between_nodes_is_said(machine: str, said: str) -> None:
    found = estimate.estimate(target(machine, 1024, batch_size=512), {})
    assert f"; {said} between nodes" in six_lines(found).splitlines()[1]


@pytest.mark.parametrize("batch", [7, 64, 100, 333])
def test_micro_batches_are_equal(batch: int) -> None:
    """Of 100 samples of which 41 fit: three of 34, not 41, 41 and 18."""
    for machine in ("t4", "rtx4080-laptop"):
        lines = six_lines(estimate.estimate(target(machine, 1024, batch_size=batch), {}))
        each, count = map(int, re.findall(r"micro-batch (\d+) x (\d+)", lines)[0])
        assert each * (count - 1) < batch <= each * count
        assert each - batch / count < 1


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
