"""Prices, deadlines, machines side by side."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.errors import UserError
from isobatch.core.facts import Facts
from isobatch.core.flags import Interval
from isobatch.core.measures import parse_duration
from isobatch.core.plan import PlanOptions
from isobatch.engine.machine.hardware import parse_hardware
from isobatch.engine.registry import workload
from isobatch.engine.runs.run_options import RunOptions
from isobatch.launch.commands.plan import plan
from isobatch.launch.planning.comparison import Comparison, compare, format_comparison
from isobatch.launch.planning.estimate import estimate, what_would_fit
from isobatch.launch.planning.machines import Prices, machine_key, parse_prices
from isobatch.launch.planning.targets import Target

if TYPE_CHECKING:
    from pathlib import Path

CAUSAL_LM = workload("causal-lm")


def target(machine: str, length: int = 128, samples: int = 10_000, **asked: Any) -> Target:
    recipe, _ = CAUSAL_LM.complete({"model": "gpt2-124m", "max_length": length, **asked})
    extra = {"vocabulary": 50257, "assumed": True}
    facts = Facts(fingerprint="", folder="", samples={"train": samples}, lengths=(length,), extra=extra)
    return Target(
        name=machine,
        workload=CAUSAL_LM,
        recipe=recipe,
        facts=facts,
        hardware=parse_hardware(machine),
        asked=PlanOptions(),
    )


def compared(*machines: str, price: Prices | None = None, deadline: float | None = None) -> Comparison:
    return compare("--compare", [target(m, batch_size=64) for m in machines], price, deadline)


def test_a_plan_says_how_often_to_save_where_machines_fail(capsys: pytest.CaptureFixture[str]) -> None:
    """Young 1974, with the plan's own time of a save, and the goodput of Daly's complete model (2006)."""
    words = ["--task", "causal-lm", "--model", "gpt2-124m", "--assume-length", "1024", "--hardware", "8xh100"]
    assert plan([*words, "--mtbf", "6h", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    found, parts = answer["failures"], answer["run"]["run_seconds_by_part"]
    save, restart, between = parts["save"], parts["start"] + parts["compile"], 6 * 3600
    assert (found["save_seconds"], found["restart_seconds"]) == pytest.approx((save, restart), abs=2e-3)
    interval = math.sqrt(2 * save * between) - save
    assert float(found["save_every"].removesuffix("m")) == pytest.approx(interval / 60, abs=0.5)
    kept = interval / (between * math.exp(restart / between) * math.expm1((interval + save) / between))
    assert found["goodput"] == pytest.approx(kept, abs=1e-5)
    assert found["run_seconds"] == pytest.approx(answer["run"]["run_seconds"] / kept, rel=1e-4)
    plan([*words, "--mtbf", "6h"])
    assert f"--save-every {found['save_every']} loses least" in capsys.readouterr().out
    RunOptions(save_every=Interval.parse(found["save_every"]))


def test_a_machine_that_fails_all_the_time_gets_no_time_of_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", "causal-lm", "--model", "gpt2-124m", "--assume-length", "1024", "--hardware", "8xh100"]
    plan([*words, "--mtbf", "1s"])
    assert "with a failure every 0:01 the run hardly gets on" in capsys.readouterr().out
    plan([*words, "--mtbf", "1s", "--json"])
    assert json.loads(capsys.readouterr().out)["failures"]["run_seconds"] is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("6h", 21600), ("90m", 5400), ("1d12h", 129600), ("1.5h", 5400), ("1h30m", 5400), ("5s", 5)],
)
def test_a_duration_has_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["6", "", "h", "-6h", "0h", "6 parsecs", "30m1h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no time such as 6h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("machine", "per_hour"),
    [("h100", 3.0), ("8xh100", 24.0), ("4x8xh100", 80.0), ("2x4xh100", 24.0), ("8x4090", 4.0), ("t4", None)],
)
def test_a_file_names_machines_nodes_or_single_gpus(
    machine: str, per_hour: float | None, tmp_path: Path
) -> None:
    """4x8xh100 has a price of its own; 8x4090 is eight of the one that is named with another spelling."""
    file = tmp_path / "prices.yaml"
    file.write_text("h100: 3\n4x8xH100: 80/h\nRTX4090: 0.5/h\n")
    prices = parse_prices(str(file))
    assert prices is not None
    assert prices.per_hour(parse_hardware(machine)) == per_hour


def test_one_price_is_of_one_gpu() -> None:
    prices = parse_prices("2.10/h")
    assert prices is not None
    assert prices.per_hour(parse_hardware("4x8xh100")) == pytest.approx(32 * 2.1)
    assert prices.per_hour(parse_hardware("cpu:2x24gb")) == 2.1


@pytest.mark.parametrize(
    ("text", "content", "hint"),
    [
        ("cheap", None, "is neither a price such as 2.10/h nor a file"),
        ("0/h", None, "must be above 0"),
        ("-1", None, "is neither a price"),
        ("FILE", "- 1\n- 2", "holds no lines such as"),
        ("FILE", "8xh100: [", "holds no lines such as"),
        ("FILE", "8xh10: 3", "did you mean 8xh100"),
        ("FILE", "8xh100: cheap", "cheap is no price an hour"),
        ("FILE", "8xh100: 0", "must be above 0"),
    ],
)
def test_wrong_prices_are_one_line(text: str, content: str | None, hint: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "prices").write_text(content)
        text = str(tmp_path / "prices")
    with pytest.raises(UserError, match=hint) as caught:
        parse_prices(text)
    assert "\n" not in str(caught.value)


def test_the_cheapest_in_time_is_named() -> None:
    """The t4 costs least by the hour and by the run, and is too slow for the deadline."""
    prices = Prices(per_machine={machine_key(parse_hardware(name)): 1.0 for name in ("t4", "h100")})
    free = compared("t4", "h100", price=prices)
    t4, h100 = free.estimates
    assert t4.seconds
    assert h100.seconds
    assert t4.cost
    assert h100.cost == pytest.approx(h100.seconds / 3600)
    between = (t4.seconds + h100.seconds) / 2
    found = compared("t4", "h100", price=Prices(per_machine=dict.fromkeys([], 1.0)), deadline=between)
    assert found.cheapest is None
    found = compared("t4", "h100", price=prices, deadline=between)
    assert found.cheapest is found.fastest is found.estimates[1]
    assert "cheapest within" in format_comparison(found, "machine")
    late = compared("t4", "h100", price=prices, deadline=h100.seconds / 2)
    assert late.cheapest is None
    assert "none ends within" in format_comparison(late, "machine")


def test_one_price_for_several_kinds_of_card_names_no_cheapest() -> None:
    found = compared("t4", "8xh100", price=Prices(per_gpu=1.0))
    assert found.cheapest is None
    said = format_comparison(found, "machine")
    assert "fastest: 8xh100" in said
    assert "one price for several kinds of card does not say: give a file" in said
    assert compared("h100", "8xh100", price=Prices(per_gpu=1.0)).cheapest is not None


def test_one_that_does_not_fit_says_why_beside_those_that_do() -> None:
    found = compare("--compare", [target("rtx3050-laptop", 8192), target("h100", 8192)], None, None)
    assert [e.fits for e in found.estimates] == [False, True]
    assert "rtx3050-laptop: --assume-length: one sample of" in format_comparison(found, "machine")
    row = found.to_dict()["rows"][0]
    assert (row["fits"], row["run_seconds"], row["cost"]) == (False, None, None)


def test_what_fits_nowhere_says_what_would_have_to_shrink() -> None:
    long = [target(machine, 200_000) for machine in ("t4", "rtx3050-laptop")]
    with pytest.raises(
        UserError, match=r"fits none of them; t4: .* it fits with .*--assume-length"
    ) as caught:
        compare("--compare t4,rtx3050-laptop", long, None, None)
    length = int(str(caught.value).rpartition(" ")[2])
    assert estimate(target("t4", length), None).fits
    assert not estimate(target("t4", 2 * length), None).fits


def test_what_would_fit_names_adapters_of_a_model_that_has_them() -> None:
    seven = target("rtx4090", 512, model="meta-llama/Llama-2-7b-hf")
    assert not estimate(seven, None).fits
    assert "--adapter qlora" in what_would_fit(seven)
